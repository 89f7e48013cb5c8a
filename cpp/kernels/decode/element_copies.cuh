// SPDX-License-Identifier: Apache-2.0
// The copies of a 16-bit cache's work tile: rows of K and V, global memory -> the KV tiles of a ring (kv_ring.cuh).
#pragma once

#include "kernels/decode/element_tile.cuh"
#include "kernels/decode/logits.cuh"
#include "kernels/decode/pages.cuh"
#include "kernels/decode/storage.cuh"

namespace rooftile::gpu {

template <class Traits>
class ElementCopies {
  using T = typename Traits::T;
  using Element = SmemElement<T>;
  static constexpr int D = Traits::D;
  using KvTile = ElementTile<T, D>;

 public:
  // next_head: the CTA's next work tile is the next KV head of the same cache row. page_shift: log2 of the page size.
  __device__ ElementCopies(const DecodeParams& p, SharedStorage<Traits>& smem, const WarpCoord<Traits>& at,
                           const WorkTile& tile, const RowWork& w, const VisibleRows<Traits>& see, bool next_head,
                           int page_shift)
      : p_(p),
        smem_(smem),
        at_(at),
        tile_(tile),
        w_(w),
        see_(see),
        next_head_(next_head),
        page_shift_(page_shift),
        k_head_(tile.kv_head * p.cache.k.head_stride),
        v_head_(tile.kv_head * p.cache.v.head_stride) {}
  __device__ void load(KvTile& kv_tile, int token, const Pages& pages) const {
    const Rows k = rows_of(p_.cache.k, k_head_, token, pages), v = rows_of(p_.cache.v, v_head_, token, pages);
    with_rows(token, [&](const auto& wanted) {
      copy(kv_tile.k, k, wanted);
      copy(kv_tile.v, v, wanted);
    });
  }
  __device__ void load_k(KvTile& kv_tile, int token, const Pages& pages) const {
    const Rows k = rows_of(p_.cache.k, k_head_, token, pages);
    with_rows(token, [&](const auto& wanted) { copy(kv_tile.k, k, wanted); });
  }
  __device__ void load_v(KvTile& kv_tile, int token, const Pages& pages) const {
    const Rows v = rows_of(p_.cache.v, v_head_, token, pages);
    with_rows(token, [&](const auto& wanted) { copy(kv_tile.v, v, wanted); });
  }
  __device__ void load_raw(int) const {}
  __device__ void load_queries() const {
    copy_queries_async<T, D, Traits::N, Traits::threads>(p_, tile_, w_, threadIdx.x, smem_.queries());
  }
  // Prefetches into L2 the tokens with which the ring begins the CTA's next work tile, so that memory is not idle while
  // this one ends. A thread takes rows of K and V.
  __device__ void prefetch_next_head() const {
    constexpr int tokens = Traits::stages * Traits::step_tokens;
    if (!next_head_) return;
    const RowPages<Traits::format> row_pages(p_.cache, w_, page_shift_);
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * tokens; i += Traits::threads) {
      const int token = w_.begin + i / 2;
      if (token >= w_.end) return;
      const Pages pages = row_pages.look_up(token);
      if (static_cast<unsigned>(pages.first) >= static_cast<unsigned>(p_.cache.pages)) return;
      const KvCacheView::Plane& plane = i % 2 == 0 ? p_.cache.k : p_.cache.v;
      const Rows rows = rows_of(plane, (i % 2 == 0 ? k_head_ : v_head_) + plane.head_stride, token, pages);
      tile::prefetch_l2_bulk(rows.first, D * 2);
    }
  }

 private:
  struct Rows {
    const std::byte* first;
    std::int64_t stride;  // bytes
  };
  __device__ Rows rows_of(const KvCacheView::Plane& plane, std::int64_t head, int token, const Pages& pages) const {
    const std::int64_t page_offset = token & (p_.cache.page_size - 1);
    const std::int64_t stride = plane.token_stride;
    return {plane.codes + pages.first * plane.page_stride + head + page_offset * stride, stride};
  }
  // Calls copy(wanted). wanted(i): whether a packed row sees the tile's token i; rows of other tokens become zeros. In
  // 16 bits the packed rows of a work tile see all tokens between their bounds.
  template <class Copy>
  __device__ void with_rows(int token, const Copy& copy) const {
    if (token >= see_.outer_begin && token + 16 <= see_.outer_end) copy([](int) { return true; });
    else copy([&](int i) { return see_.any(token + i); });
  }
  template <class Wanted>
  __device__ void copy(Element* to, const Rows& rows, const Wanted& wanted) const {
    copy_rows_async<T, D, Traits::tile_threads>(to, at_.tile_thread, rows.first, rows.stride, wanted);
  }

  const DecodeParams& p_;
  SharedStorage<Traits>& smem_;
  const WarpCoord<Traits>& at_;
  const WorkTile& tile_;
  const RowWork& w_;
  const VisibleRows<Traits>& see_;
  const bool next_head_;
  const int page_shift_;
  const std::int64_t k_head_, v_head_;  // byte offsets of the KV head
};

}  // namespace rooftile::gpu
