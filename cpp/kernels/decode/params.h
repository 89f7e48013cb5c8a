// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/op_args.h"

namespace rooftile::gpu {

struct DecodeParams {                  // tensors travel whole, never as loose strides
  TensorView q, out, lse;              // [B, T, Hq, D]; lse [B, T, Hq] or absent
  TensorView sinks;                    // [Hq] or absent
  KvCacheView cache;
  const std::int32_t *rows, *counts;   // [B] or null
  int batch, tokens;                   // B, T
  int q_per_kv;                        // column c of a KV head is query (c / q_per_kv, c % q_per_kv)
  int columns, passes;                 // of a task, a multiple of 8; tasks of a KV head
  float scale, softcap;
  std::int64_t window;
  // Workspace.
  float* node_o;                       // [shares, slots_per_block, columns, D]
  float* node_ml;                      // [shares, slots_per_block, columns, 2]; l below 0: the row is left alone
  float* fold;                         // [blocks, fold_levels, columns, D]: left halves that wait long
  std::int32_t* row_begin;             // [B + 2]: first unit of every batch entry, the total, whether all tasks are as long
  int ranks;                           // blocks of each task where all tasks are as long; 0: tasks share blocks
  int blocks, layers;                  // layers: blocks of a multiprocessor, where the grid has as many for each
  int cluster;                         // blocks of a task that merges its leaves itself; 1: a persistent grid, and combine
};

}  // namespace rooftile::gpu
