// SPDX-License-Identifier: Apache-2.0
// The softmax state of decode attention and what a KV tile of codes gives it besides its scores. Two policies update
// the state: WarpSoftmax (warp_softmax.cuh) and CtaSoftmax (cta_softmax.cuh).
#pragma once

#include "kernels/decode/code_tile.cuh"
#include "kernels/decode/kv_traits.cuh"
#include "tile/element.cuh"

namespace rooftile::gpu {

// The reference maximum of the weights follows the row's maximum only when that is more than rescale_threshold above
// it: weights up to 2^rescale_threshold lose nothing in fp16 or in the sums.
inline constexpr float rescale_threshold = 8.0f, max_weight = 256.0f;  // 2^rescale_threshold

// A warp's part of the state over the tokens of one KV split.
// N: MMA n-tiles of 8 packed rows, of which a lane has rows 2t and 2t + 1. C: MMA m-tiles of 16 channels of the warp.
template <int N, int C, KvFormat F>
struct SoftmaxState {
  // m: reference maximum of the weights, at most rescale_threshold below the row's maximum; equal in all warps that
  // share the state. l: this lane's part of the sum of weights. min_term: this lane's part of the sum of weight x zero
  // value, the part of the output that is the same for all channels.
  float m[N][2];         // (n-tile, packed row 2t + j)
  float l[N][2];         // (n-tile, packed row 2t + j)
  float min_term[N][2];  // (n-tile, packed row 2t + j)
  // Tile n * C + i holds channels 16 i + g (elements 0, 1) and 16 i + 8 + g (elements 2, 3) of packed rows 8 n + 2t and
  // 8 n + 2t + 1.
  float o[N * C][4];  // (N x C mma tiles of 16 channels, 4)
  // (n-tile, 4): zero-point correction of o, over the KV tiles whose scores the warp computes
  float zp_correction[N][4];
  float o_scale;  // a power of two: the sum is o * o_scale; 0: no token yet

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        m[n][j] = -INFINITY;
        l[n][j] = min_term[n][j] = 0.0f;
      }
#pragma unroll
      for (float& x : zp_correction[n]) x = 0.0f;
    }
#pragma unroll
    for (auto& tile : o)
#pragma unroll
      for (float& x : tile) x = 0.0f;
    o_scale = 0.0f;
  }
  // Sums a value of the state over the lanes that hold the same packed rows.
  __device__ __forceinline__ static void sum_lanes(float& x) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  }
};

// V's scales are multiplied into the weights: the fp16 operand is weight * scale / o_scale. o_scale is a power of two
// and no smaller than any finite scale so far (up to 2^126): a larger scale raises it to 2 to 4 times that scale.
// max_scale_bits: the largest finite scale of some tokens, as bits of fp32.
__device__ __forceinline__ bool exceeds_scale(std::uint32_t max_scale_bits, float o_scale) {
  return max_scale_bits > __float_as_uint(o_scale) || o_scale == 0.0f;
}
// 2^(e + 2) for a scale in [2^e, 2^(e + 1)), 2^126 at most: its inverse is then a normal number.
__device__ __forceinline__ float pow2_above(std::uint32_t max_scale_bits) {
  return __uint_as_float(min(max_scale_bits & 0x7f800000u, 0x7d800000u) + 0x01000000u);
}
// The biased exponents of x and 1 / x add up to 254.
__device__ __forceinline__ float inverse_pow2(float pow2) {
  return __uint_as_float(0x7f000000u - __float_as_uint(pow2));
}

// Converts sums of codes to sums of dequantised values times a weight, for two packed rows: zero-point correction, min
// term and o_scale. separate_min_term: o_scale is applied last, because a bf16 cache's o_scale can be so large that
// o_scale / code_one overflows.
template <class T, KvFormat F>
struct DequantSums {
  using Kv = KvTraits<F>;
  float factor[2], zp_correction[2], min_term[2], o_scale;              // arrays: (packed row 2t + j)
  static constexpr float odd_factor = Kv::code_one / Kv::odd_code_one;  // rows g + 8: odd pairs of the decoder
  static constexpr bool separate_min_term = std::is_same_v<T, tile::bf16>;

  __device__ __forceinline__ DequantSums(const float (&correction_sums)[2], const float (&min_sums)[2],
                                         const float (&weight)[2], float sum_scale)
      : o_scale(sum_scale) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      factor[j] = weight[j] * (1.0f / Kv::code_one) * (separate_min_term ? 1.0f : o_scale);
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

// Scale and zero value (the value of the zero-point code) of V for 32 tokens: lane i holds token i.
template <class T, KvFormat F>
struct TokenScales {
  float scale = 0.0f, zero_value = 0.0f;  // V's scale; min + 8 * scale

  // seen: whether any packed row sees the lane's token. If none does, both are 0, whatever is in memory.
  template <int D>
  __device__ __forceinline__ TokenScales(const CodeTile<F, D>& tile, bool seen, int lane) {
    const float stored = stored_scale<T>(tile.v_scale()[lane]);
    scale = seen ? stored : 0.0f;
    if constexpr (has_min(F)) {
      const float minimum = stored_scale<T>(tile.v_min()[lane]);
      zero_value = seen ? minimum + 8.0f * scale : 0.0f;
    }
  }
  // Bits of the largest magnitude among the finite scales.
  __device__ __forceinline__ std::uint32_t max_bits() const {
    const std::uint32_t magnitude = __float_as_uint(scale) & 0x7fffffffu;
    return __reduce_max_sync(0xffffffffu, magnitude < 0x7f800000u ? magnitude : 0u);
  }
  // The value that the lane of token 8 i + g holds.
  __device__ __forceinline__ static float of_row(float x, int i, int lane) {
    return __shfl_sync(0xffffffffu, x, 8 * i + lane / 4);
  }
};

}  // namespace rooftile::gpu
