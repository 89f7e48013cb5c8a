// SPDX-License-Identifier: Apache-2.0
// What the kernels of append and rope_append receive, and the constants that their parts share.
//   k, v [B, T, Hkv, D]   q, q_out [B, T, Hq, D]   cos, sin [max_position, pairs]   positions [B, T]
#pragma once

#include <cstdint>

#include "core/hd.h"
#include "core/kv_layout.h"

namespace rooftile::gpu {

inline constexpr int append_warps = 8;  // of a CTA
// Tokens that a lane holds of a slice of a closing group, 4 channels of each at a time. A slice of V has these 8 of the
// group's 32 tokens. A slice of K has 32 channels of all 32 tokens, of which a lane holds every fourth.
inline constexpr int append_slice_tokens = 8;
// Slices of a closing group of one head and side.
ROOFTILE_HD constexpr int append_slices(bool is_v, int head_dim) {
  return is_v ? kv_group / append_slice_tokens : padded_head_dim(head_dim) / 32;
}

struct TokenTensor {  // [B, T, H, D] of 16-bit elements
  void* data = nullptr;
  std::int64_t batch = 0, token = 0, head = 0, dim = 0;  // strides in elements
  bool vec4 = false;                                     // four neighbours may move in one 8-byte access
};

struct RopeTables {
  const void *cos = nullptr, *sin = nullptr;                              // [max_position, pairs]
  const void* positions = nullptr;                                        // [B, T]
  std::int64_t cos_row = 0, cos_column = 0, sin_row = 0, sin_column = 0;  // strides in elements
  std::int64_t position_batch = 0, position_token = 0;                    // strides in elements
  std::int64_t max_position = 0;
  int pairs = 0;
  bool fp32 = false;             // tables are fp32, else the cache's dtype
  bool int64_positions = false;  // else int32
  bool vec4 = false;             // four neighbouring pairs are one access, and no Vec4 straddles the two halves
};

struct AppendParams {
  KvCacheView c;
  TokenTensor k, v, q, q_out;
  RopeTables rope;                    // cos null: no rotation
  const std::int32_t *rows, *counts;  // [B] or null
  int batch, tokens, q_heads, log2_page_size;
  int log2_entry_ctas;        // 2^log2_entry_ctas CTAs share one batch entry
  bool one_cluster;           // the CTAs of an entry are one cluster; commit_lengths is not launched
  bool vec4_pool, vec4_ring;  // as TokenTensor::vec4
};

}  // namespace rooftile::gpu
