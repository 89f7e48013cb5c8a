// SPDX-License-Identifier: Apache-2.0
// The mainloop of split_kv: warps take KV tiles in turn, and each keeps a softmax state of its own. At the end of a KV
// split the states are merged through shared memory.
#pragma once

#include "kernels/decode/pages.cuh"
#include "kernels/decode/tree_reduction.cuh"
#include "kernels/decode/warp_state.cuh"
#include "tile/warps.cuh"

namespace rooftile::gpu {

template <class Config>
struct WarpMainloopStorage {
  static constexpr int D = Config::head_dim, warps_kv = Config::warps / Config::warps_per_tile;
  KvTile<Config> ring[warps_kv][Config::stages];  // KV tiles in flight, for each warp_kv
  alignas(16) float o[warps_kv][mma_n][D + 4];    // sums of V at the end of a KV split; padded against bank conflicts
  float m[warps_kv][mma_n], l[warps_kv][mma_n];   // (warp_kv, packed row)
  int bad_tile_range;                             // the last tile range that met an invalid page
  // Queries that stay until the work tile ends: raw keys need them after the codes.
  static constexpr bool keeps_queries = is_kivi(Config::format);
  alignas(16) typename Config::T raw_queries[keeps_queries ? mma_n * D : 8];
  // A warp with two raw tiles copies four halves: K and V of each.
  static constexpr bool pairs_raw = is_kivi(Config::format) && Config::warps_per_tile == 1;
  alignas(16) typename Config::T raw_half[pairs_raw && Config::stages < 4 ? 16 * D : 8];

  // Memory with a second use: queries, before partials overwrite them; 16-bit K or V of raw tokens in a ring stage.
  __device__ typename Config::T* queries() {
    return keeps_queries ? raw_queries : reinterpret_cast<typename Config::T*>(&o[0][0][0]);
  }
  __device__ typename Config::T* raw(int warp_kv, int stage) {
    static_assert(sizeof(ring[0][0]) >= 16 * D * sizeof(typename Config::T));
    return reinterpret_cast<typename Config::T*>(&ring[warp_kv][stage]);
  }
  __device__ TreeStorage* tree_storage() {  // one per warp
    static_assert(sizeof(ring) >= Config::warps * sizeof(TreeStorage));
    return reinterpret_cast<TreeStorage*>(&ring);
  }
};

template <class Config>
class WarpMainloop {
  using T = typename Config::T;
  static constexpr int D = Config::head_dim, warps = Config::warps, threads = 32 * warps;
  // Warps along KV, each group of warps_per_tile with KV tiles of its own; threads of a KV tile; channels of a warp.
  static constexpr int warps_kv = warps / Config::warps_per_tile, tile_threads = 32 * Config::warps_per_tile,
                       W = D / Config::warps_per_tile;
  static constexpr KvFormat format = Config::format;
  using Bits16 = Bits16Traits<T, D>;
  static constexpr bool elements = is_element_format(format);
  static constexpr int tile_tokens = elements ? 16 : 32;

 public:
  using Storage = WarpMainloopStorage<Config>;
  using Map = RowVectors<D, threads>;

  __device__ WarpMainloop(const DecodeParams& p, Storage& smem)
      : p(p),
        smem(smem),
        lane(threadIdx.x % 32),
        warp_kv(tile::warp_uniform(threadIdx.x / tile_threads)),
        warp_d(threadIdx.x / 32 % Config::warps_per_tile),
        page_shift(first_bit(p.cache.page_size)) {}

  __device__ void begin_tile_range() { ++this_tile_range; }
  __device__ bool saw_invalid_page() const { return smem.bad_tile_range == this_tile_range; }  // in this tile range

  // Computes KV splits [first, last). add(partial, split) is called at the end of each.
  template <class Add>
  __device__ void compute_splits(const WorkTile& tile, const RowWork& w, int first, int last, const Add& add) {
    state.reset();
    if (first >= last) return;
    const Visible see = visible(p, tile, w, lane, false);
    // has_elements: the states hold sums of values, not of codes.
    const auto split_end = [&](int split, bool has_elements) {
      if (has_elements) add(reduce<false>(), split);
      else if constexpr (!elements) add(reduce<true>(), split);
    };
    if constexpr (elements) element_tiles(tile, w, see, first, last, split_end);
    else code_tiles(tile, w, see, first, last, split_end);
  }

 private:
  __device__ void sync() const { tile::sync_tile_warps<Config::warps_per_tile>(warp_kv); }
  template <bool Codes>
  __device__ auto reduce() {
    return reduce_warps<T, Codes>(state, smem.o, smem.m, smem.l, warp_kv, warp_d, lane, Map());
  }

  __device__ void copy_queries(const WorkTile& tile, const RowWork& w) {
    copy_queries_async<T, D, 1, threads>(p, tile, w, threadIdx.x, smem.queries());
  }

  // This warp_kv's KV tiles of splits [first, last). load_tile(stage, token, pages) starts a tile's copies.
  // compute(stage, token) runs when they have arrived. Both are skipped for tiles past the end of the row. A stage is
  // refilled when its tile has been read. load_queries() starts the copies of the queries after those of the first
  // tile; read_queries() runs when they have arrived. load_raw(stage) may start other copies into a stage that no KV
  // tile needs any more; it is called at least `stages` times.
  template <class LoadTile, class LoadRaw, class LoadQueries, class ReadQueries, class Compute, class SplitEnd>
  __device__ void pipeline(const RowWork& w, int first, int last, const LoadTile& load_tile, const LoadRaw& load_raw,
                           const LoadQueries& load_queries, const ReadQueries& read_queries, const Compute& compute,
                           const SplitEnd& split_end) {
    constexpr int stride = warps_kv * tile_tokens;  // from a tile of this warp_kv to its next
    const int split_tokens = w.split_units * work_unit_tokens, kv_end = min(w.end, w.begin + last * split_tokens);
    const RowPages<format> row(p.cache, w, page_shift);
    const auto next_stage = [](int stage) { return stage + 1 < Config::stages ? stage + 1 : 0; };
    int token = w.begin + first * split_tokens + warp_kv * tile_tokens, load_token = token, read_stage = 0;
    Pages pages{0, 0};
    if (load_token < kv_end) pages = row.look_up(load_token);
    const auto fill = [&](int stage) {  // commits exactly one cp.async group, maybe an empty one
      if (load_token < kv_end) {
        Pages now = pages;
        asm volatile("" : "+r"(now.first), "+r"(now.second));  // copied before the next lookup is issued, not after
        pages = row.template look_up<true>(
            min(load_token + stride, kv_end - 1));  // past the last tile: looks up the last token again
        if (row.are_valid(now)) load_tile(smem.ring[warp_kv][stage], load_token, now);
        else smem.bad_tile_range = this_tile_range;  // out is not written
      } else {
        load_raw(stage);
      }
      cute::cp_async_fence();
      load_token += stride;
    };
#pragma unroll 1
    for (int stage = 0; stage < Config::stages; ++stage) {
      fill(stage);
      if (stage > 0) continue;
      load_queries();
      cute::cp_async_fence();
    }
    cute::cp_async_wait<Config::stages - 1>();
    __syncthreads();  // all threads' copies of the queries have arrived
    if (token < kv_end) read_queries();
    for (int split = first; split < last; ++split) {
      for (int left = split_tokens / stride; left > 0; --left) {
        cute::cp_async_wait<Config::stages - 1>();
        sync();  // all threads' copies of this KV tile have arrived
        if (token < w.end) compute(smem.ring[warp_kv][read_stage], token);
        sync();  // every thread has read the tile
        fill(read_stage);
        token += stride;
        read_stage = next_stage(read_stage);
      }
      split_end(split);
    }
    cute::cp_async_wait<0>();
  }

  template <class SplitEnd>
  __device__ void element_tiles(const WorkTile& tile, const RowWork& w, const Visible& see, int first, int last,
                                const SplitEnd& split_end) {
    const KvCacheView& c = p.cache;
    typename Bits16::template QueryFragment<1> rQ;  // (MMA, 1, D / 16)
    const float factor = logit_factor(p, 1.0f);
    const auto mK = page_rows<Bits16>(c, c.k, tile.kv_head);  // (tokens of a page, D, pages)
    const auto mV = page_rows<Bits16>(c, c.v, tile.kv_head);  // (tokens of a page, D, pages)
    pipeline(
        w, first, last,
        [&](Bits16Tile<T, D>& kv_tile, int token, const Pages& at) {
          const auto gK = tile_rows(mK, token, at.first), gV = tile_rows(mV, token, at.first);  // (16 tokens, D)
          const auto copy = [&](const auto& wanted) {
            copy_rows_async<Bits16, tile_threads>(warp_d * 32 + lane, gK, kv_tile.sK(), wanted);
            copy_rows_async<Bits16, tile_threads>(warp_d * 32 + lane, gV, kv_tile.sV(), wanted);
          };
          if (token >= see.outer_begin && token + 16 <= see.outer_end) copy([](int) { return true; });
          else copy([&](int i) { return token + i >= see.outer_begin && token + i < see.outer_end; });
        },
        [](int) {}, [&] { copy_queries(tile, w); }, [&] { rQ = read_queries(); },
        [&](const Bits16Tile<T, D>& kv_tile, int token) {
          element_tile(kv_tile.sK(), kv_tile.sV(), rQ, factor, see, token);
        },
        [&](int split) { split_end(split, true); });
  }

  __device__ auto read_queries() const {  // (MMA, 1, D / 16)
    return load_queries<Bits16, 1>(Bits16::template smem_rows<mma_n>(smem.queries()), lane);
  }
  // sK, sV (16 tokens, D), rQ (MMA, 1, D / 16).
  template <class STensor, class Queries>
  __device__ void element_tile(const STensor& sK, const STensor& sV, const Queries& rQ, float factor,
                               const Visible& see, int token) {
    float scores[1][1][4];  // (n-tile, m-tile of 16 tokens, 4)
    qk16<Bits16>(scores, sK, rQ, lane);
    float (&s)[1][4] = scores[0];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][i] *= factor;
    soft_cap(s, p.softcap);
    mask(s, see, token, lane);
    online_softmax(s, state);
    add_pv16<Bits16, T>(state, s[0], sV, p.tokens == 1 || all_seen(see, token, 16), see, token, lane, warp_d);
  }

  template <class SplitEnd>
  __device__ void code_tiles(const WorkTile& tile, const RowWork& w, const Visible& see, int first, int last,
                             const SplitEnd& split_end) {
    using Tile = CodeTile<format, D>;
    const KvCacheView& c = p.cache;
    CodeQueries<format, D> q[1];  // (n-tile)
    float factor[1][2];           // (n-tile, packed row 2t + j)
    CodeSource<format, D> source(c, tile.kv_head, warp_d * 32 + lane);
    source.pin(warp_d * 32 + lane);
    RawTile raw(p, tile, w, warp_kv, lane, last == w.splits);
    int plain_end = p.softcap == 0.0f ? see.inner_end : 0;  // up to here logits need neither mask nor soft cap
    asm("" : "+r"(plain_end));                              // keeps it in a register
    pipeline(
        w, first, last,
        [&](Tile& kv_tile, int token, const Pages& at) {
          const std::int64_t first = at.first * c.k.page_stride, second = at.second * c.k.page_stride;
          kv_tile.template copy_keys_async<tile_threads, true>(source, first, second, token & (c.page_size - 1),
                                                               warp_d * 32 + lane);
          kv_tile.template copy_values_async<tile_threads>(source, first, second, token & (c.page_size - 1),
                                                           warp_d * 32 + lane);
        },
        [&](int stage) {
          if constexpr (is_kivi(format))
            if (raw.started < raw.halves) start_raw(raw, tile, w, stage);
        },
        [&] {
          copy_queries(tile, w);
          if constexpr (is_kivi(format))
            if (raw.halves > Config::stages) copy_raw(raw, tile, w, 3);
        },
        [&] {
          q[0].template load<T>(smem.queries(), lane);
          factor[0][0] = logit_factor(p, q[0].q_scale[0]);
          factor[0][1] = logit_factor(p, q[0].q_scale[1]);
        },
        [&](const Tile& kv_tile, int token) {
          TokenScales<format> scales;
          scales.template load<T>(kv_tile, see, token, lane);
          float scores[1][2][4];  // (n-tile, m-tile of 16 tokens, 4)
          qk_codes<T, format, D>(scores, kv_tile, q, factor, lane);
          scales.broadcast(lane);
          float (&s)[2][4] = scores[0];
          if (token >= see.inner_begin && token + 32 <= plain_end) {
            // Two copies of the code, so that weights and V are one straight sequence of instructions.
            add_pv_codes<true>(state, s, kv_tile, scales, see, token, lane, warp_d);
          } else {
            soft_cap(s, p.softcap);
            mask(s, see, token, lane);
            add_pv_codes<false>(state, s, kv_tile, scales, see, token, lane, warp_d);
          }
        },
        [&](int split) {
          if constexpr (is_kivi(format))
            if (raw.any && split + 1 == w.splits) {
              raw_tiles(raw, tile, w);
              split_end(split, true);
              return;
            }
          split_end(split, false);
        });
  }

  // The raw tokens of a kivi row, 64 at most, are KV tiles of 16 tokens at the end of the row's last split. The warps
  // take them in turn, beginning with the warp that would take the next tile of codes. If that warp has a tile of codes
  // less than others, it takes two raw tiles at once.
  struct RawTile {
    bool any;                // the range ends with raw tokens
    int first = 0;           // the row's first raw token
    int token = 0;           // first token of this warp_kv's raw tiles
    int halves = 0;          // copies of this warp_kv: K and V of one raw tile, or of two
    int started = 0;         // halves whose copies have been started, in consecutive stages
    int stage = 0;           // stage of the first half
    int begin = 0, end = 0;  // raw tokens that any packed row sees
    __device__ RawTile(const DecodeParams& p, const WorkTile& tile, const RowWork& w, int warp_kv, int lane, bool ends)
        : any(is_kivi(format) && ends && w.raw) {
      if (!any) return;
      const Visible see = visible(p, tile, w, lane, true);
      begin = see.outer_begin;
      end = see.outer_end;
      first = max(w.length - w.count, 0) & ~(kv_group - 1);
      const int tiles = (w.end - w.begin) / tile_tokens, order = warp_kv - tiles & warps_kv - 1;
      const bool pairs = WarpMainloopStorage<Config>::pairs_raw && (tiles & warps_kv - 1) != 0 &&
                         w.length - first > 16 && w.length - first <= 32;
      token = first + order * 16;
      if (token < w.length) halves = !pairs ? 2 : order == 0 ? 4 : 0;
    }
  };
  __device__ auto raw_half(const RawTile& raw, int half) const {  // (16 tokens, D)
    T* const at = WarpMainloopStorage<Config>::pairs_raw && half >= Config::stages
                      ? smem.raw_half
                      : smem.raw(warp_kv, (raw.stage + half) % Config::stages);
    return Bits16::template smem_rows<16>(at);
  }
  __device__ void copy_raw(const RawTile& raw, const WorkTile& tile, const RowWork& w, int half) const {
    const int token = raw.token + half / 2 * 16;
    copy_rows_async<Bits16, tile_threads>(
        warp_d * 32 + lane, ring_rows<Bits16>(half % 2 == 0 ? p.cache.ring_k : p.cache.ring_v, p, tile, w, token),
        raw_half(raw, half), [from = raw.begin - token, to = raw.end - token](int i) { return i >= from && i < to; });
  }
  __device__ void start_raw(RawTile& raw, const WorkTile& tile, const RowWork& w, int stage) const {
    if (raw.started == 0) raw.stage = stage;
    if (raw.started < Config::stages) copy_raw(raw, tile, w, raw.started);
    ++raw.started;
  }
  __device__ void raw_tiles(RawTile& raw, const WorkTile& tile, const RowWork& w) {
    cute::cp_async_wait<0>();
    sync();  // all threads' copies of the raw tiles have arrived
    state.template dequantize_sums<T>();
    if (warps_kv * 16 >= kv_ring && raw.halves == 0) return;
    const auto rQ = read_queries();  // (MMA, 1, D / 16)
    const float factor = logit_factor(p, 1.0f);
    const Visible see = visible(p, tile, w, lane, true);
#pragma unroll 1
    for (int first = raw.first;;) {
#pragma unroll 1
      for (int half = 0; half < raw.halves; half += 2)
        element_tile(raw_half(raw, half), raw_half(raw, half + 1), rQ, factor, see, raw.token + half / 2 * 16);
      first += 16 * warps_kv;
      if (warps_kv * 16 >= kv_ring || first >= w.length) break;
      __syncthreads();  // every warp has read its raw tiles
      raw.token += 16 * warps_kv;
      raw.halves = raw.token < w.length ? 2 : 0;
      for (int half = 0; half < raw.halves; ++half) copy_raw(raw, tile, w, half);
      cute::cp_async_fence();
      cute::cp_async_wait<0>();
      __syncthreads();  // all threads' copies of the next raw tiles have arrived
    }
  }

  const DecodeParams& p;
  Storage& smem;
  const int lane, warp_kv, warp_d, page_shift;  // warp_kv, warp_d: the warp's KV tile, and its part of the channels
  int this_tile_range = 0;
  WarpState<W, format> state;
};

}  // namespace rooftile::gpu
