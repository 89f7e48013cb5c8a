// SPDX-License-Identifier: Apache-2.0
// Decode attention over a KV cache, split along the sequence.
//   q, out [B, T, Hq, D]    cache: pages of K and V per KV head, one block-table row per sequence (or consecutive
//                           pages)
// A persistent grid covers the work units of scheduler.h, or a cluster of CTAs has one work tile. A CTA computes one
// work tile at a time, and its warps take the KV tiles in turn. Each warp keeps a softmax state of its own in
// registers. At the end of a KV split these states are merged through shared memory, and the split's partial goes into
// the reduction. A work tile that one CTA computed whole is written at once. Partials of the others are left to
// combine.cuh or, in a cluster, to cluster_reduction.cuh.
// One warp computes a KV tile; above 128 channels two warps, above 256 four. These warps read the same tile and share
// the output's channels: fewer registers per warp, and more warps for the same shared memory.
// The query heads of a KV head (times new tokens) are the packed rows, the N of the MMAs, so they share every byte of K
// and V.
//
// Bytes per KV head: S * (bytes of a token's K and V). Flops: 4 S D per packed row, for 8 rows whether used or not.
// 16-bit, D = 128: 512 bytes and 8 KFLOP a token: bound by bandwidth, the tensor cores take a third of the time.
// int4-kivi: 148 bytes a token, the same products, and 5 instructions for 8 codes: bound by the latencies that eight
// warps can hide.
//
// Copies: cp.async into a ring of `stages` KV tiles that belongs to the warps of a tile. Codes are loaded to registers
// as they are and decoded there, 16-bit rows by ldmatrix.
// Sync: a KV tile's warps wait for its copies, compute it, and refill the stage. CTA barriers are only at the ends of
// KV splits and before the queries are read.
#pragma once

#include "kernels/decode/cluster_reduction.cuh"
#include "kernels/decode/reduction.cuh"
#include "kernels/decode/pages.cuh"
#include "kernels/decode/work_range.cuh"
#include "kernels/decode/warp_state.cuh"
#include "tile/cta_sync.cuh"
#include "tile/warps.cuh"

namespace rooftile::gpu {

template <class Config>
struct SplitKvStorage {
  static constexpr int D = Config::head_dim, warps_kv = Config::warps / Config::warps_per_tile,
                       threads = 32 * Config::warps;
  KvTile<Config> ring[warps_kv][Config::stages];  // KV tiles in flight, for each warp_kv
  alignas(16) float o[warps_kv][mma_n][D + 4];    // sums of V at the end of a KV split; padded against bank conflicts
  float m[warps_kv][mma_n], l[warps_kv][mma_n];   // (warp_kv, packed row)
  union {
    ReductionStorage<1, mma_n * D / threads, threads, mma_n, Config::smem_levels> reduction;
    std::conditional_t<Config::clusters, ClusterPartials<D>, char> cluster;  // partials of a cluster
  };
  WorkRange range;
  int bad_tile_range;  // the last tile range that met an invalid page
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
class SplitKv {
  using T = typename Config::T;
  static constexpr int D = Config::head_dim, warps = Config::warps, threads = 32 * warps,
                       threads_per_row = threads / mma_n;
  // Warps along KV, each group of warps_per_tile with KV tiles of its own; threads of a KV tile; channels of a warp.
  static constexpr int warps_kv = warps / Config::warps_per_tile, tile_threads = 32 * Config::warps_per_tile,
                       W = D / Config::warps_per_tile;
  // A thread has S channels of a packed row: S / N vectors of N channels, vec_stride apart.
  static constexpr int S = D / threads_per_row, N = vec_floats<D>, vec_stride = N * threads_per_row;
  static constexpr KvFormat format = Config::format;
  static constexpr bool elements = is_element_format(format);
  static constexpr int tile_tokens = elements ? 16 : 32;

 public:
  __device__ SplitKv(const DecodeParams& p, SplitKvStorage<Config>& smem)
      : p(p),
        smem(smem),
        lane(threadIdx.x % 32),
        warp_kv(tile::warp_uniform(threadIdx.x / tile_threads)),
        warp_d(threadIdx.x / 32 % Config::warps_per_tile),
        page_shift(first_bit(p.cache.page_size)) {}

  __device__ void run() {
    const bool clustered = Config::clusters && tile::has_clusters && p.cluster_size > 1;
    {
      const WorkRange found = clustered ? cluster_work_range() : find_work_range<format>(p);
      if (!store_range(found, smem.range, smem.bad_tile_range)) return;
    }
    for_each_tile_range<format>(p, smem.range, [&](const WorkTile& tile, const RowWork& w, int first, int last) {
      if (first < last || clustered) compute_tile_range(tile, w, first, last, smem.range.range_index, clustered);
    });
  }

 private:
  __device__ void sync() const { tile::sync_tile_warps<Config::warps_per_tile>(warp_kv); }

  struct alignas(4 * N) Vec {
    float x[N];
  };

  // The only work tile of this CTA's cluster. CTA 0 of the cluster reports faults and answers rows without visible
  // keys.
  __device__ WorkRange cluster_work_range() {
    const auto [tile_index, cta_rank] = tile::cluster_coord();
    WorkRange range = one_work_tile(p, tile_index, cta_rank, p.cluster_size, 0,
                                    [&](int b) { return row_work_of(p, format, b, read); });
    const RowWork& w = range.work;
    if (range.begin < range.end) {
      range.find_own_splits(lane);
      return range;
    }
    if (cta_rank > 0) return range;
    const int kv_head = divide(range.tile, p.by_m_blocks);
    if (w.fault == KvFault::none) {
      RowEpilogue<T> epilogue(p, {range.entry, kv_head, range.tile - kv_head * p.m_blocks}, w,
                              threadIdx.x / threads_per_row);
      epilogue.finalize(-INFINITY, 0.0f);
      store(epilogue, {});
    } else if (range.tile == 0 && threadIdx.x == 0) {
      *p.cache.fault = static_cast<int>(w.fault) + 16 * (w.fault == KvFault::row ? range.entry : w.row);
    }
    return range;
  }

  // Computes KV splits [first, last) of one work tile. In a cluster the range may be empty.
  __device__ void compute_tile_range(const WorkTile& tile, const RowWork& w, int first, int last, int range_index,
                                     bool clustered) {
    const int m_row = threadIdx.x / threads_per_row, d0 = threadIdx.x % threads_per_row * N;
    const bool has_row = tile.m_block * mma_n + mma_n / warps * (warp_kv * Config::warps_per_tile + warp_d) <
                         p.q_per_kv * p.tokens;  // the warp has a packed row that is not padding
    ++this_tile_range;
    // All threads have read the previous range's partials, whose memory the queries may take, and bad_tile_range.
    __syncthreads();
    PartialReduction<1, S, threads, mma_n, Config::smem_levels> reduction(
        smem.reduction,
        p.reduction_o + std::int64_t{work_range_index()} * decltype(smem.reduction)::gmem_levels * mma_n * D,
        threadIdx.x, m_row, first, last - first == 1 && w.splits > 1);
    int partial_index = range_index * partials_per_cta + (first > 0 ? 0 : partials_inside);
    const auto mark_fault = [&](float l) { return smem.bad_tile_range == this_tile_range ? -1.0f : l; };
    const auto emit = [&](const Partial<1, S>& partial) {
      const std::int64_t at = std::int64_t{partial_index++} * mma_n + m_row;
#pragma unroll
      for (int i = 0; i < S / N; ++i)
        *reinterpret_cast<Vec*>(p.partial_o + at * D + d0 + i * vec_stride) =
            *reinterpret_cast<const Vec*>(&partial.o[i * N]);
      if (d0 == 0)
        *reinterpret_cast<float2*>(p.partial_ml + at * 2) = make_float2(partial.m[0], mark_fault(partial.l[0]));
    };
    const auto add = [&](const Partial<1, S>& partial, int split) {
      if (!has_row) return;
      if constexpr (Config::clusters)
        if (clustered) {
          ClusterPartials<D>* const to = tile::map_shared_rank(&smem.cluster, cta_of_row(p, m_row));
          const int at = cluster_partial(p, split, m_row);
#pragma unroll
          for (int i = 0; i < S / N; ++i)
            *reinterpret_cast<Vec*>(to->o[at] + d0 + i * vec_stride) = *reinterpret_cast<const Vec*>(&partial.o[i * N]);
          if (d0 == 0) to->ml[at] = make_float2(partial.m[0], mark_fault(partial.l[0]));
          return;
        }
      reduction.push(partial, split, emit);
    };
    if constexpr (Config::clusters)
      if (clustered) tile::wait_for_cluster();  // all CTAs of the cluster have started
    state.reset();
    compute_splits(tile, w, first, last, [&](int split, bool has_elements) {
      if (has_elements) add(reduce_warps<false>(m_row, d0), split);
      else if constexpr (!elements) add(reduce_warps<true>(m_row, d0), split);
    });
    if constexpr (Config::clusters && tile::has_clusters)
      if (clustered) {
        reduce_cluster<T, D, threads>(p, tile, w, tile::cluster_coord().rank, smem.cluster, smem.tree_storage());
        return;
      }
    if (!has_row) return;
    if (first > 0 || last < w.splits) {
      reduction.flush(emit);
      return;
    }
    const Partial<1, S> result = reduction.result();
    if (smem.bad_tile_range == this_tile_range) return;
    RowEpilogue<T> epilogue(p, tile, w, m_row);
    epilogue.finalize(result.m[0], result.l[0]);
    store(epilogue, result.o);
  }
  // Stores the thread's channels of its packed row.
  __device__ void store(const RowEpilogue<T>& epilogue, const float (&o)[S]) const {
    const int d0 = threadIdx.x % threads_per_row * N;
#pragma unroll
    for (int i = 0; i < S / N; ++i) epilogue.store(d0 + i * vec_stride, reinterpret_cast<const Vec*>(&o[i * N])->x);
    if (d0 == 0) epilogue.store_lse();
  }

  // Merges the warps' states into one partial and resets them. Codes: the states hold sums of codes. Each warp rescales
  // its sums to the common maximum while it writes them, so the threads that merge only add.
  // Sync: m is read between the barriers, l and o after the second. They are written again before the next call's first
  // barrier (m) and after it (l, o), when no thread reads them.
  template <bool Codes>
  __device__ Partial<1, S> reduce_warps(int m_row, int d0) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        state.l[j] += __shfl_xor_sync(0xffffffffu, state.l[j], step);
        if constexpr (Codes && has_min(format))
          state.min_term[j] += __shfl_xor_sync(0xffffffffu, state.min_term[j], step);
      }
    if (g == 0 && warp_d == 0)
      *reinterpret_cast<float2*>(&smem.m[warp_kv][2 * t]) = make_float2(state.m[0], state.m[1]);
    __syncthreads();  // all maxima are in shared memory
    Partial<1, S> partial;
    partial.m[0] = -INFINITY;
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int w = 0; w < warps_kv; ++w) {
      const float2 m = *reinterpret_cast<const float2*>(&smem.m[w][2 * t]);
      top[0] = fmaxf(top[0], m.x);
      top[1] = fmaxf(top[1], m.y);
      partial.m[0] = fmaxf(partial.m[0], smem.m[w][m_row]);
    }
    float weight[2];  // (packed row 2t + j)
#pragma unroll
    for (int j = 0; j < 2; ++j) weight[j] = exp2f(state.m[j] - (top[j] == -INFINITY ? 0.0f : top[j]));
    if (g == 0 && warp_d == 0)
      *reinterpret_cast<float2*>(&smem.l[warp_kv][2 * t]) = make_float2(state.l[0] * weight[0], state.l[1] * weight[1]);
    const auto write = [&](const auto& values) {
#pragma unroll
      for (int i = 0; i < W / 16; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          smem.o[warp_kv][2 * t + e % 2][warp_d * W + 16 * i + 8 * (e / 2) + g] = values(state.o[i][e], e);
    };
    if constexpr (Codes) write(state.template dequant_sums<T>(weight));
    else write([&](float o, int e) { return o * weight[e % 2]; });
    state.reset();
    __syncthreads();  // all sums are in shared memory
    partial.l[0] = 0.0f;
#pragma unroll
    for (int i = 0; i < S; ++i) partial.o[i] = 0.0f;
#pragma unroll
    for (int w = 0; w < warps_kv; ++w) {
      partial.l[0] += smem.l[w][m_row];
#pragma unroll
      for (int i = 0; i < S / N; ++i) {
        const Vec o = *reinterpret_cast<const Vec*>(&smem.o[w][m_row][d0 + i * vec_stride]);
#pragma unroll
        for (int j = 0; j < N; ++j) partial.o[i * N + j] += o.x[j];
      }
    }
    return partial;
  }

  __device__ void copy_queries(const WorkTile& tile, const RowWork& w) {
    copy_queries_async<T, D, 1, threads>(p, tile, w, threadIdx.x, smem.queries());
  }

  // split_end(split, has_elements) is called when the states have all tokens of a split; has_elements: they hold sums
  // of values, not of codes.
  template <class SplitEnd>
  __device__ void compute_splits(const WorkTile& tile, const RowWork& w, int first, int last,
                                 const SplitEnd& split_end) {
    if (first >= last) return;
    const Visible see = visible(p, tile, w, lane, false);
    if constexpr (elements) element_tiles(tile, w, see, first, last, split_end);
    else code_tiles(tile, w, see, first, last, split_end);
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
        tile::hide_origin(now.first, now.second);  // copied before the next lookup is issued, not after
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
    tile::FragmentB q[1][D / 16];  // (n-tile, D / 16 k-tiles)
    const float factor[2] = {logit_factor(p, 1.0f), logit_factor(p, 1.0f)};
    const std::int64_t k_head = tile.kv_head * c.k.head_stride, v_head = tile.kv_head * c.v.head_stride;
    pipeline(
        w, first, last,
        [&](ElementTile<T, D>& kv_tile, int token, const Pages& at) {
          const std::int64_t page_offset = token & (c.page_size - 1);
          const std::byte* k_rows = c.k.codes + at.first * c.k.page_stride + k_head + page_offset * c.k.token_stride;
          const std::byte* v_rows = c.v.codes + at.first * c.v.page_stride + v_head + page_offset * c.v.token_stride;
          const auto copy = [&](const auto& wanted) {
            copy_rows_async<T, D, tile_threads>(kv_tile.k, warp_d * 32 + lane, k_rows, c.k.token_stride, wanted);
            copy_rows_async<T, D, tile_threads>(kv_tile.v, warp_d * 32 + lane, v_rows, c.v.token_stride, wanted);
          };
          if (token >= see.outer_begin && token + 16 <= see.outer_end) copy([](int) { return true; });
          else copy([&](int i) { return token + i >= see.outer_begin && token + i < see.outer_end; });
        },
        [](int) {}, [&] { copy_queries(tile, w); }, [&] { load_query_fragments<T, D>(smem.queries(), lane, q[0]); },
        [&](const ElementTile<T, D>& kv_tile, int token) { element_tile(kv_tile.k, kv_tile.v, q, factor, see, token); },
        [&](int split) { split_end(split, true); });
  }

  __device__ void element_tile(const T* k, const T* v, const tile::FragmentB (&q)[1][D / 16], const float (&factor)[2],
                               const Visible& see, int token) {
    float scores[1][1][4];  // (n-tile, m-tile of 16 tokens, 4)
    qk16<T, D>(scores, k, q, lane);
    float (&s)[1][4] = scores[0];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][i] *= factor[i & 1];
    soft_cap(s, p.softcap);
    mask(s, see, token, lane);
    online_softmax(s, state);
    if (p.tokens == 1 || all_seen(see, token, 16)) add_pv16<T, D>(state, s[0], v, lane, warp_d);
    else add_pv16_masked<T, D>(state, s[0], v, see, token, lane, warp_d);
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
    tile::hide_origin(plain_end);                           // keeps it in a register
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
      const bool pairs = SplitKvStorage<Config>::pairs_raw && (tiles & warps_kv - 1) != 0 && w.length - first > 16 &&
                         w.length - first <= 32;
      token = first + order * 16;
      if (token < w.length) halves = !pairs ? 2 : order == 0 ? 4 : 0;
    }
  };
  __device__ T* raw_half(const RawTile& raw, int half) const {
    return SplitKvStorage<Config>::pairs_raw && half >= Config::stages
               ? smem.raw_half
               : smem.raw(warp_kv, (raw.stage + half) % Config::stages);
  }
  __device__ void copy_raw(const RawTile& raw, const WorkTile& tile, const RowWork& w, int half) const {
    const int token = raw.token + half / 2 * 16;
    copy_rows_async<T, D, tile_threads>(
        raw_half(raw, half), warp_d * 32 + lane,
        (half % 2 == 0 ? p.cache.ring_k : p.cache.ring_v) + ring_offset<T, D>(p, tile, w, token), D * sizeof(T),
        [from = raw.begin - token, to = raw.end - token](int i) { return i >= from && i < to; });
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
    tile::FragmentB q[1][D / 16];  // (n-tile, D / 16 k-tiles)
    load_query_fragments<T, D>(smem.queries(), lane, q[0]);
    const float factor[2] = {logit_factor(p, 1.0f), logit_factor(p, 1.0f)};
    const Visible see = visible(p, tile, w, lane, true);
#pragma unroll 1
    for (int first = raw.first;;) {
#pragma unroll 1
      for (int half = 0; half < raw.halves; half += 2)
        element_tile(raw_half(raw, half), raw_half(raw, half + 1), q, factor, see, raw.token + half / 2 * 16);
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
  SplitKvStorage<Config>& smem;
  const int lane, warp_kv, warp_d, page_shift;  // warp_kv, warp_d: the warp's KV tile, and its part of the channels
  int this_tile_range = 0;
  WarpState<W, format> state;
};

template <class Config>
__global__ __launch_bounds__(32 * Config::warps,
                             Config::ctas_per_sm) void split_kv(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) unsigned char bytes[];
  if constexpr (Config::clusters)
    if (tile::has_clusters && p.cluster_size > 1) tile::arrive_at_cluster();
  prefetch_lengths(p);
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();  // after the wait: combine relies on what this kernel waited for
  SplitKv<Config>(p, *reinterpret_cast<SplitKvStorage<Config>*>(bytes)).run();
}

}  // namespace rooftile::gpu
