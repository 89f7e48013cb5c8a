// SPDX-License-Identifier: Apache-2.0
// What both kernels do with a KV tile: logits, masks, products with V in codes.
//   S^T [tokens, 8 packed rows] = K [tokens, D] Q^T      K is the A operand, tokens are its rows
//   O^T [D, 8 packed rows]     += V^T [D, tokens] P^T    V^T is the A operand, channels are its rows; P^T: the weights
// Packed query rows are the N of both MMAs: lane (g, t) holds packed rows 2t and 2t + 1.
#pragma once

#include "kernels/decode/bits16_tile.cuh"
#include "kernels/decode/code_scores.cuh"
#include "kernels/decode/queries.cuh"
#include "tile/copy.cuh"
#include "tile/mma.cuh"
#include "tile/softmax.cuh"

namespace rooftile::gpu {

// Factor from scores to logits in units of log2, or, with a soft cap, to multiples of the cap. q_scale: what the
// queries were divided by.
__device__ __forceinline__ float logit_factor(const DecodeParams& p, float q_scale) {
  return q_scale * (p.softcap != 0.0f ? p.scale / p.softcap : p.scale * tile::log2_e);
}

// Converts multiples of a soft cap to logits in units of log2, in place. Without a soft cap s already holds logits.
// tanh x is 1 - 2 / (1 + e^2x): the absolute error is at most 2^-23. It is not proportional to a small x, but logits
// only matter by their differences.
template <int M>
__device__ __forceinline__ void soft_cap(float (&s)[M][4], float softcap) {
  if (softcap == 0.0f) return;
  const float top = softcap * tile::log2_e;
#pragma unroll
  for (auto& tile : s)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tile[i] = top - 2.0f * top * tile::fast_reciprocal(1.0f + tile::fast_exp2(2.0f * tile::log2_e * tile[i]));
}

// Whether every packed row sees all of `tokens` tokens from `token` on.
__device__ __forceinline__ bool all_seen(const Visible& v, int token, int tokens) {
  return token >= v.inner_begin && token + tokens <= v.inner_end;
}
// Masks logits of tokens that a packed row does not see. token: row 0 of the tile. M: m-tiles of 16 tokens.
template <int M>
__device__ __forceinline__ void mask(float (&s)[M][4], const Visible& v, int token, int lane) {
  if (all_seen(v, token, 16 * M)) return;
#pragma unroll
  for (int mt = 0; mt < M; ++mt)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = token + 16 * mt + 8 * (i / 2) + lane / 4;
      if (at < v.begin[i & 1] || at >= v.end[i & 1]) s[mt][i] = -INFINITY;
    }
}

// The largest of this lane's logits of packed row 2t + j.
template <int M>
__device__ __forceinline__ float lane_max(const float (&s)[M][4], int j) {
  float top = fmaxf(s[0][j], s[0][j + 2]);
#pragma unroll
  for (int mt = 1; mt < M; ++mt) top = fmaxf(top, fmaxf(s[mt][j], s[mt][j + 2]));
  return top;
}
// The reference maximum of the weights follows the row's maximum only when that is more than rescale_threshold above
// it: weights up to 2^rescale_threshold lose nothing in fp16 or in the sums.
inline constexpr float rescale_threshold = 8.0f, max_weight = 256.0f;

// A KV tile in shared memory: 16 tokens in 16 bits, or 32 tokens in codes.
template <class Config>
using KvTile = std::conditional_t<is_element_format(Config::format), Bits16Tile<typename Config::T, Config::head_dim>,
                                  CodeTile<Config::format, Config::head_dim>>;

// ---- codes, 32 tokens, in shared memory ----

// Weight x scale becomes fp16 relative to o_scale, a power of two above twice the largest finite scale so far, at most
// four times that scale.
__device__ __forceinline__ bool exceeds_scale(std::uint32_t max_scale_bits, float o_scale) {
  return max_scale_bits > __float_as_uint(o_scale) || o_scale == 0.0f;
}
__device__ __forceinline__ float pow2_above(std::uint32_t max_scale_bits) {
  return __uint_as_float(min(max_scale_bits & 0x7f800000u, 0x7d800000u) + 0x01000000u);
}
__device__ __forceinline__ float inverse_pow2(float pow2) {
  return __uint_as_float(0x7f000000u - __float_as_uint(pow2));
}

// Converts sums of codes to sums of dequantised values times a weight, for two packed rows: zero-point correction, min
// term and o_scale. separate_min_term: o_scale is applied last, because a bf16 cache's o_scale can be so large that
// o_scale / code_scale overflows.
template <class T, KvFormat F>
struct DequantSums {
  float factor[2], zp_correction[2], min_term[2], o_scale;  // arrays: (packed row 2t + j)
  static constexpr float odd_factor =
      CodeKind<F>::code_scale / CodeKind<F>::odd_code_scale;  // rows g + 8: odd pairs of the decoder
  static constexpr bool separate_min_term = std::is_same_v<T, tile::bf16>;

  __device__ __forceinline__ DequantSums(const float (&correction_sums)[2], const float (&min_sums)[2],
                                         const float (&weight)[2], float sum_scale)
      : o_scale(sum_scale) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      factor[j] = weight[j] * (1.0f / CodeKind<F>::code_scale) * (separate_min_term ? 1.0f : o_scale);
      zp_correction[j] = -correction_sums[j] * factor[j];
      min_term[j] = min_sums[j] * weight[j];
    }
  }
  __device__ __forceinline__ float operator()(float o, int e) const {
    const int j = e % 2;
    const float sum = __fmaf_rn(o, e / 2 == 1 ? factor[j] * odd_factor : factor[j],
                                separate_min_term ? zp_correction[j] : zp_correction[j] + min_term[j]);
    return separate_min_term ? __fmaf_rn(sum, o_scale, min_term[j]) : sum;
  }
};

// Adds weight x code of 32 tokens to C tiles of 16 channels, from the tile's block `block32` of 32 channels on: o[n * C
// + i] is tile i of n-tile n, in units of code_scale. weights: (k-tile of 16 tokens, n-tile).
template <KvFormat F, int D, int C, int N>
__device__ __forceinline__ void pv_codes(float (*o)[4], const tile::FragmentB (&weights)[2][N], const CodeTile<F, D>& x,
                                         int block32, int lane) {
  using Kind = CodeKind<F>;
  // Blocks of 512 bytes in lane order, 16 bytes per lane. 8-bit codes: 16 tokens x 32 channels; 4-bit codes: 32 x 32.
  const auto* blocks = reinterpret_cast<const uint4*>(x.v) + block32 * 32 + lane;
  if constexpr (!Kind::pairs) {
#pragma unroll
    for (int mt = 0; mt < 2; ++mt)
#pragma unroll
      for (int dt = 0; dt < C / 2; ++dt) {
        const uint4 vec = blocks[(mt * (D / 32) + dt) * 32];
#pragma unroll
        for (int j = 0; j < 4; j += 2) {  // word j: channel 8 j + g; bytes: tokens 2t, 2t + 1, 2t + 8, 2t + 9
          tile::FragmentA a;
          Kind::decode(word(vec, j), a.r[0], a.r[2]);
          Kind::decode(word(vec, j + 1), a.r[1], a.r[3]);
#pragma unroll
          for (int n = 0; n < N; ++n) tile::mma<tile::half>(o[n * C + 2 * dt + j / 2], a, weights[mt][n]);
        }
      }
  } else {
#pragma unroll
    for (int dt = 0; dt < C / 2; ++dt) {
      const uint4 vec = blocks[dt * 32];
#pragma unroll
      for (int mt = 0; mt < 2; ++mt) {  // word w: tokens 8 w + 2t and 8 w + 2t + 1; pair r: channel 8 r + g
        std::uint32_t even[4], odd[4];  // (pair): of the even and the odd word
        Kind::decode(word(vec, 2 * mt), even);
        Kind::decode(word(vec, 2 * mt + 1), odd);
#pragma unroll
        for (int r = 0; r < 4; r += 2)
#pragma unroll
          for (int n = 0; n < N; ++n)
            tile::mma<tile::half>(o[n * C + 2 * dt + r / 2], {{even[r], even[r + 1], odd[r], odd[r + 1]}},
                                  weights[mt][n]);
      }
    }
  }
}

}  // namespace rooftile::gpu
