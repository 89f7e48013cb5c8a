// SPDX-License-Identifier: Apache-2.0
// The packed query rows as operands for K in codes, and the scales of K per channel as fp16.
#pragma once

#include "kernels/decode/code_tile.cuh"

namespace rooftile::gpu {

__device__ __forceinline__ std::uint32_t word(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

template <class T>
__device__ __forceinline__ float stored_scale(std::uint32_t bits) {
  return tile::to_float(__builtin_bit_cast(T, static_cast<unsigned short>(bits)));
}
// Power of two that the K scales and minima of a group are divided by before they become fp16. fp16 cache: 1. bf16
// cache, whose range is wider: within a factor of two of the largest magnitude. Computed by a warp.
template <class T, KvFormat F, int D>
struct GroupScale {
  float scale = 1.0f;
  std::uint32_t inverse = 0;  // 1 / scale as a pair of bf16

  __device__ __forceinline__ explicit GroupScale(const CodeTile<F, D>& x, int lane) {
    if constexpr (std::is_same_v<T, tile::bf16>) {
      std::uint32_t top = 0;  // bits of the largest magnitude
      const auto add = [&](const std::uint16_t* from) {
#pragma unroll
        for (int i = 0; i < D / 2; i += 32)
          if (i + lane < D / 2) {
            const std::uint32_t w = *reinterpret_cast<const std::uint32_t*>(from + (i + lane) * 2);
            top = max(top, max(w & 0x7fff, w >> 16 & 0x7fff));
          }
      };
      add(x.k_scale());
      if constexpr (has_min(F)) add(x.k_min());
      const std::uint32_t exponent = __reduce_max_sync(0xffffffffu, top) >> 7;
      const std::uint32_t biased =
          exponent > 0 && exponent < 254 ? exponent : 127;  // all zeros or not finite: no scaling
      scale = __uint_as_float(biased << 23);
      inverse = (254 - biased) * 0x00800080u;
    }
  }
  // Converts two stored scales or minima to fp16.
  __device__ __forceinline__ std::uint32_t f16(std::uint32_t pair) const {
    if constexpr (std::is_same_v<T, tile::half>) return pair;
    const __nv_bfloat162 x =
        __hmul2(reinterpret_cast<const __nv_bfloat162&>(pair), reinterpret_cast<const __nv_bfloat162&>(inverse));
    return tile::pack<tile::half>(__low2float(x), __high2float(x));
  }
};

// largest_magnitude: over pairs of elements, ignoring NaN. scale_to_f16: multiplies each element by a power of two and
// converts it to fp16.
template <class T, int N>
__device__ __forceinline__ float largest_magnitude(const std::uint32_t (&x)[N]) {
  using Pair = std::conditional_t<std::is_same_v<T, tile::half>, __half2, __nv_bfloat162>;
  Pair top = __habs2(reinterpret_cast<const Pair&>(x[0]));
#pragma unroll
  for (int i = 1; i < N; ++i) top = __hmax2(top, __habs2(reinterpret_cast<const Pair&>(x[i])));
  const float2 two = tile::unpack<T>(reinterpret_cast<const std::uint32_t&>(top));
  return fmaxf(two.x, two.y);
}
template <class T, int N>
__device__ __forceinline__ void scale_to_f16(std::uint32_t (&x)[N], float power) {
  if constexpr (std::is_same_v<T, tile::half>) {
    // At most one rounding: a power of two beyond fp16's range is large, and the second factor loses nothing.
    const bool large = power > 0x1p15f;
    const std::uint32_t by = tile::pack<tile::half>(large ? 0x1p15f : power, large ? 0x1p15f : power);
#pragma unroll
    for (std::uint32_t& pair : x) pair = tile::mul_f16x2(pair, by);
    if (!large) return;
    const std::uint32_t then = tile::pack<tile::half>(power * 0x1p-15f, power * 0x1p-15f);
#pragma unroll
    for (std::uint32_t& pair : x) pair = tile::mul_f16x2(pair, then);
  } else {
#pragma unroll
    for (std::uint32_t& pair : x) {
      const float2 two = tile::unpack<T>(pair);
      pair = tile::pack<tile::half>(two.x * power, two.y * power);
    }
  }
}

// The packed query rows as B operands in the order of the codes, divided by a power of two that keeps them below 1.
template <KvFormat F, int D>
struct CodeQueries {
  tile::FragmentB q[D / 16];  // (D / 16 k-tiles)
  float q_scale[2];           // (packed rows 2t, 2t + 1): that power of two
  float zp_correction[2];     // (packed rows 2t, 2t + 1): zero_point * code_scale * (sum of q); scales per token

  // q_rows: packed rows [8, D] as copy_queries_async left them.
  template <class T>
  __device__ __forceinline__ void load(const T* q_rows, int lane) {
    constexpr int lane_channels = D / 4;
    // The channels that match the lane's codes. 4 bits: a quarter of the row, contiguous. 8 bits: 16 channels of every
    // 64, and 8 channels of the last 32.
    std::uint32_t x[lane_channels / 2];                                         // (lane_channels / 2 pairs)
    const typename Bits16Traits<T, D>::template SmemLayout<mma_n> rows_layout;  // (8, D)
#pragma unroll
    for (int i = 0; i < lane_channels / 8; ++i) {
      const int d = code_bits(F) == 4 ? lane % 4 * lane_channels + 8 * i
                    : i / 2 < D / 64  ? i / 2 * 64 + lane % 4 * 16 + i % 2 * 8
                                      : D / 64 * 64 + lane % 4 * 8;
      const uint4 chunk = *reinterpret_cast<const uint4*>(q_rows + rows_layout(lane / 4, d));
#pragma unroll
      for (int j = 0; j < 4; ++j) x[4 * i + j] = word(chunk, j);
    }
    float top = largest_magnitude<T>(x);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    // own_scale: the power of two above the largest magnitude; 1 for a row of zeros or infinities.
    const std::uint32_t exponent = __float_as_uint(top) >> 23;
    const bool ordinary = exponent > 0 && exponent < 253;
    const float own_scale = ordinary ? __uint_as_float((exponent + 1) << 23) : 1.0f,
                inverse = ordinary ? __uint_as_float((253 - exponent) << 23) : 1.0f;
    scale_to_f16<T>(x, inverse);
#pragma unroll
    for (int ks = 0; ks < D / 16; ++ks)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // 4 bits: word ks / 2 holds pairs (r, r + 4), and an MMA takes two even or two odd ones. 8 bits: word ks holds
        // neighbours.
        const int at = ks / 2 * 4 + half;
        q[ks].r[half] =
            code_bits(F) == 4 ? __byte_perm(x[at], x[at + 2], ks % 2 == 0 ? 0x5410 : 0x7632) : x[2 * ks + half];
      }
#pragma unroll
    for (int j = 0; j < 2; ++j) q_scale[j] = __shfl_sync(0xffffffffu, own_scale, (lane % 4 * 2 + j) * 4);
    if constexpr (CodeKind<F>::has_zero_point && !is_kivi(F)) {
      float sum = 0.0f;  // of the rounded values that the tensor cores read
#pragma unroll
      for (const tile::FragmentB& fragment : q)
#pragma unroll
        for (const std::uint32_t pair : fragment.r) {
          const float2 two = tile::unpack<tile::half>(pair);
          sum += two.x + two.y;
        }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        zp_correction[j] =
            __shfl_sync(0xffffffffu, sum, (lane % 4 * 2 + j) * 4) * (CodeKind<F>::zero_point * tile::code_unit);
    }
  }
};

}  // namespace rooftile::gpu
