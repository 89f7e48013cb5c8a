// SPDX-License-Identifier: Apache-2.0
// What decode attention asks L2 for while the previous kernel still runs. A chain of dependent loads from memory (length,
// block table, K and V) would otherwise begin when that kernel ends: in a model the products between two layers push
// everything else out of L2. The previous kernel may still change any of it, so what is read here is a hint only: a
// prefetch of an old address costs time, not correctness, and nothing is left in L1.
#pragma once

#include "kernels/decode/params.h"
#include "tile/copy.cuh"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {

inline constexpr int prefetch_kv_bytes = 8 << 20;  // of K and V at most, the first pages of every row first

// The lengths, from which the work range follows.
__device__ __forceinline__ void prefetch_lengths(const DecodeParams& p) {
  const int b = threadIdx.x;
  if (b >= 32 || b >= p.batch) return;
  if (p.counts) tile::prefetch_l2(p.counts + b);
  if (p.rows) return tile::prefetch_l2(p.rows + b);  // the cache rows are unknown until p.rows is read
  if (b >= p.cache.max_rows) return;
  tile::prefetch_l2(p.cache.lengths + b);
  if (p.cache.raw_from) tile::prefetch_l2(p.cache.raw_from + b);
}

// K and V that the rows' queries see. Called by one warp of every CTA; each lane takes one block of a page and KV head,
// with 16-bit rows one token of all KV heads.
template <KvFormat format>
__device__ __forceinline__ void prefetch_kv(const DecodeParams& p, int lane) {
  const KvCacheView& c = p.cache;
  const int ctas = static_cast<int>(gridDim.x * gridDim.y),
            item = static_cast<int>(blockIdx.x * gridDim.y + blockIdx.y) + ctas * lane, of_entry = item / p.batch,
            b = item - of_entry * p.batch;
  const int row = p.rows ? __ldcg(p.rows + b) : b;
  if (row < 0 || row >= c.max_rows) return;
  const int length = min(__ldcg(c.lengths + row), p.capacity);
  const int unseen = p.window > 0 ? max(length - p.window - p.tokens, 0) : 0;  // tokens before the window
  const auto page_of = [&](int index) {
    return c.block_table ? __ldcg(c.block_table + row * c.table_stride + index) : row * c.max_pages + index;
  };
  const auto is_page = [&](int page) { return page >= 0 && page < c.pages; };
  if constexpr (is_element_format(format)) {
    const int bytes = 2 * c.kv_heads * c.head_dim, token = unseen + of_entry, index = token / c.page_size;
    const bool contiguous = c.k.head_stride == 2 * c.head_dim && c.v.head_stride == 2 * c.head_dim && bytes % 16 == 0 &&
                            c.k.token_stride % 16 == 0 && c.v.token_stride % 16 == 0;
    if (!contiguous || token >= length || item >= prefetch_kv_bytes / (2 * bytes)) return;
    const int page = page_of(index);
    if (!is_page(page)) return;
    for (const KvCacheView::Plane* plane : {&c.k, &c.v})
      tile::prefetch_l2_bulk(
          plane->codes + page * plane->page_stride + (token - index * c.page_size) * plane->token_stride, bytes);
  } else {
    const int bytes = static_cast<int>(kv_block(format, c.page_size, c.head_dim).bytes),
              page_index = of_entry / c.kv_heads, head = of_entry - page_index * c.kv_heads,
              index = unseen / c.page_size + page_index;
    if (index * c.page_size >= length || item >= prefetch_kv_bytes / bytes) return;
    const int page = page_of(index);
    if (!is_page(page)) return;
    tile::prefetch_l2_bulk(c.k.codes + page * c.k.page_stride + head * c.k.head_stride, bytes);
    if constexpr (is_kivi(format)) {
      if (index != (length - 1) / c.page_size) return;
      // the raw tokens of the newest group, whose ring entries are neighbours
      const int group_bytes = 2 * kv_group * c.head_dim, entry = (length - 1) % c.ring_size / kv_group * kv_group;
      const std::int64_t at = 2 * ((std::int64_t{row} * c.kv_heads + head) * c.ring_size + entry) * c.head_dim;
      if (group_bytes % 16 != 0) return;
      tile::prefetch_l2_bulk(c.ring_k + at, group_bytes);
      tile::prefetch_l2_bulk(c.ring_v + at, group_bytes);
    }
  }
}

}  // namespace rooftile::gpu
