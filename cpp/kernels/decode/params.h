// SPDX-License-Identifier: Apache-2.0
// What split_kv and combine receive.
#pragma once

#include "core/op_args.h"
#include "kernels/decode/scheduler.h"

namespace rooftile::gpu {

struct DecodeParams {
  TensorView q, out, lse;  // q, out [B, T, Hq, D]; lse [B, T, Hq] or absent
  TensorView sinks;        // [Hq] or absent
  KvCacheView cache;
  const std::int32_t *rows, *counts;  // [B] or null: cache row and number of real queries of each batch entry
  int batch, tokens;                  // B, T
  int q_per_kv;                       // packed row r of a KV head is (new token r / q_per_kv, query head r % q_per_kv)
  int block_m, m_blocks;              // packed rows of a work tile (a multiple of mma_n); m-blocks of a KV head
  int rows_used;        // min(block_m, T * q_per_kv): packed rows of the first m-block that are not padding
  int tiles_per_entry;  // work tiles of a batch entry: KV heads x m_blocks
  int capacity;         // tokens of a cache row, clamped to int32
  int window;           // tokens that a query sees, itself included, clamped to int32; 0: all
  float scale, softcap;
  bool vector_queries;  // every 8 elements of a row of q are contiguous and aligned to 16 bytes
  // Workspace, fp32 but work_prefix: cost before each batch entry; then the total; then whether all work tiles have
  // the same length.
  float* partial_o;           // [ctas, partials_per_cta, block_m, D]
  float* partial_ml;          // [ctas, partials_per_cta, block_m, 2]: (m, l); l < 0: invalid page, out is not written
  float* reduction_o;         // [ctas, levels, values, threads]: left halves that wait, of the levels above smem_levels
  std::int32_t* work_prefix;  // [B + 2]
  int ctas_per_tile;          // CTAs that each work tile has to itself; 0: CTAs share work tiles (stream-K)
  int ctas, ctas_per_sm;      // grid size; grid.y: CTAs per SM, 1 unless every SM gets the same number
  int cluster_size;  // CTAs of a cluster that computes and reduces one work tile; 1: persistent grid and combine
  // Fast divisions by the fields of these names.
  Divisor by_q_per_kv, by_m_blocks, by_tiles_per_entry, by_ctas_per_tile;
};

}  // namespace rooftile::gpu
