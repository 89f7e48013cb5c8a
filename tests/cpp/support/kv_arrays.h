// SPDX-License-Identifier: Apache-2.0
// The arrays of a KV cache, in memory that the caller allocates.
#pragma once

#include <algorithm>
#include <numeric>
#include <random>

#include "core/kv_layout.h"
#include "support/tensors.h"

namespace rooftile {

// What rows of these capacities (tokens) need.
struct KvPages {
  std::int64_t row = 0, all = 0;  // of the longest row; of all
  std::vector<std::int32_t>
      table;  // [rows, row], pages in random order, out of range where a row has none; empty: contiguous
};
inline KvPages deal_pages(const std::vector<std::int32_t>& capacity, int page_size, bool paged, unsigned seed) {
  const auto pages_of = [&](std::int32_t tokens) { return std::int64_t{(tokens + page_size - 1) / page_size}; };
  KvPages p;
  for (const std::int32_t tokens : capacity) {
    p.row = std::max(p.row, pages_of(tokens));
    p.all += pages_of(tokens);
  }
  if (!paged) {
    p.all = p.row * static_cast<std::int64_t>(capacity.size());
    return p;
  }
  std::vector<std::int32_t> order(static_cast<std::size_t>(p.all));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), std::mt19937(seed));
  for (const std::int32_t tokens : capacity)
    for (std::int64_t i = 0; i < p.row; ++i) {
      p.table.push_back(i < pages_of(tokens) ? order.back() : 1 << 30);
      if (i < pages_of(tokens)) order.pop_back();
    }
  return p;
}

// allocate(dtype, shape) -> a contiguous view, called once an array in one order. int32 arrays must be zeros. The block
// table, for which it is called first, is the caller's to fill; so is `fault`.
template <class Allocate>
KvCacheArrays kv_arrays(const KvCacheShape& s, const KvPages& pages, const Allocate& allocate) {
  KvCacheArrays a;
  if (!pages.table.empty()) a.block_table = allocate(DType::i32, {s.max_rows, s.max_pages});
  if (is_element_format(s.format)) {
    a.k_pool = allocate(s.dtype, {pages.all, s.page_size, s.kv_heads, s.head_dim});
    a.v_pool = allocate(s.dtype, {pages.all, s.page_size, s.kv_heads, s.head_dim});
  } else {
    const std::size_t block = kv_block_bytes(s.format, static_cast<int>(s.page_size), static_cast<int>(s.head_dim));
    a.pool = allocate(DType::u8, {pages.all, s.kv_heads, static_cast<std::int64_t>(block)});
  }
  a.lengths = allocate(DType::i32, {s.max_rows});
  if (is_kivi(s.format)) {
    a.ring_k = allocate(s.dtype, {s.max_rows, s.kv_heads, kv_ring, s.head_dim});
    a.ring_v = allocate(s.dtype, {s.max_rows, s.kv_heads, kv_ring, s.head_dim});
    a.raw_from = allocate(DType::i32, {s.max_rows});
  }
  return a;
}

}  // namespace rooftile
