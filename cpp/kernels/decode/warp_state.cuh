// SPDX-License-Identifier: Apache-2.0
// A warp's state over the tokens it has seen, and how a tile of them gets into it.
// W: channels of the warp's own: D, or half of it where two warps have the same tiles; `part` is which half. Both then
// find the same scores. P^T is S^T transposed in registers; maximum, sum and rescaling never leave a lane's quad
// column.
#pragma once

#include "kernels/decode/tiles.cuh"

namespace rooftile::gpu {

// A warp's running state over its tokens of one leaf.
template <int W, KvFormat F>
struct WarpState {
  static constexpr bool middle = CodeKind<F>::middle;
  float m[2], l[2];  // l: this lane's share. m: what the weights count from, at most `slack` below the largest logit
  float shift[2];    // the part of every output of the column that does not depend on d; this lane's share
  float o[W / 16 + middle]
         [4];  // (own d 16 i + g, columns 2t, 2t + 1), (d 16 i + 8 + g, ...); then how much they have too much
  float unit;  // o counts in this unit, a power of two; 0: nothing added yet

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      m[j] = -INFINITY;
      l[j] = shift[j] = 0.0f;
    }
#pragma unroll
    for (auto& tile : o)
      for (float& x : tile) x = 0.0f;
    unit = 0.0f;
  }
  __device__ __forceinline__ void scale_values(float first, float second) {
    if (unit == 0.0f) return;  // all zeros
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
  __device__ __forceinline__ CodeValues<T, F> code_values(const float (&weight)[2]) const {
    float excess[2] = {};
    if constexpr (middle) excess[0] = o[W / 16][0], excess[1] = o[W / 16][1];
    return {excess, shift, weight, unit};
  }

  // Sums of codes become sums of elements, and elements may follow.
  template <class T>
  __device__ __forceinline__ void become_elements() {
    if constexpr (has_min(F)) {
#pragma unroll
      for (float& x : shift)
#pragma unroll
        for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    }
    const CodeValues<T, F> values = code_values<T>({1.0f, 1.0f});
#pragma unroll
    for (int i = 0; i < W / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][e] = values(o[i][e], e);
    shift[0] = shift[1] = 0.0f;
    unit = 1.0f;
  }
};

// Brings the state to the maximum that these logits' weights count from and to the unit that their tokens' scales need:
// unit_top is the largest of them, as exceeds_unit takes it. Most often there is nothing to do.
template <int M, int W, KvFormat F>
__device__ __forceinline__ void follow_maximum(const float (&s)[M][4], WarpState<W, F>& state,
                                               std::uint32_t unit_top = 0) {
  float top[2] = {largest(s, 0), largest(s, 1)};
  const bool grows = !is_element_format(F) && exceeds_unit(unit_top, state.unit);
  if (__any_sync(0xffffffffu, top[0] > state.m[0] + slack || top[1] > state.m[1] + slack || grows)) {
    float scale[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top[j] = fmaxf(top[j], __shfl_xor_sync(0xffffffffu, top[j], step));
      const bool follows = top[j] > state.m[j] + slack;
      scale[j] = follows ? tile::fast_exp2(state.m[j] - top[j]) : 1.0f;
      if (follows) state.m[j] = top[j];
      state.l[j] *= scale[j];
      state.shift[j] *= scale[j];
    }
    const float unit = grows ? unit_above(unit_top) : state.unit,
                change = grows ? state.unit * inverse_of_unit(unit) : 1.0f;
    state.scale_values(scale[0] * change, scale[1] * change);
    state.unit = unit;
  }
}

// Logits become weights, which the state's sum takes in.
template <int M, int W, KvFormat F>
__device__ __forceinline__ void take_weights(float (&s)[M][4], WarpState<W, F>& state) {
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
  follow_maximum(s, state);
  take_weights(s, state);
}

// Weights of 16 tokens as operand B of the product with V.
template <class T>
__device__ __forceinline__ tile::FragmentB weights_fragment(const float (&s)[4]) {
  return {{tile::transpose_8x8(tile::pack<T>(s[0], s[1])), tile::transpose_8x8(tile::pack<T>(s[2], s[3]))}};
}

// The values of 16 tokens of 16 bits.
template <class T, int D, int W, KvFormat F>
__device__ __forceinline__ void add_values16(WarpState<W, F>& state, const float (&s)[4], const T* v, int lane,
                                             int part) {
  state.unit = 1.0f;
  const tile::FragmentB weights[1] = {weights_fragment<T>(s)};
  values16<T, D, W / 16>(state.o, weights, v, part * (W / 16), lane);
}
// Where some columns do not see all of them.
template <class T, int D, int W, KvFormat F>
__device__ __forceinline__ void add_values16_apart(WarpState<W, F>& state, const float (&s)[4], const T* v,
                                                   const Visible& see, int token, int lane, int part) {
  state.unit = 1.0f;
  values16_apart<T, D, W / 16>(state.o, weights_fragment<T>(s), v, see, token, part * (W / 16), lane);
}

// What the values of 32 tokens are weighed with besides the probabilities: of the lane's own token, then of its rows of
// the scores.
// A token that no column sees has 0, whatever the memory holds.
template <KvFormat F>
struct TokenScales {
  float own, own_middle;  // the scale, and what the minimum makes of the middle of the codes
  float scale[4], middle[has_min(F) ? 4 : 1];
  std::uint32_t top;  // the largest finite scale, as exceeds_unit takes it

  // On its way before the scores; spread() behind their products, so that nothing waits for it.
  template <class T, int D>
  __device__ __forceinline__ void load(const CodeStage<F, D>& x, const Visible& see, int token, int lane) {
    const bool wanted = token + lane >= see.outer_begin && token + lane < see.outer_end;
    const float stored = stored_scale<T>(x.v_scale()[lane]);
    own = wanted ? stored : 0.0f;
    if constexpr (has_min(F)) {
      const float least = stored_scale<T>(x.second_scale()[lane]);
      own_middle = wanted ? least + 8.0f * own : 0.0f;
    }
  }
  __device__ __forceinline__ void spread(int lane) {
    const std::uint32_t magnitude = __float_as_uint(own) & 0x7fffffffu;
    top = __reduce_max_sync(0xffffffffu, magnitude < 0x7f800000u ? magnitude : 0u);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scale[i] = __shfl_sync(0xffffffffu, own, 8 * i + lane / 4);
      if constexpr (has_min(F)) middle[i] = __shfl_sync(0xffffffffu, own_middle, 8 * i + lane / 4);
    }
  }
};

// Weights of 32 tokens times their scales as operands B; what the minima add goes into the shift. All: every column
// sees all of them, else what one does not see counts as 0 in it.
template <bool All, int W, KvFormat F>
__device__ __forceinline__ void weigh_tokens(tile::FragmentB (&weights)[2], WarpState<W, F>& state,
                                             const float (&s)[2][4], const TokenScales<F>& scales, const Visible& see,
                                             int token, int lane) {
  const float inverse = inverse_of_unit(state.unit);
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
          state.shift[j] = seen ? __fmaf_rn(weight, scales.middle[2 * mt + half], state.shift[j]) : state.shift[j];
        p[2 * half + j] = seen ? weight * (scales.scale[2 * mt + half] * inverse) : 0.0f;
      }
    }
    weights[mt] = weights_fragment<tile::half>(p);
  }
}

// Adds 32 tokens, `token` and the next: their weights, and their values times these. The tokens' scales go into the
// weights, minima into the column's shift. All: as weigh_tokens.
template <bool All, KvFormat F, int D, int W>
__device__ __forceinline__ void add_code_values(WarpState<W, F>& state, float (&s)[2][4], const CodeStage<F, D>& x,
                                                const TokenScales<F>& scales, const Visible& see, int token, int lane,
                                                int part) {
  follow_maximum(s, state, scales.top);
  take_weights(s, state);
  tile::FragmentB weights[2];
  weigh_tokens<All>(weights, state, s, scales, see, token, lane);
  if constexpr (CodeKind<F>::middle) {
    constexpr std::uint32_t excess = CodeKind<F>::excess_pair;
#pragma unroll
    for (const tile::FragmentB& w : weights)
      tile::mma<tile::half>(state.o[W / 16], {{excess, excess, excess, excess}}, w);
  }
  const tile::FragmentB of_columns[2][1] = {{weights[0]}, {weights[1]}};
  code_values<F, D, W / 16>(state.o, of_columns, x, part * (W / 32), lane);
}

}  // namespace rooftile::gpu
