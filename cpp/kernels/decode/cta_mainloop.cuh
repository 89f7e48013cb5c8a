// SPDX-License-Identifier: Apache-2.0
// The mainloop of step_kv, split_kv with BLK_M = 16 and a CTA-wide softmax: for KV heads with more than 8 packed rows
// (query heads times new tokens). Every byte is read and decoded once for two n-tiles of packed rows.
// A CTA processes one step of tokens after another: one KV tile for each warp. A warp computes the weights of its tile.
// All warps exchange weights through shared memory, and each multiplies them with its own channels of the whole step's
// V. So the CTA has one softmax state, distributed over its warps' registers, and a warp has registers for N n-tiles of
// 8 packed rows. KV splits, reduction and partials are those of split_kv.cuh.
//
// Bytes per KV head: S * (bytes of a token's K and V), once for N * 8 packed rows. Flops: 4 S D per packed row.
// Decoding costs the same as for 8 packed rows: D = 128, int4-kivi: 700 instructions per warp and tile of 32 tokens
// with 16 packed rows; two passes of 8 rows take twice 600.
// Bound by the dependency chain of a step, two barriers and two products; half of the issue slots are used.
//
// Copies: cp.async into a ring of `stages` steps that belongs to the CTA. K and V are refilled separately.
#pragma once

#include "kernels/decode/cta_steps.cuh"
#include "kernels/decode/pages.cuh"

namespace rooftile::gpu {

template <class Config>
class CtaMainloop : CtaSteps<Config> {
  using T = typename Config::T;
  using Traits = StepTraits<Config>;
  static constexpr int D = Traits::D, N = Traits::N, C = Traits::C, warps = Traits::warps,
                       tile_tokens = Traits::tile_tokens, step_tokens = Traits::step_tokens;
  static constexpr KvFormat format = Config::format;
  static constexpr bool elements = is_element_format(format);
  using Bits16 = Bits16Traits<T, D>;
  using Steps = CtaSteps<Config>;
  using Steps::find_visible, Steps::seen, Steps::all_see, Steps::element_step, Steps::code_step;
  using Steps::p, Steps::smem, Steps::warp, Steps::lane, Steps::state;

 public:
  using Storage = CtaMainloopStorage<Config>;
  using Map = RowFragments<N, C, Traits::threads>;

  __device__ CtaMainloop(const DecodeParams& p, Storage& smem)
      : Steps(p, smem), page_shift(first_bit(p.cache.page_size)) {}

  __device__ void begin_tile_range() { ++this_tile_range; }
  __device__ bool saw_invalid_page() const { return smem.bad_tile_range == this_tile_range; }  // in this tile range

  // Computes KV splits [first, last). add(partial, split) is called at the end of each.
  template <class Add>
  __device__ void compute_splits(const WorkTile& tile, const RowWork& w, int first, int last, const Add& add) {
    state.reset();
    Visible see[N];  // (n-tile)
    find_visible(tile, w, false, see);
    // raw: sums of raw tokens.
    const auto split_end = [&](int split, const float (&raw)[N* C][4]) {
      add(take_partial<T>(state, smem, raw, warp, lane), split);
    };
    if constexpr (elements) element_tiles(tile, w, see, first, last, split_end);
    else code_tiles(tile, w, see, first, last, split_end);
  }

 private:
  // The steps of KV splits [first, last). K of a stage is refilled as soon as all warps have the step's weights, V when
  // it has been multiplied. load_k(tile, token, pages) and load_v(...) start the copies of the warp's KV tile,
  // zero-filled past the end of the row. load_queries() starts the copies of queries and raw tokens, after those of the
  // first K; read_queries() runs when they have arrived. compute(stage, token, wait_v, refill_k): token is the step's
  // first; wait_v() waits for this thread's copies of V; refill_k() refills K, after the barrier that makes all
  // threads' V and weights visible.
  struct LoadState {
    int token;        // of the warp's next KV tile to copy
    Pages next, now;  // pages of that tile, and of the tile whose K has been started
    bool valid;       // the pages in `now` are valid
  };
  template <class LoadK, class LoadV, class LoadQueries, class ReadQueries, class Compute, class SplitEnd>
  __device__ void pipeline(const RowWork& w, int first, int last, const LoadK& load_k, const LoadV& load_v,
                           const LoadQueries& load_queries, const ReadQueries& read_queries, const Compute& compute,
                           const SplitEnd& split_end) {
    constexpr int pending = 2 * (Config::stages - 1);  // cp.async groups that stay in flight
    const int split_tokens = w.split_units * work_unit_tokens, kv_end = min(w.end, w.begin + last * split_tokens),
              own = warp * tile_tokens;
    const RowPages<format> row(p.cache, w, page_shift);
    const auto next_stage = [](int stage) { return stage + 1 < Config::stages ? stage + 1 : 0; };
    int token = w.begin + first * split_tokens, read_stage = 0;
    LoadState load{token + own, {0, 0}, {0, 0}, true};
    if (load.token < kv_end) load.next = row.look_up(load.token);
    const auto load_k_stage = [&](int stage) {
      if (load.token < kv_end) {
        load.now = load.next;
        if (load.token + step_tokens < kv_end) load.next = row.look_up(load.token + step_tokens);
        load.valid = row.are_valid(load.now);
        if (!load.valid) smem.bad_tile_range = this_tile_range;  // out is not written
      }
      if (load.token - own < kv_end && load.valid) load_k(smem.ring[stage][warp], load.token, load.now);
      cute::cp_async_fence();
    };
    const auto load_v_stage = [&](int stage) {
      if (load.token - own < kv_end && load.valid) load_v(smem.ring[stage][warp], load.token, load.now);
      load.token += step_tokens;
      cute::cp_async_fence();
    };
#pragma unroll 1
    for (int i = 0; i < Config::stages; ++i) {
      load_k_stage(i);
      if (i + 1 == Config::stages) break;
      if (i == 0) load_queries();  // in the group of the first V
      load_v_stage(i);
    }
    cute::cp_async_wait<pending - 1>();
    __syncthreads();  // all threads' copies of the queries have arrived
    read_queries();
    for (int split = first; split < last; ++split) {
      for (const int split_stop = min(token + split_tokens, kv_end); token < split_stop; token += step_tokens) {
        cute::cp_async_wait<pending>();
        // All threads' copies of this K have arrived; every warp has read the previous step's V and weights.
        __syncthreads();
        load_v_stage(read_stage + Config::stages - 1 < Config::stages ? read_stage + Config::stages - 1
                                                                      : read_stage - 1);
        compute(
            smem.ring[read_stage], token, [] { cute::cp_async_wait<pending>(); }, [&] { load_k_stage(read_stage); });
        read_stage = next_stage(read_stage);
      }
      split_end(split);
    }
    cute::cp_async_wait<0>();
  }

  // ---- K and V in 16 bits ----

  template <class SplitEnd>
  __device__ void element_tiles(const WorkTile& tile, const RowWork& w, const Visible (&see)[N], int first, int last,
                                const SplitEnd& split_end) {
    const KvCacheView& c = p.cache;
    typename Bits16::template QueryFragment<N> rQ;            // (MMA, N, D / 16)
    const auto mK = page_rows<Bits16>(c, c.k, tile.kv_head);  // (tokens of a page, D, pages)
    const auto mV = page_rows<Bits16>(c, c.v, tile.kv_head);  // (tokens of a page, D, pages)
    const float no_raw[N * C][4] = {};                        // (N x C mma tiles, 4)
    const auto copy = [&](const auto& gX, auto&& sX, int token) {
      if (token + 16 <= w.end && seen(see, token) && seen(see, token + 15))
        copy_rows_async<Bits16, 32>(lane, gX, sX, [](int) { return true; });
      else copy_rows_async<Bits16, 32>(lane, gX, sX, [&](int i) { return token + i < w.end && seen(see, token + i); });
    };
    pipeline(
        w, first, last,
        [&](Bits16Tile<T, D>& tile, int token, const Pages& at) {
          copy(tile_rows(mK, token, at.first), tile.sK(), token);
        },
        [&](Bits16Tile<T, D>& tile, int token, const Pages& at) {
          copy(tile_rows(mV, token, at.first), tile.sV(), token);
        },
        [&] { copy_queries(tile, w); }, [&] { rQ = read_queries(); },
        [&](const Bits16Tile<T, D>* tiles, int token, const auto& wait_v, const auto& refill_k) {
          element_step([&](int i) { return tiles[i].sK(); }, [&](int i) { return tiles[i].sV(); },
                       std::integral_constant<int, warps>(), rQ, see, token, state.o, wait_v, refill_k,
                       [](int, const float (&)[2]) {});
        },
        [&](int split) { split_end(split, no_raw); });
  }
  __device__ void copy_queries(const WorkTile& tile, const RowWork& w) const {
    copy_queries_async<T, D, N, Traits::threads>(p, tile, w, threadIdx.x, smem.queries(0));
  }
  __device__ auto read_queries() const {  // (MMA, N, D / 16)
    return load_queries<Bits16, N>(Bits16::template smem_rows<N * mma_n>(smem.queries(0)), lane);
  }

  // ---- codes ----

  template <class SplitEnd>
  __device__ void code_tiles(const WorkTile& tile, const RowWork& w, const Visible (&see)[N], int first, int last,
                             const SplitEnd& split_end) {
    using Tile = CodeTile<format, D>;
    const KvCacheView& c = p.cache;
    CodeQueries<format, D> q[N];  // (n-tile)
    float factor[N][2];           // (n-tile, packed row 2t + j)
    const CodeSource<format, D> source(c, tile.kv_head, lane);
    const RawTiles raw = find_raw(tile, w, last == w.splits);
    pipeline(
        w, first, last,
        [&](Tile& tile, int token, const Pages& at) {
          if (token < w.end)
            tile.template copy_keys_async<32>(source, at.first * c.k.page_stride, at.second * c.k.page_stride,
                                              token & (c.page_size - 1), lane);
        },
        [&](Tile& tile, int token, const Pages& at) {
          if (token < w.end)
            tile.template copy_values_async<32>(source, at.first * c.k.page_stride, at.second * c.k.page_stride,
                                                token & (c.page_size - 1), lane);
        },
        [&] {
          copy_queries(tile, w);
          if constexpr (is_kivi(format))
            if (raw.any) copy_raw(raw, tile, w, raw.first);
        },
        [&] {
#pragma unroll
          for (int n = 0; n < N; ++n) {
            q[n].template load<T>(smem.queries(n), lane);
            factor[n][0] = logit_factor(p, q[n].q_scale[0]);
            factor[n][1] = logit_factor(p, q[n].q_scale[1]);
          }
        },
        [&](const Tile* tiles, int token, const auto& wait_v, const auto& refill_k) {
          code_step(tiles, q, factor, see, token, wait_v, refill_k);
        },
        [&](int split) {
          float raw_o[N * C][4] = {};  // (N x C mma tiles, 4)
          if constexpr (is_kivi(format))
            if (raw.any && split + 1 == w.splits) raw_steps(raw, tile, w, raw_o);
          split_end(split, raw_o);
        });
  }

  // ---- raw tokens of a kivi row ----

  // At most 64 raw tokens, at the end of the row's last split: KV tiles of 16 tokens, raw_tiles at once.
  static constexpr int raw_tiles = CtaMainloopStorage<Config>::raw_tiles;
  struct RawTiles {
    bool any;                // the range ends with raw tokens
    int first = 0;           // the row's first raw token
    int begin = 0, end = 0;  // raw tokens that any packed row sees
  };
  __device__ RawTiles find_raw(const WorkTile& tile, const RowWork& w, bool ends) const {
    RawTiles raw{is_kivi(format) && ends && w.raw};
    if (!raw.any) return raw;
    Visible see[N];  // (n-tile)
    find_visible(tile, w, true, see);
    raw.first = max(w.length - w.count, 0) & ~(kv_group - 1);
    raw.begin = see[0].outer_begin;
    raw.end = see[0].outer_end;
#pragma unroll
    for (int n = 1; n < N; ++n) {
      raw.begin = min(raw.begin, see[n].outer_begin);
      raw.end = max(raw.end, see[n].outer_end);
    }
    return raw;
  }
  // Copies K and V of the raw tiles from token `first` on; each warp copies one half at a time.
  __device__ void copy_raw(const RawTiles& raw, const WorkTile& tile, const RowWork& w, int first) const {
#pragma unroll 1
    for (int half = warp; half < 2 * raw_tiles; half += warps) {
      const int token = first + half / 2 * 16;
      copy_rows_async<Bits16, 32>(
          lane, ring_rows<Bits16>(half % 2 == 0 ? p.cache.ring_k : p.cache.ring_v, p, tile, w, token),
          Bits16::template smem_rows<16>(smem.raw[half / 2][half % 2]),
          [from = raw.begin - token, to = raw.end - token](int i) { return i >= from && i < to; });
    }
  }
  __device__ void raw_steps(const RawTiles& raw, const WorkTile& tile, const RowWork& w, float (&o)[N * C][4]) {
    const auto rQ = read_queries();  // (MMA, N, D / 16)
    Visible see[N];                  // (n-tile)
    find_visible(tile, w, true, see);
    for (int token = raw.first; token < w.length; token += 16 * raw_tiles) {
      if (token > raw.first) {
        __syncthreads();  // every warp has read the previous raw tiles
        copy_raw(raw, tile, w, token);
        cute::cp_async_fence();
        cute::cp_async_wait<0>();
      }
      __syncthreads();  // all threads' copies have arrived (the first ones with the queries); no thread reads weights
      element_step([&](int i) { return Bits16::template smem_rows<16>(smem.raw[i][0]); },
                   [&](int i) { return Bits16::template smem_rows<16>(smem.raw[i][1]); },
                   std::integral_constant<int, raw_tiles>(), rQ, see, token, o, [] {}, [] {},
                   [&](int n, const float (&factor)[2]) {
#pragma unroll
                     for (int i = 0; i < C; ++i)
#pragma unroll
                       for (int e = 0; e < 4; ++e) o[n * C + i][e] *= factor[e % 2];
                   });
    }
  }

  const int page_shift;
  int this_tile_range = 0;
};

}  // namespace rooftile::gpu
