// SPDX-License-Identifier: Apache-2.0
// Softmax state of one warp (split_kv), and how a KV tile is added to it.
// W: channels of the warp: D, or a part of D where several warps compute the same tile; warp_d is the part. These warps
// compute the same logits. P^T is S^T transposed in registers, so maximum, sum and rescaling stay within the lanes that
// share a packed row.
#pragma once

#include "kernels/decode/mma_tile.cuh"
#include "kernels/decode/partial_map.cuh"

namespace rooftile::gpu {

// State of a warp over its tokens of one KV split. A lane's packed rows are 2t and 2t + 1.
template <int W, KvFormat F>
struct WarpState {
  static constexpr bool has_zero_point = CodeKind<F>::has_zero_point;
  // m: reference maximum of the weights, at most rescale_threshold below the row's maximum. l: this lane's part of the
  // sum of weights. min_term: this lane's part of the sum of weight x zero value, the part of the output that is the
  // same for all channels.
  float m[2], l[2];   // (packed row 2t + j)
  float min_term[2];  // (packed row 2t + j)
  // Tile i holds channels 16 i + g (elements 0, 1) and 16 i + 8 + g (elements 2, 3) of the warp. The last tile is the
  // zero-point correction of codes.
  float o[W / 16 + has_zero_point][4];  // (W / 16 mma tiles of 16 channels and a correction, 4)
  float o_scale;                        // a power of two: the sum is o * o_scale; 0: nothing added yet

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
    if (o_scale == 0.0f) return;  // o is all zeros
#pragma unroll
    for (auto& tile : o) {
      tile[0] *= first;
      tile[1] *= second;
      tile[2] *= first;
      tile[3] *= second;
    }
  }
  // Converts sums of codes.
  template <class T>
  __device__ __forceinline__ DequantSums<T, F> dequant_sums(const float (&weight)[2]) const {
    float zp_correction[2] = {};
    if constexpr (has_zero_point) zp_correction[0] = o[W / 16][0], zp_correction[1] = o[W / 16][1];
    return {zp_correction, min_term, weight, o_scale};
  }

  // Converts sums of codes to sums of dequantised values, so that 16-bit tokens can be added.
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

// Moves the state to the maximum of these logits and to the scale that their tokens need. max_scale_bits: the largest
// scale, as exceeds_scale takes it. Usually neither changes.
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

// Replaces logits by weights 2^(s - m) and adds them to the state's sum.
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

// Weights of 16 tokens as the B operand of V^T P^T.
template <class T>
__device__ __forceinline__ tile::FragmentB weights_fragment(const float (&s)[4]) {
  return {{tile::transpose_8x8(tile::pack<T>(s[0], s[1])), tile::transpose_8x8(tile::pack<T>(s[2], s[3]))}};
}

// Adds weight x V of 16 tokens in 16 bits. sV (16 tokens, D). all: every packed row sees all of the tokens.
template <class Traits, class T, int W, KvFormat F, class STensor>
__device__ __forceinline__ void add_pv16(WarpState<W, F>& state, const float (&s)[4], const STensor& sV, bool all,
                                         const Visible& see, int token, int lane, int warp_d) {
  state.o_scale = 1.0f;
  const auto rP = weights_operand<T, Traits>(s);  // (MMA, 1)
  auto rO = accumulators<W / 16, 1>(state.o);     // (MMA, W / 16, 1)
  const int first = warp_d * (W / 16);
  if (all) pv16<Traits>(rO, rP, sV, first, lane);
  else pv16_masked<Traits>(rO(cute::_, cute::_, 0), rP(cute::_, 0), sV, see, token, first, lane);
}

// Scales and zero values of V for 32 tokens: of the lane's own token, then of the lane's rows of S^T. A token that no
// packed row sees gets 0, whatever is in memory.
template <KvFormat F>
struct TokenScales {
  float own_scale, own_zero_value;                 // V's scale; min + 8 * scale
  float scale[4], zero_value[has_min(F) ? 4 : 1];  // tokens 8 i + g
  std::uint32_t max_scale_bits;                    // the largest finite scale, as exceeds_scale takes it

  // load() comes before the MMAs of the scores, broadcast() after them, so that nothing waits for the loads.
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

// Multiplies the weights of 32 tokens by V's scales and packs them as B operands. Adds weight x zero value to the min
// term. All: every packed row sees all 32 tokens; otherwise a token that a row does not see counts as 0.
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

// Adds the 32 tokens from `token` on to the state. V's scales are multiplied into the weights, minima go into the min
// term. All: as in scale_weights.
template <bool All, KvFormat F, int D, int W>
__device__ __forceinline__ void add_pv_codes(WarpState<W, F>& state, float (&s)[2][4], const CodeTile<F, D>& x,
                                             const TokenScales<F>& scales, const Visible& see, int token, int lane,
                                             int warp_d) {
  update_max(s, state, scales.max_scale_bits);
  exp_and_sum(s, state);
  tile::FragmentB weights[2];  // (k-tile of 16 tokens)
  scale_weights<All>(weights, state, s, scales, see, token, lane);
  if constexpr (CodeKind<F>::has_zero_point) {
    constexpr std::uint32_t zero_point = CodeKind<F>::zero_point_pair;
#pragma unroll
    for (const tile::FragmentB& w : weights)
      tile::mma<tile::half>(state.o[W / 16], {{zero_point, zero_point, zero_point, zero_point}}, w);
  }
  const tile::FragmentB weights_b[2][1] = {{weights[0]}, {weights[1]}};  // (k-tile of 16 tokens, n-tile)
  pv_codes<F, D, W / 16>(state.o, weights_b, x, warp_d * (W / 32), lane);
}

// smem_o, smem_m, smem_l: (warp_kv, packed row), smem_o with the channels of a row, padded against bank conflicts.
// Merges the warps' states into one partial and resets them. Codes: the states hold sums of codes. Each warp rescales
// its sums to the common maximum while it writes them, so the threads that merge only add.
// Sync: m is read between the barriers, l and o after the second. They are written again before the next call's first
// barrier (m) and after it (l, o), when no thread reads them.
template <class T, bool Codes, int W, KvFormat format, int warps_kv, int Stride, class Map>
__device__ typename Map::ThreadPartial reduce_warps(WarpState<W, format>& state,
                                                    float (&smem_o)[warps_kv][mma_n][Stride],
                                                    float (&smem_m)[warps_kv][mma_n], float (&smem_l)[warps_kv][mma_n],
                                                    int warp_kv, int warp_d, int lane, const Map& map) {
  using Vec = typename Map::Vec;
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int j = 0; j < 2; ++j)
#pragma unroll
    for (int step = 4; step < 32; step *= 2) {
      state.l[j] += __shfl_xor_sync(0xffffffffu, state.l[j], step);
      if constexpr (Codes && has_min(format))
        state.min_term[j] += __shfl_xor_sync(0xffffffffu, state.min_term[j], step);
    }
  if (g == 0 && warp_d == 0) *reinterpret_cast<float2*>(&smem_m[warp_kv][2 * t]) = make_float2(state.m[0], state.m[1]);
  __syncthreads();  // all maxima are in shared memory
  typename Map::ThreadPartial partial;
  partial.m[0] = -INFINITY;
  float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int w = 0; w < warps_kv; ++w) {
    const float2 m = *reinterpret_cast<const float2*>(&smem_m[w][2 * t]);
    top[0] = fmaxf(top[0], m.x);
    top[1] = fmaxf(top[1], m.y);
    partial.m[0] = fmaxf(partial.m[0], smem_m[w][map.m_row]);
  }
  float weight[2];  // (packed row 2t + j)
#pragma unroll
  for (int j = 0; j < 2; ++j) weight[j] = exp2f(state.m[j] - (top[j] == -INFINITY ? 0.0f : top[j]));
  if (g == 0 && warp_d == 0)
    *reinterpret_cast<float2*>(&smem_l[warp_kv][2 * t]) = make_float2(state.l[0] * weight[0], state.l[1] * weight[1]);
  const auto write = [&](const auto& values) {
#pragma unroll
    for (int i = 0; i < W / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        smem_o[warp_kv][2 * t + e % 2][warp_d * W + 16 * i + 8 * (e / 2) + g] = values(state.o[i][e], e);
  };
  if constexpr (Codes) write(state.template dequant_sums<T>(weight));
  else write([&](float o, int e) { return o * weight[e % 2]; });
  state.reset();
  __syncthreads();  // all sums are in shared memory
  partial.l[0] = 0.0f;
#pragma unroll
  for (float& x : partial.o) x = 0.0f;
#pragma unroll
  for (int w = 0; w < warps_kv; ++w) {
    partial.l[0] += smem_l[w][map.m_row];
#pragma unroll
    for (int i = 0; i < Map::S / Map::N; ++i) {
      const Vec o = *reinterpret_cast<const Vec*>(&smem_o[w][map.m_row][map.d0 + i * Map::vec_stride]);
#pragma unroll
      for (int j = 0; j < Map::N; ++j) partial.o[i * Map::N + j] += o.x[j];
    }
  }
  return partial;
}

}  // namespace rooftile::gpu
