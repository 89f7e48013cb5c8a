// SPDX-License-Identifier: Apache-2.0
// The register A operand of mma m16n8k16 from the kernel form of a 4-bit weight (core/w4_layout.h).
#pragma once

#include "cute/arch/mma_sm80.hpp"
#include "tile/element.cuh"

namespace rooftile::tile {

// decode: one word (a lane's codes of one k-step) -> the four fragment registers. They hold the codes u, exactly, times a
// power of two that depends on the row alone and is taken back after the product: registers 0 and 2 are row g of the
// tile, 1 and 3 row g + 8. mma: d (rows x tokens, fp32) += a b.
template <class T>
struct W4Mma;

// fp16: a nibble at bits 0..3 of a half is the subnormal u * 2^-24, at bits 4..7 u * 2^-20. No arithmetic at all.
template <>
struct W4Mma<half> {
  static constexpr float undo_low = 0x1p24f, undo_high = 0x1p20f;   // of rows g and g + 8
  __device__ __forceinline__ static void decode(std::uint32_t word, std::uint32_t (&a)[4]) {
    const std::uint32_t upper = word >> 8;
    a[0] = word & 0x000f000f;
    a[1] = word & 0x00f000f0;
    a[2] = upper & 0x000f000f;
    a[3] = upper & 0x00f000f0;
  }
  __device__ __forceinline__ static void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]);
  }
};

// bf16: a nibble in the mantissa of 128 is 128 + u; 128 is taken off at once, because it would cost the sums five bits.
template <>
struct W4Mma<bf16> {
  static constexpr float undo_low = 1.0f, undo_high = 1.0f;
  __device__ __forceinline__ static void decode(std::uint32_t word, std::uint32_t (&a)[4]) {
    const __nv_bfloat162 one = __float2bfloat162_rn(1.0f), offset = __float2bfloat162_rn(-128.0f);
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const std::uint32_t raised = (word >> (4 * r) & 0x000f000f) | 0x43004300;
      const __nv_bfloat162 u = __hfma2(reinterpret_cast<const __nv_bfloat162&>(raised), one, offset);
      a[r] = reinterpret_cast<const std::uint32_t&>(u);
    }
  }
  __device__ __forceinline__ static void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a[0], a[1], a[2], a[3], b0, b1, d[0], d[1], d[2], d[3]);
  }
};

}  // namespace rooftile::tile
