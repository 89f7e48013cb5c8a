// SPDX-License-Identifier: Apache-2.0
// A warp's state over the tokens it has seen, and how a tile of them gets into it.
// W: channels of the warp's own: D, or half of it where two warps have the same tiles; `part` is which half. Both then
// find the same scores. P^T is S^T transposed in registers; maximum, sum and rescaling never leave a lane's quad
// column.
#pragma once

#include "kernels/decode/mma_tile.cuh"

namespace rooftile::gpu {

// A warp's running state over its tokens of one leaf.
template <int W, KvFormat F>
struct WarpState {
  static constexpr bool has_zero_point = CodeKind<F>::has_zero_point;
  float m[2], l[2];   // l: this lane's share. m: what the weights count from, at most `slack` below the largest logit
  float min_term[2];  // the part of every output of the column that does not depend on d; this lane's share
  float o[W / 16 + has_zero_point]
         [4];     // (own d 16 i + g, columns 2t, 2t + 1), (d 16 i + 8 + g, ...); then how much they have too much
  float o_scale;  // o counts in this unit, a power of two; 0: nothing added yet

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      m[j] = -INFINITY;
      l[j] = min_term[j] = 0.0f;
    }
#pragma unroll
    for (auto& tile : o)
      for (float& x : tile) x = 0.0f;
    o_scale = 0.0f;
  }
  __device__ __forceinline__ void scale_sums(float first, float second) {
    if (o_scale == 0.0f) return;  // all zeros
#pragma unroll
    for (auto& tile : o) {
      tile[0] *= first;
      tile[1] *= second;
      tile[2] *= first;
      tile[3] *= second;
    }
  }
  // Of sums of codes.
  template <class T>
  __device__ __forceinline__ DequantSums<T, F> dequant_sums(const float (&weight)[2]) const {
    float zp_correction[2] = {};
    if constexpr (has_zero_point) zp_correction[0] = o[W / 16][0], zp_correction[1] = o[W / 16][1];
    return {zp_correction, min_term, weight, o_scale};
  }

  // Sums of codes become sums of elements, and elements may follow.
  template <class T>
  __device__ __forceinline__ void dequantize_sums() {
    if constexpr (has_min(F)) {
#pragma unroll
      for (float& x : min_term)
#pragma unroll
        for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    }
    const DequantSums<T, F> values = dequant_sums<T>({1.0f, 1.0f});
#pragma unroll
    for (int i = 0; i < W / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][e] = values(o[i][e], e);
    min_term[0] = min_term[1] = 0.0f;
    o_scale = 1.0f;
  }
};

// Brings the state to the maximum that these logits' weights count from and to the unit that their tokens' scales need:
// unit_top is the largest of them, as exceeds_unit takes it. Most often there is nothing to do.
template <int M, int W, KvFormat F>
__device__ __forceinline__ void update_max(const float (&s)[M][4], WarpState<W, F>& state,
                                           std::uint32_t max_scale_bits = 0) {
  float top[2] = {lane_max(s, 0), lane_max(s, 1)};
  const bool grows = !is_element_format(F) && exceeds_scale(max_scale_bits, state.o_scale);
  if (__any_sync(0xffffffffu,
                 top[0] > state.m[0] + rescale_threshold || top[1] > state.m[1] + rescale_threshold || grows)) {
    float scale[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top[j] = fmaxf(top[j], __shfl_xor_sync(0xffffffffu, top[j], step));
      const bool moves = top[j] > state.m[j] + rescale_threshold;
      scale[j] = moves ? tile::fast_exp2(state.m[j] - top[j]) : 1.0f;
      if (moves) state.m[j] = top[j];
      state.l[j] *= scale[j];
      state.min_term[j] *= scale[j];
    }
    const float o_scale = grows ? pow2_above(max_scale_bits) : state.o_scale,
                change = grows ? state.o_scale * inverse_pow2(o_scale) : 1.0f;
    state.scale_sums(scale[0] * change, scale[1] * change);
    state.o_scale = o_scale;
  }
}

// Logits become weights, which the state's sum takes in.
template <int M, int W, KvFormat F>
__device__ __forceinline__ void exp_and_sum(float (&s)[M][4], WarpState<W, F>& state) {
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float base = state.m[j] == -INFINITY ? 0.0f : state.m[j];
#pragma unroll
    for (int mt = 0; mt < M; ++mt)
#pragma unroll
      for (int i = j; i < 4; i += 2) {
        s[mt][i] = tile::fast_exp2(s[mt][i] - base);
        state.l[j] += s[mt][i];
      }
  }
}

template <int M, int W, KvFormat F>
__device__ __forceinline__ void online_softmax(float (&s)[M][4], WarpState<W, F>& state) {
  update_max(s, state);
  exp_and_sum(s, state);
}

// Weights of 16 tokens as operand B of the product with V.
template <class T>
__device__ __forceinline__ tile::FragmentB weights_fragment(const float (&s)[4]) {
  return {{tile::transpose_8x8(tile::pack<T>(s[0], s[1])), tile::transpose_8x8(tile::pack<T>(s[2], s[3]))}};
}

// The values of 16 tokens of 16 bits.
template <class T, int D, int W, KvFormat F>
__device__ __forceinline__ void add_pv16(WarpState<W, F>& state, const float (&s)[4], const T* v, int lane,
                                         int warp_d) {
  state.o_scale = 1.0f;
  const tile::FragmentB weights[1] = {weights_fragment<T>(s)};
  pv16<T, D, W / 16>(state.o, weights, v, warp_d * (W / 16), lane);
}
// Where some columns do not see all of them.
template <class T, int D, int W, KvFormat F>
__device__ __forceinline__ void add_pv16_masked(WarpState<W, F>& state, const float (&s)[4], const T* v,
                                                const Visible& see, int token, int lane, int warp_d) {
  state.o_scale = 1.0f;
  pv16_masked<T, D, W / 16>(state.o, weights_fragment<T>(s), v, see, token, warp_d * (W / 16), lane);
}

// What the values of 32 tokens are weighed with besides the probabilities: of the lane's own token, then of its rows of
// the scores.
// A token that no column sees has 0, whatever the memory holds.
template <KvFormat F>
struct TokenScales {
  float own_scale, own_zero_value;  // the scale, and what the minimum makes of the middle of the codes
  float scale[4], zero_value[has_min(F) ? 4 : 1];
  std::uint32_t max_scale_bits;  // the largest finite scale, as exceeds_unit takes it

  // On its way before the scores; spread() behind their products, so that nothing waits for it.
  template <class T, int D>
  __device__ __forceinline__ void load(const CodeTile<F, D>& x, const Visible& see, int token, int lane) {
    const bool wanted = token + lane >= see.outer_begin && token + lane < see.outer_end;
    const float stored = stored_scale<T>(x.v_scale()[lane]);
    own_scale = wanted ? stored : 0.0f;
    if constexpr (has_min(F)) {
      const float minimum = stored_scale<T>(x.second_scale()[lane]);
      own_zero_value = wanted ? minimum + 8.0f * own_scale : 0.0f;
    }
  }
  __device__ __forceinline__ void broadcast(int lane) {
    const std::uint32_t magnitude = __float_as_uint(own_scale) & 0x7fffffffu;
    max_scale_bits = __reduce_max_sync(0xffffffffu, magnitude < 0x7f800000u ? magnitude : 0u);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scale[i] = __shfl_sync(0xffffffffu, own_scale, 8 * i + lane / 4);
      if constexpr (has_min(F)) zero_value[i] = __shfl_sync(0xffffffffu, own_zero_value, 8 * i + lane / 4);
    }
  }
};

// Weights of 32 tokens times their scales as operands B; what the minima add goes into the shift. All: every column
// sees all of them, else what one does not see counts as 0 in it.
template <bool All, int W, KvFormat F>
__device__ __forceinline__ void scale_weights(tile::FragmentB (&weights)[2], WarpState<W, F>& state,
                                              const float (&s)[2][4], const TokenScales<F>& scales, const Visible& see,
                                              int token, int lane) {
  const float inverse = inverse_pow2(state.o_scale);
#pragma unroll
  for (int mt = 0; mt < 2; ++mt) {
    float p[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = token + 16 * mt + 8 * half + lane / 4;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool seen = All || (at >= see.begin[j] && at < see.end[j]);
        const float weight = s[mt][2 * half + j];
        if constexpr (has_min(F))
          state.min_term[j] =
              seen ? __fmaf_rn(weight, scales.zero_value[2 * mt + half], state.min_term[j]) : state.min_term[j];
        p[2 * half + j] = seen ? weight * (scales.scale[2 * mt + half] * inverse) : 0.0f;
      }
    }
    weights[mt] = weights_fragment<tile::half>(p);
  }
}

// Adds 32 tokens, `token` and the next: their weights, and their values times these. The tokens' scales go into the
// weights, minima into the column's shift. All: as weigh_tokens.
template <bool All, KvFormat F, int D, int W>
__device__ __forceinline__ void add_pv_codes(WarpState<W, F>& state, float (&s)[2][4], const CodeTile<F, D>& x,
                                             const TokenScales<F>& scales, const Visible& see, int token, int lane,
                                             int warp_d) {
  update_max(s, state, scales.max_scale_bits);
  exp_and_sum(s, state);
  tile::FragmentB weights[2];
  scale_weights<All>(weights, state, s, scales, see, token, lane);
  if constexpr (CodeKind<F>::has_zero_point) {
    constexpr std::uint32_t zero_point = CodeKind<F>::zero_point_pair;
#pragma unroll
    for (const tile::FragmentB& w : weights)
      tile::mma<tile::half>(state.o[W / 16], {{zero_point, zero_point, zero_point, zero_point}}, w);
  }
  const tile::FragmentB weights_b[2][1] = {{weights[0]}, {weights[1]}};
  pv_codes<F, D, W / 16>(state.o, weights_b, x, warp_d * (W / 32), lane);
}

}  // namespace rooftile::gpu
