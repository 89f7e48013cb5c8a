// SPDX-License-Identifier: Apache-2.0
// The raw tokens of a kivi row, 63 at most (31 of an open group and a call's 32 new ones): KV tiles of 16 tokens in 16
// bits, at the end of the row's last split. K and V of a raw tile are its two halves.
#pragma once

#include "kernels/decode/element_tile.cuh"
#include "kernels/decode/logits.cuh"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/storage.cuh"

namespace rooftile::gpu {

// The raw tokens that a range of KV splits ends with.
template <class Traits>
struct RawTokens {
  static constexpr int N = Traits::N, warps_kv = Traits::warps_kv;
  using T = typename Traits::T;
  bool any;                // the range ends with raw tokens
  int first = 0;           // the row's first raw token
  int begin = 0, end = 0;  // raw tokens that any packed row sees
  // WarpRing: the warps take the raw tiles in turn, beginning with the warp that would take the next tile of codes. If
  // there are two raw tiles and that warp has a tile of codes less than others, it takes both at once. With 4 warps
  // and 5 tiles of codes, warp 0 has two and the others one: 20 raw tokens are two raw tiles, both warp 1's; with 4
  // tiles of codes warps 0 and 1 take one each.
  int token = 0;    // first token of this warp_kv's raw tiles
  int halves = 0;   // copies of this warp_kv, two for each raw tile: half 2 i is K of its tile i, half 2 i + 1 V
  int started = 0;  // halves whose copies have been started, in consecutive stages
  int stage = 0;    // stage of the first half

  // ends: the range ends with the row's last split.
  __device__ RawTokens(const DecodeParams& p, const WorkTile& tile, const RowWork& w, const WarpCoord<Traits>& at,
                       bool ends)
      : any(Traits::kivi && ends && w.raw) {
    if (!any) return;
    const VisibleRows<Traits> see(p, tile, w, at.lane, TokenPart::raw);
    begin = see.outer_begin;
    end = see.outer_end;
    first = max(w.length - w.count, 0) & ~(kv_group - 1);
    if constexpr (!Traits::cta_softmax) {
      const int tiles = (w.end - w.begin) / Traits::tile_tokens, order = (at.warp_kv - tiles) & (warps_kv - 1);
      const bool takes_two = RawStorage<Traits>::takes_two_tiles && (tiles & (warps_kv - 1)) != 0 &&
                             w.length - first > 16 && w.length - first <= 32;
      token = first + order * 16;
      if (token < w.length) halves = !takes_two ? 2 : order == 0 ? 4 : 0;
    }
  }

  // Starts the copies of a half of the raw tile from `token` on, by `Threads` threads.
  template <int Threads>
  __device__ void copy_half(const DecodeParams& p, const WorkTile& tile, const RowWork& w, int token, int half,
                            tile::MmaType<T>* to, int thread) const {
    const std::byte* const ring = half % 2 == 0 ? p.cache.ring_k : p.cache.ring_v;
    copy_rows_async<T, Traits::D, Threads>(
        to, thread, ring + ring_offset<T, Traits::D>(p, tile, w, token), Traits::D * sizeof(T),
        [from = begin - token, to = end - token](int i) { return i >= from && i < to; });
  }
};

}  // namespace rooftile::gpu
