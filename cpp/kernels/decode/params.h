// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "core/op_args.h"

namespace rooftile::gpu {

// (m, l) of a node and column, each beside a mark that no memory holds by chance: 8 bytes arrive together.
struct MarkedNode {
  static constexpr std::uint32_t mark_m = 0x9e6c63d0u, mark_l = 0x876a5f3bu;
  unsigned long long m, l;
};

struct DecodeParams {                  // tensors travel whole, never as loose strides
  TensorView q, out, lse;              // [B, T, Hq, D]; lse [B, T, Hq] or absent
  TensorView sinks;                    // [Hq] or absent
  KvCacheView cache;
  const std::int32_t *rows, *counts;   // [B] or null
  int batch, tokens;                   // B, T
  int q_per_kv, passes;                // passes of 8 columns; column c of a KV head is query (c / q_per_kv, c % q_per_kv)
  float scale, softcap;
  std::int64_t window;
  // Workspace. What it holds beforehand does not matter.
  float* node_o;                       // [blocks, slots_per_block, columns, D]
  MarkedNode* node_ml;                 // [blocks, slots_per_block, columns]; l below 0: the row is left alone
  float* fold;                         // [blocks, deep_levels, columns, D]: left halves that wait long
  int blocks;
};

}  // namespace rooftile::gpu
