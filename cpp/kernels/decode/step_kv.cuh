// SPDX-License-Identifier: Apache-2.0
// split_kv with BLK_M = 16 and a CTA-wide softmax: decode attention where a KV head has more than 8 packed rows (query
// heads times new tokens). Every byte is read and decoded once for two n-tiles of packed rows.
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

#include "kernels/decode/cta_state.cuh"
#include "kernels/decode/reduction.cuh"
#include "kernels/decode/pages.cuh"
#include "kernels/decode/work_range.cuh"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {

// How a step is distributed: each warp has one KV tile of the step's tokens and 32 channels of the output.
template <class Config>
struct StepTraits {
  static constexpr int D = Config::head_dim, warps = 4, threads = 32 * warps;
  static_assert(D == 32 * warps);
  static constexpr int tile_tokens = is_element_format(Config::format) ? 16 : 32, step_tokens = warps * tile_tokens;
  static constexpr int N = Config::n_tiles;  // n-tiles of 8 packed rows
  static constexpr int C = 2;                // m-tiles of 16 channels of a warp
};

template <class Config>
struct StepKvStorage {
  using Traits = StepTraits<Config>;
  using T = typename Config::T;
  static constexpr int D = Traits::D;
  KvTile<Config> ring[Config::stages][Traits::warps];
  // 16-bit weights for every format. The queries take the same memory until the first weights are written; in kivi
  // formats they keep their own, because raw keys need them after the codes.
  static constexpr int weights_size = Traits::N * Traits::step_tokens * mma_n, queries_size = Traits::N * mma_n * D;
  alignas(16) T
      weights_or_queries[is_kivi(Config::format) || weights_size > queries_size ? weights_size : queries_size];
  alignas(16) T raw_queries[is_kivi(Config::format) ? queries_size : 8];
  static constexpr int raw_tiles = 2;  // raw tiles in shared memory, K and V each
  alignas(128) T raw[is_kivi(Config::format) ? raw_tiles : 1][2][is_kivi(Config::format) ? 16 * D : 8];
  float row_max[Traits::warps][Traits::N * mma_n];  // row maxima of the logits: (warp, packed row)
  std::uint32_t max_scale_bits[Traits::warps];      // (warp): largest V scale of a step
  float l[Traits::warps][Traits::N * mma_n], min_term[Traits::warps][Traits::N * mma_n],
      zp_correction[Traits::warps][Traits::N * mma_n];
  ReductionStorage<2 * Traits::N, Traits::N * Traits::C * 4, Traits::threads, Traits::threads / 8, Config::smem_levels>
      reduction;
  WorkRange range;
  int bad_tile_range;  // the last tile range that met an invalid page

  // Weights of a step in Bits16's element type, 16 bytes a token.
  template <class Bits16>
  __device__ auto weights() {
    using namespace cute;
    using Rows = Int<mma_n>;
    using Tokens = Int<Traits::step_tokens>;
    return make_tensor(make_smem_ptr<typename Bits16::Element>(static_cast<void*>(weights_or_queries)),
                       Layout<Shape<Rows, Tokens, Int<Traits::N>>>{});  // (8 packed rows, tokens of a step, N)
  }
  __device__ T* queries(int n) { return (is_kivi(Config::format) ? raw_queries : weights_or_queries) + n * mma_n * D; }
};

template <class Config>
class StepKv {
  using T = typename Config::T;
  using Traits = StepTraits<Config>;
  static constexpr int D = Traits::D, N = Traits::N, C = Traits::C, warps = Traits::warps,
                       tile_tokens = Traits::tile_tokens, step_tokens = Traits::step_tokens;
  static constexpr KvFormat format = Config::format;
  static constexpr bool elements = is_element_format(format);
  using Bits16 = Bits16Traits<T, D>;
  static constexpr int partial_values = N * C * 4;
  using ThreadPartial = Partial<2 * N, partial_values>;  // m, l (n, j) at 2 n + j; o (n, i, e) at (n * C + i) * 4 + e

 public:
  __device__ StepKv(const DecodeParams& p, StepKvStorage<Config>& smem)
      : p(p), smem(smem), warp(threadIdx.x / 32), lane(threadIdx.x % 32), page_shift(first_bit(p.cache.page_size)) {}

  __device__ void run() {
    if (!store_range(find_work_range<format>(p), smem.range, smem.bad_tile_range)) return;
    for_each_tile_range<format>(p, smem.range, [&](const WorkTile& tile, const RowWork& w, int first, int last) {
      if (first < last)
        compute_tile_range({tile.b, tile.kv_head, tile.m_block * N}, w, first, last, smem.range.range_index);
    });
  }

 private:
  __device__ bool saw_invalid_page() const { return smem.bad_tile_range == this_tile_range; }  // in this tile range
  // The channel of value (i, e) of a partial.
  __device__ int channel(int i, int e) const { return 16 * (C * warp + i) + 8 * (e / 2) + lane / 4; }

  // Computes KV splits [first, last) of one work tile.
  __device__ void compute_tile_range(const WorkTile& tile, const RowWork& w, int first, int last, int range_index) {
    const int rows_used = p.q_per_kv * p.tokens - tile.m_block * mma_n;  // packed rows that are not padding
    ++this_tile_range;
    __syncthreads();  // all threads have read the previous range's queries, weights and bad_tile_range
    constexpr int gmem_floats = decltype(smem.reduction)::gmem_levels * partial_values * Traits::threads;
    PartialReduction<2 * N, partial_values, Traits::threads, Traits::threads / 8, Config::smem_levels> reduction(
        smem.reduction, p.reduction_o + std::int64_t{work_range_index()} * gmem_floats, threadIdx.x,
        warp * 4 + lane % 4, first, last - first == 1 && w.splits > 1);
    int partial_index = range_index * partials_per_cta + (first > 0 ? 0 : partials_inside);
    // Calls visit(n, j, m_row) for the lane's packed rows that are not padding.
    const auto for_each_row = [&](const auto& visit) {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (const int m_row = n * mma_n + lane % 4 * 2 + j; m_row < rows_used) visit(n, j, m_row);
    };
    // Calls visit(channel, value) for the lane's values of packed row (n, j).
    const auto for_each_value = [&](const ThreadPartial& partial, int n, int j, const auto& visit) {
#pragma unroll
      for (int i = 0; i < C; ++i)
#pragma unroll
        for (int e = j; e < 4; e += 2) visit(channel(i, e), partial.o[(n * C + i) * 4 + e]);
    };
    const bool writes_ml = warp == 0 && lane < 4;
    const auto emit = [&](const ThreadPartial& partial) {
      const std::int64_t row = std::int64_t{partial_index++} * (N * mma_n);
      for_each_row([&](int n, int j, int m_row) {
        for_each_value(partial, n, j, [&](int d, float o) { p.partial_o[(row + m_row) * D + d] = o; });
        if (writes_ml)
          *reinterpret_cast<float2*>(p.partial_ml + (row + m_row) * 2) =
              make_float2(partial.m[2 * n + j], saw_invalid_page() ? -1.0f : partial.l[2 * n + j]);
      });
    };
    state.reset();
    compute_splits(tile, w, first, last,
                   [&](int split, const float (&raw)[N* C][4]) { reduction.push(take_partial(raw), split, emit); });
    if (first > 0 || last < w.splits) {
      reduction.flush(emit);
      return;
    }
    const ThreadPartial result = reduction.result();
    if (saw_invalid_page()) return;
    for_each_row([&](int n, int j, int m_row) {
      RowEpilogue<T> epilogue(p, tile, w, m_row);
      epilogue.finalize(result.m[2 * n + j], result.l[2 * n + j]);
      for_each_value(result, n, j, [&](int d, float o) {
        const float one[1] = {o};
        epilogue.store(d, one);
      });
      if (writes_ml) epilogue.store_lse();
    });
  }

  // Returns the CTA's state as a partial and resets it. raw: sums of raw tokens, added to the sums of codes.
  // Sync: the warps' sums are read after the barrier, and written again after a later step's barrier.
  __device__ ThreadPartial take_partial(const float (&raw)[N * C][4]) {
    constexpr bool codes = !elements, has_zero_point = CodeKind<format>::has_zero_point, has_minimum = has_min(format);
    const int t = lane % 4;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          state.l[n][j] += __shfl_xor_sync(0xffffffffu, state.l[n][j], step);
          if constexpr (has_minimum) state.min_term[n][j] += __shfl_xor_sync(0xffffffffu, state.min_term[n][j], step);
        }
    if (lane < 4)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const auto store = [&](float (&to)[warps][N* mma_n], float x, float y) {
          *reinterpret_cast<float2*>(&to[warp][n * mma_n + 2 * t]) = make_float2(x, y);
        };
        store(smem.l, state.l[n][0], state.l[n][1]);
        if constexpr (has_minimum) store(smem.min_term, state.min_term[n][0], state.min_term[n][1]);
        if constexpr (has_zero_point) store(smem.zp_correction, state.zp_correction[n][0], state.zp_correction[n][1]);
      }
    __syncthreads();  // all warps' sums are in shared memory
    ThreadPartial partial;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const auto sum_warps = [&](const float (&from)[warps][N* mma_n], float (&sum)[2]) {
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < warps; ++i) {
          const float2 x = *reinterpret_cast<const float2*>(&from[i][n * mma_n + 2 * t]);
          sum[0] += x.x;
          sum[1] += x.y;
        }
      };
      float zp_correction[2] = {}, min_term[2] = {};
      float l[2];
      sum_warps(smem.l, l);
      if constexpr (has_zero_point) sum_warps(smem.zp_correction, zp_correction);
      if constexpr (has_minimum) sum_warps(smem.min_term, min_term);
      const DequantSums<T, format> values(zp_correction, min_term, {1.0f, 1.0f}, state.o_scale);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        partial.m[2 * n + j] = state.m[n][j];
        partial.l[2 * n + j] = l[j];
      }
#pragma unroll
      for (int i = 0; i < C; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float o = state.o[n * C + i][e];
          partial.o[(n * C + i) * 4 + e] = (codes ? values(o, e) : o) + (is_kivi(format) ? raw[n * C + i][e] : 0.0f);
        }
    }
    state.reset();
    return partial;
  }

  // split_end(split, raw) is called when the CTA's state has all tokens of a split.
  template <class SplitEnd>
  __device__ void compute_splits(const WorkTile& tile, const RowWork& w, int first, int last,
                                 const SplitEnd& split_end) {
    Visible see[N];  // (n-tile)
    find_visible(tile, w, false, see);
    if constexpr (elements) element_tiles(tile, w, see, first, last, split_end);
    else code_tiles(tile, w, see, first, last, split_end);
  }
  __device__ void find_visible(const WorkTile& tile, const RowWork& w, bool raw, Visible (&see)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) see[n] = visible(p, {tile.b, tile.kv_head, tile.m_block + n}, w, lane, raw);
  }
  // seen: whether any packed row sees the token. all_see: whether every packed row sees all of `tokens` tokens from
  // there on.
  __device__ static bool seen(const Visible (&see)[N], int token) {
    bool any = false;
#pragma unroll
    for (int n = 0; n < N; ++n) any |= token >= see[n].outer_begin && token < see[n].outer_end;
    return any;
  }
  __device__ static bool all_see(const Visible (&see)[N], int token, int tokens) {
    bool all = true;
#pragma unroll
    for (int n = 0; n < N; ++n) all &= all_seen(see[n], token, tokens);
    return all;
  }

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

  // ---- weights of a step ----

  // Moves all reference maxima to the step's row maxima (s: this lane's logits), and o_scale to the step's largest V
  // scale. Rescales the state. rescale(n, factors) does the same for sums outside the state.
  template <int M, class Rescale>
  __device__ void update_max(const float (&s)[N][M][4], std::uint32_t max_scale_bits, const Rescale& rescale) {
    const int t = lane % 4;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float top[2] = {lane_max(s[n], 0), lane_max(s[n], 1)};
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top[j] = fmaxf(top[j], __shfl_xor_sync(0xffffffffu, top[j], step));
      if (lane < 4) *reinterpret_cast<float2*>(&smem.row_max[warp][n * mma_n + 2 * t]) = make_float2(top[0], top[1]);
    }
    if (lane == 0) smem.max_scale_bits[warp] = max_scale_bits;
    __syncthreads();  // all warps' maxima are in shared memory, and no thread reads weights
    float change = 1.0f;
    if constexpr (!elements) {
      std::uint32_t scale = 0;
#pragma unroll
      for (int i = 0; i < warps; ++i) scale = max(scale, smem.max_scale_bits[i]);
      if (exceeds_scale(scale, state.o_scale)) {
        const float o_scale = pow2_above(scale);
        change = state.o_scale * inverse_pow2(o_scale);
        state.o_scale = o_scale;
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float scale[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < warps; ++i) top = fmaxf(top, smem.row_max[i][n * mma_n + 2 * t + j]);
        const bool moves = top > state.m[n][j] + rescale_threshold;
        scale[j] = moves ? tile::fast_exp2(state.m[n][j] - top) : 1.0f;
        if (moves) state.m[n][j] = top;
        state.l[n][j] *= scale[j];
        state.min_term[n][j] *= scale[j];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float by = scale[e % 2] * change;
#pragma unroll
        for (int i = 0; i < C; ++i) state.o[n * C + i][e] *= by;
        state.zp_correction[n][e] *= by;
      }
      rescale(n, scale);
    }
  }

  // Computes a step's weights from its logits: store(sum, min_term) writes this lane's weights and sums them. After
  // return all warps' weights and what wait_v() waits for are visible. Weights up to 2^rescale_threshold are left as
  // they are; their sum tells whether one may be larger. Without a maximum yet, all weights may be 0 although logits
  // are finite: a KV split's first step computes the maxima before any weight.
  template <int M, class Store, class WaitV, class Rescale>
  __device__ void compute_weights(const float (&s)[N][M][4], std::uint32_t max_scale_bits, bool more,
                                  const Store& store, const WaitV& wait_v, const Rescale& rescale) {
    float sum[N][2], min_term[N][2];  // (n-tile, packed row 2t + j)
    wait_v();
#pragma unroll 1
    for (bool moves = state.empty;; moves = true) {
      if (moves) update_max(s, max_scale_bits, rescale);
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n][0] = sum[n][1] = min_term[n][0] = min_term[n][1] = 0.0f;
      store(sum, min_term);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          more |= state.m[n][j] == -INFINITY ? lane_max(s[n], j) > -INFINITY : sum[n][j] > max_weight;
      if (!__syncthreads_or(more && !moves)) break;  // all weights are in shared memory; repeat if one may be too large
    }
    state.empty = false;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        state.l[n][j] += sum[n][j];
        if constexpr (has_min(format)) state.min_term[n][j] += min_term[n][j];
      }
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

  // A step in 16 bits: `tiles` KV tiles of 16 tokens from `token` on. keys(i), values(i): K and V of tile i, (16
  // tokens, D); rows that no packed row sees are zeros. rQ (MMA, N, D / 16).
  template <class Keys, class Values, class Tiles, class Queries, class WaitV, class RefillK, class Rescale>
  __device__ void element_step(const Keys& keys, const Values& values, Tiles tiles, const Queries& rQ,
                               const Visible (&see)[N], int token, float (&o)[N * C][4], const WaitV& wait_v,
                               const RefillK& refill_k, const Rescale& rescale) {
    using namespace cute;
    const int own = token + 16 * warp;
    Tensor sP = smem.template weights<Bits16>();  // (8 packed rows, tokens of a step, N)
    float s[N][1][4];                             // (n-tile, m-tile of 16 tokens, 4)
    if (tiles == warps || warp < tiles) {
      qk16<Bits16>(s, keys(warp), rQ, lane);
      const float factor = logit_factor(p, 1.0f);
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][0][i] *= factor;
        soft_cap(s[n], p.softcap);
        mask(s[n], see[n], own, lane);
      }
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][0][i] = -INFINITY;
    }
    compute_weights(
        s, 0, false,
        [&](float (&sum)[N][2], float (&)[N][2]) {
#pragma unroll
          for (int n = 0; n < N; ++n) {
            float weight[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              weight[i] = weight_of(s[n][0][i], state.m[n][i & 1]);
              sum[n][i & 1] += weight[i];
            }
            store_weights<T, Bits16>(weight, local_tile(sP(_, _, n), Shape<Int<mma_n>, _16>{}, make_coord(0, warp)),
                                     lane);
          }
        },
        wait_v, rescale);
    refill_k();
    auto rO = accumulators<C, N>(o);  // (MMA, C, N)
#pragma unroll
    for (int at = 0; at < warps; at += 2) {
      if (tiles < warps && at >= tiles) break;
      Tensor rP = load_weights<Bits16>(local_tile(sP, Shape<Int<mma_n>, _32, Int<N>>{}, make_coord(0, at / 2, 0)),
                                       lane);  // (MMA, two k-tiles of 16 tokens, N)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (tiles < warps && at + i >= tiles) break;
        const int first = token + 16 * (at + i);
        const auto sV = values(at + i);  // (16 tokens, D)
        if (p.tokens == 1 || all_see(see, first, 16)) {
          pv16<Bits16>(rO, rP(_, i, _), sV, C * warp, lane);
        } else {
#pragma unroll
          for (int n = 0; n < N; ++n) pv16_masked<Bits16>(rO(_, _, n), rP(_, i, n), sV, see[n], first, C * warp, lane);
        }
      }
    }
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

  // A step in codes: `warps` KV tiles of 32 tokens from `token` on. A tile past the end of the row holds arbitrary
  // codes, and its weights are 0.
  template <class WaitV, class RefillK>
  __device__ void code_step(const CodeTile<format, D>* tiles, const CodeQueries<format, D> (&q)[N],
                            const float (&factor)[N][2], const Visible (&see)[N], int token, const WaitV& wait_v,
                            const RefillK& refill_k) {
    const int own = token + 32 * warp;
    const CodeTile<format, D>& own_tile = tiles[warp];
    const bool all = all_see(see, own, 32);
    const StepScales<format> scales(own_tile, all || seen(see, own + lane), lane, T(0.0f));
    float s[N][2][4];  // (n-tile, m-tile of 16 tokens, 4)
    qk_codes<T, format, D>(s, own_tile, q, factor, lane);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      soft_cap(s[n], p.softcap);
      if (!all) mask(s[n], see[n], own, lane);
    }
    using namespace cute;
    using Weights = Bits16Traits<tile::half, D>;
    Tensor sP = smem.template weights<Weights>();  // (8 packed rows, tokens of a step, N)
    float zero_value[4];                           // tokens 8 i + g of the warp's tile
#pragma unroll
    for (int i = 0; i < 4; ++i)
      zero_value[i] = has_min(format) ? __shfl_sync(0xffffffffu, scales.zero_value, 8 * i + lane / 4) : 0.0f;
    compute_weights(
        s, scales.max_scale_bits, exceeds_scale(scales.max_scale_bits, state.o_scale),
        [&](float (&sum)[N][2], float (&min_term)[N][2]) {
          const float scaled = scales.scale * inverse_pow2(state.o_scale);
          float scale[4];  // tokens 8 i + g of the warp's tile
#pragma unroll
          for (int i = 0; i < 4; ++i) scale[i] = __shfl_sync(0xffffffffu, scaled, 8 * i + lane / 4);
          // A packed row that does not see a token must not meet its scale either: the scale may be NaN.
          const auto store = [&](auto all_seen) {
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
              for (int mt = 0; mt < 2; ++mt) {
                float weight[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  const int j = i & 1, row = 2 * mt + i / 2, position = own + 8 * row + lane / 4;
                  const bool counts = all_seen || (position >= see[n].begin[j] && position < see[n].end[j]);
                  const float w = weight_of(s[n][mt][i], state.m[n][j]);
                  sum[n][j] += w;
                  if constexpr (has_min(format))
                    min_term[n][j] = counts ? __fmaf_rn(w, zero_value[row], min_term[n][j]) : min_term[n][j];
                  weight[i] = counts ? w * scale[row] : 0.0f;
                }
                store_weights<tile::half, Weights>(
                    weight, local_tile(sP(_, _, n), Shape<Int<mma_n>, _16>{}, make_coord(0, 2 * warp + mt)), lane);
              }
          };
          if (all) store(std::true_type());
          else store(std::false_type());
        },
        wait_v, [](int, const float (&)[2]) {});
    refill_k();
    const auto weights_of = [&](int tile, tile::FragmentB(&weights)[2][N]) {
      Tensor rP = load_weights<Weights>(local_tile(sP, Shape<Int<mma_n>, _32, Int<N>>{}, make_coord(0, tile, 0)),
                                        lane);   // (MMA, two k-tiles of 16 tokens, N)
      Tensor pairs = recast<std::uint32_t>(rP);  // (2, 2, N): pairs of tokens
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) weights[i][n] = {{pairs(0, i, n), pairs(1, i, n)}};
    };
    if constexpr (CodeKind<format>::has_zero_point) {
      constexpr std::uint32_t zero_point = CodeKind<format>::zero_point_pair;
      tile::FragmentB weights[2][N];  // (k-tile of 16 tokens, n-tile)
      weights_of(warp, weights);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int mt = 0; mt < 2; ++mt)
          tile::mma<tile::half>(state.zp_correction[n], {{zero_point, zero_point, zero_point, zero_point}},
                                weights[mt][n]);
    }
#pragma unroll
    for (int tile = 0; tile < warps; ++tile) {
      tile::FragmentB weights[2][N];  // (k-tile of 16 tokens, n-tile)
      weights_of(tile, weights);
      pv_codes<format, D, C>(state.o, weights, tiles[tile], warp, lane);
    }
  }

  // ---- raw tokens of a kivi row ----

  // At most 64 raw tokens, at the end of the row's last split: KV tiles of 16 tokens, raw_tiles at once.
  static constexpr int raw_tiles = StepKvStorage<Config>::raw_tiles;
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

  const DecodeParams& p;
  StepKvStorage<Config>& smem;
  const int warp, lane, page_shift;
  int this_tile_range = 0;
  CtaState<N, C, format> state;
};

template <class Config>
__global__ __launch_bounds__(StepTraits<Config>::threads,
                             Config::ctas_per_sm) void step_kv(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) unsigned char bytes[];
  prefetch_lengths(p);
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();  // after the wait: combine relies on what this kernel waited for
  StepKv<Config>(p, *reinterpret_cast<StepKvStorage<Config>*>(bytes)).run();
}

}  // namespace rooftile::gpu
