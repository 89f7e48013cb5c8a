// SPDX-License-Identifier: Apache-2.0
// The softmax of a step of step_kv, shared by all warps of a CTA through shared memory.
#pragma once

#include "kernels/decode/cta_state.cuh"
#include "kernels/decode/partial_map.cuh"
#include "kernels/decode/tree_reduction.cuh"

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
struct CtaMainloopStorage {
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

// Moves all reference maxima to the step's row maxima (s: this lane's logits), and o_scale to the step's largest V
// scale. Rescales the state. rescale(n, factors) does the same for sums outside the state.
template <int M, int N, int C, KvFormat format, class Storage, class Rescale>
__device__ __forceinline__ void update_max(CtaState<N, C, format>& state, Storage& smem, const float (&s)[N][M][4],
                                           std::uint32_t max_scale_bits, const Rescale& rescale, int warp, int lane) {
  constexpr int warps = Storage::Traits::warps;
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
  if constexpr (!is_element_format(format)) {
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
template <int M, int N, int C, KvFormat format, class Storage, class Store, class WaitV, class Rescale>
__device__ __forceinline__ void compute_weights(CtaState<N, C, format>& state, Storage& smem, const float (&s)[N][M][4],
                                                std::uint32_t max_scale_bits, bool more, const Store& store,
                                                const WaitV& wait_v, const Rescale& rescale, int warp, int lane) {
  float sum[N][2], min_term[N][2];  // (n-tile, packed row 2t + j)
  wait_v();
#pragma unroll 1
  for (bool moves = state.empty;; moves = true) {
    if (moves) update_max(state, smem, s, max_scale_bits, rescale, warp, lane);
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

// Returns the CTA's state as a partial and resets it. raw: sums of raw tokens, added to the sums of codes.
// Sync: the warps' sums are read after the barrier, and written again after a later step's barrier.
template <class T, int N, int C, KvFormat format, class Storage>
__device__ __forceinline__ auto take_partial(CtaState<N, C, format>& state, Storage& smem, const float (&raw)[N * C][4],
                                             int warp, int lane) {
  constexpr int warps = Storage::Traits::warps;
  constexpr bool codes = !is_element_format(format), has_zero_point = CodeKind<format>::has_zero_point,
                 has_minimum = has_min(format);
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
  Partial<2 * N, N * C * 4> partial;
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

}  // namespace rooftile::gpu
