// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/op_args.h"
#include "kernels/decode/scheduler.h"

namespace rooftile::gpu {

struct DecodeParams {      // tensors travel whole, never as loose strides
  TensorView q, out, lse;  // [B, T, Hq, D]; lse [B, T, Hq] or absent
  TensorView sinks;        // [Hq] or absent
  KvCacheView cache;
  const std::int32_t *rows, *counts;  // [B] or null
  int batch, tokens;                  // B, T
  int q_per_kv;                       // column c of a KV head is query (c / q_per_kv, c % q_per_kv)
  int block_m, m_blocks;              // of a task, a multiple of 8; tasks of a KV head
  int rows_used;                      // of the first pass: the others have no more
  int tiles_per_entry;                // of a batch entry
  int capacity;                       // of a row, no more than an int32 counts
  int window;                         // likewise; 0: none
  float scale, softcap;
  bool vector_queries;  // every 8 elements of q lie side by side, on 16 bytes
  // Workspace.
  float* partial_o;           // [shares, slots_per_block, columns, D]
  float* partial_ml;          // [shares, slots_per_block, columns, 2]; l below 0: the row is left alone
  float* reduction_o;         // [blocks, fold_levels, columns, D]: left halves that wait long
  std::int32_t* work_prefix;  // [B + 2]: first unit of every batch entry, the total, whether all tasks are as long
  int ctas_per_tile;          // blocks of each task where all tasks are as long; 0: tasks share blocks
  int ctas, ctas_per_sm;      // layers: blocks of a multiprocessor, where the grid has as many for each
  int cluster_size;           // blocks of a task that merges its leaves itself; 1: a persistent grid, and combine
  Divisor by_q_per_kv, by_m_blocks, by_tiles_per_entry, by_ctas_per_tile, by_rows_used;
};

}  // namespace rooftile::gpu
