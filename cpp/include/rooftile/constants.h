// SPDX-License-Identifier: Apache-2.0
// Numbers of the formats that callers have to know, from the headers that the kernels take them from.
#pragma once

#include <cstdint>
#include <span>

#include "rooftile/gemm.h"
#include "rooftile/kv_cache.h"

namespace rooftile {

struct Constants {
  int kv_group;       // tokens of a group of the kivi formats; also the largest T of decode_attention on such a cache
  int kv_ring;        // raw tokens that a row of a kivi cache keeps
  int kv_step_back;   // tokens that truncate can remove across a group boundary
  int max_head_dim;   // of attention and of caches
  int max_heads;      // of queries and of KV
  int max_head_norm;  // elements of a head of qk_rms_norm
  std::int64_t max_vocabulary;  // logits of a row of sample
  int w4_tile_rows;             // rows of W of a tile of the packed layout
};
Constants constants();

std::span<const int> kv_page_sizes();   // tokens of a page; kivi formats: not less than kv_group
std::span<const int> w4_group_sizes();  // largest first; a whole row of K is one too
// The dtype whose elements a format keeps as they are; null for formats of codes.
const DType* element_dtype(KvFormat f);
bool has_groups(KvFormat f);  // the kivi formats
bool has_minima(KvFormat f);

}  // namespace rooftile
