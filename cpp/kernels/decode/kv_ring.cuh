// SPDX-License-Identifier: Apache-2.0
// The rings of KV tiles in shared memory, filled by cp.async. A warp copies the KV tiles whose scores it computes; page
// look-ups run one tile ahead of the copies.
//   WarpRing: belongs to the warps of a KV tile. K and V of a tile are one cp.async group. The stage is refilled when
//     all of these warps have read both.
//   CtaRing: belongs to the CTA; a stage is one step. K and V are groups of their own. K is refilled when all warps
//     have the step's weights, V when all warps have multiplied it.
// `Copies` starts the copies of a KV tile: load(tile, token, pages), or load_k and load_v for K and V separately. In
// 16 bits rows that no packed row sees are zero-filled; codes past the end of the row are arbitrary. load_queries()
// starts the copies of the queries and of raw tokens that have their own memory.
// load_raw(stage) may start other copies into a stage of a WarpRing that no KV tile needs any more; it is called at
// least `stages` times.
#pragma once

#include "kernels/decode/pages.cuh"
#include "kernels/decode/storage.cuh"
#include "kernels/decode/traits.cuh"

namespace rooftile::gpu {

// The KV splits [first, last) of a work tile.
struct SplitRange {
  int first, last;
  int split_tokens;
  int begin, end;  // tokens in pages; end: of the row's tokens, or of the last split
  __device__ SplitRange(const RowWork& w, int first, int last)
      : first(first),
        last(last),
        split_tokens(w.split_tiles * kv_tile_tokens),
        begin(w.begin + first * split_tokens),
        end(min(w.end, w.begin + last * split_tokens)) {}
};

// In place of a ring where all tiles have arrived and no stage is refilled: for raw tokens.
struct NoRing {
  __device__ static void wait_v() {}
  __device__ static void k_done() {}
};

template <class Traits, class Copies>
class WarpRing {
  static constexpr int stages = Traits::stages, stride = Traits::step_tokens;

 public:
  // tile_range: number of the tile range, which marks an invalid page.
  __device__ WarpRing(const DecodeParams& p, SharedStorage<Traits>& smem, const WarpCoord<Traits>& at, const RowWork& w,
                      const SplitRange& range, int tile_range, int page_shift, Copies& copies)
      : smem_(smem),
        at_(at),
        copies_(copies),
        rows_(p.cache, w, page_shift),
        row_end_(w.end),
        kv_end_(range.end),
        split_tokens_(range.split_tokens),
        tile_range_(tile_range),
        token_(range.begin + at.warp_kv * Traits::tile_tokens),
        load_token_(token_) {
    if (load_token_ < kv_end_) pages_ = rows_.look_up(load_token_);
  }

  // Fills all stages. After return the queries are visible to all warps.
  __device__ void start() {
#pragma unroll 1
    for (int stage = 0; stage < stages; ++stage) {
      fill(stage);
      if (stage > 0) continue;
      copies_.load_queries();  // after the copies of the first tile
      cute::cp_async_fence();
    }
    cute::cp_async_wait<stages - 1>();
    __syncthreads();  // all threads' copies of the queries have arrived
  }
  __device__ bool any() const { return token_ < kv_end_; }

  // The KV tiles of a split: for (ring.begin_split(); ring.in_split(); ring.next()).
  __device__ void begin_split() { left_ = split_tokens_ / stride; }
  __device__ bool in_split() const { return left_ > 0; }
  __device__ void wait() {
    cute::cp_async_wait<stages - 1>();
    sync();  // all threads' copies of this KV tile have arrived
  }
  __device__ bool has_tokens() const { return token_ < row_end_; }
  __device__ int token() const { return token_; }
  __device__ auto* tiles() { return &smem_.ring[at_.warp_kv][read_stage_]; }
  __device__ void wait_v() {}
  __device__ void k_done() {}
  __device__ void next() {
    sync();  // every thread has read the tile
    fill(read_stage_);
    token_ += stride;
    read_stage_ = read_stage_ + 1 < stages ? read_stage_ + 1 : 0;
    --left_;
  }

 private:
  __device__ void sync() const { tile::sync_tile_warps<Traits::warps_per_tile>(at_.warp_kv); }
  __device__ void fill(int stage) {  // commits exactly one cp.async group, maybe an empty one
    if (load_token_ < kv_end_) {
      Pages now = pages_;
      tile::pin(now.first);  // copied before the next lookup is issued, not after
      tile::pin(now.second);
      // Past the last tile: looks up the last token again.
      pages_ = rows_.template look_up<true>(min(load_token_ + stride, kv_end_ - 1));
      if (rows_.check(now)) copies_.load(smem_.ring[at_.warp_kv][stage], load_token_, now);
      else smem_.bad_tile_range = tile_range_;  // check() has set the fault word; out is not written
    } else {
      copies_.load_raw(stage);
    }
    cute::cp_async_fence();
    load_token_ += stride;
  }

  SharedStorage<Traits>& smem_;
  const WarpCoord<Traits> at_;
  Copies& copies_;
  const RowPages<Traits::format> rows_;
  const int row_end_, kv_end_, split_tokens_, tile_range_;
  int token_, load_token_;  // of the tile to compute next, of the tile to copy next
  int read_stage_ = 0, left_ = 0;
  Pages pages_{0, 0};  // of load_token_
};

template <class Traits, class Copies>
class CtaRing {
  static constexpr int stages = Traits::stages, stride = Traits::step_tokens;
  static constexpr int pending = 2 * (stages - 1);  // cp.async groups that stay in flight

 public:
  __device__ CtaRing(const DecodeParams& p, SharedStorage<Traits>& smem, const WarpCoord<Traits>& at, const RowWork& w,
                     const SplitRange& range, int tile_range, int page_shift, Copies& copies)
      : smem_(smem),
        at_(at),
        copies_(copies),
        rows_(p.cache, w, page_shift),
        own_(at.warp_kv * Traits::tile_tokens),
        kv_end_(range.end),
        split_tokens_(range.split_tokens),
        tile_range_(tile_range),
        token_(range.begin),
        load_token_(range.begin + own_) {
    if (load_token_ < kv_end_) next_pages_ = rows_.look_up(load_token_);
  }

  __device__ void start() {
#pragma unroll 1
    for (int i = 0; i < stages; ++i) {
      load_k(i);
      if (i + 1 == stages) break;
      if (i == 0) copies_.load_queries();  // in the group of the first V
      load_v(i);
    }
    cute::cp_async_wait<pending - 1>();
    __syncthreads();  // all threads' copies of the queries have arrived
  }
  __device__ static constexpr bool any() { return true; }

  __device__ void begin_split() { split_end_ = min(token_ + split_tokens_, kv_end_); }
  __device__ bool in_split() const { return token_ < split_end_; }
  // Starts the copy of the V that comes stages - 1 steps later, to stage (read_stage_ - 1) mod stages, whose V was the
  // previous step's.
  __device__ void wait() {
    cute::cp_async_wait<pending>();
    // All threads' copies of this K have arrived; every warp has read the previous step's V and weights.
    __syncthreads();
    load_v(read_stage_ + stages - 1 < stages ? read_stage_ + stages - 1 : read_stage_ - 1);
  }
  __device__ static constexpr bool has_tokens() { return true; }
  __device__ int token() const { return token_; }  // the step's first
  __device__ auto* tiles() { return smem_.ring[read_stage_]; }
  // This thread's copies of V have arrived.
  __device__ void wait_v() { cute::cp_async_wait<pending>(); }
  // Called after the barrier that makes all threads' V and weights visible: no warp reads the step's K any more.
  __device__ void k_done() { load_k(read_stage_); }
  __device__ void next() {
    token_ += stride;
    read_stage_ = read_stage_ + 1 < stages ? read_stage_ + 1 : 0;
  }

 private:
  __device__ void load_k(int stage) {
    if (load_token_ < kv_end_) {
      pages_ = next_pages_;
      if (load_token_ + stride < kv_end_) next_pages_ = rows_.look_up(load_token_ + stride);
      valid_ = rows_.check(pages_);
      if (!valid_) smem_.bad_tile_range = tile_range_;  // check() has set the fault word; out is not written
    }
    if (load_token_ - own_ < kv_end_ && valid_) copies_.load_k(smem_.ring[stage][at_.warp_kv], load_token_, pages_);
    cute::cp_async_fence();
  }
  __device__ void load_v(int stage) {
    if (load_token_ - own_ < kv_end_ && valid_) copies_.load_v(smem_.ring[stage][at_.warp_kv], load_token_, pages_);
    load_token_ += stride;
    cute::cp_async_fence();
  }

  SharedStorage<Traits>& smem_;
  const WarpCoord<Traits> at_;
  Copies& copies_;
  const RowPages<Traits::format> rows_;
  const int own_;  // from the step's first token to this warp's
  const int kv_end_, split_tokens_, tile_range_;
  int token_, load_token_;  // first token of the step to compute next; of this warp's KV tile to copy next
  int read_stage_ = 0, split_end_ = 0;
  Pages next_pages_{0, 0}, pages_{0, 0};  // of load_token_, and of the tile whose K has been started
  bool valid_ = true;                     // pages_ are valid
};

}  // namespace rooftile::gpu
