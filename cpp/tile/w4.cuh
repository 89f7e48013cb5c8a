// SPDX-License-Identifier: Apache-2.0
// The register A operand of mma m16n8k16 from the kernel form of a 4-bit weight (core/w4_layout.h).
#pragma once

#include "tile/dequant.cuh"
#include "tile/element.cuh"

namespace rooftile::tile {

// decode: one word (a lane's codes of one k-step) -> the four fragment registers (u - zero) / unit, exactly. Registers 0 and
// 2 are row g of the tile, 1 and 3 row g + 8. zero(g, g8): the zeros of the two rows, 0 to 255, in one register.
//
// A nibble needs no exponent: its bits alone are the subnormal number u * 2^-24 (fp16) or u * 2^-133 (bf16), one place
// higher 16 times that. One multiply-add with a power of two and -zero / unit does the rest; every value has few enough bits.
template <class T>
struct W4Decode;

template <>
struct W4Decode<half> {
  static constexpr float unit = 512.0f;
  static constexpr std::uint32_t one = 0x18001800;   // 1 / unit
  using Zero = std::uint32_t;                        // -zero / unit
  __device__ __forceinline__ static Zero zero(std::uint32_t g, std::uint32_t g8) {
    return mul_f16x2(g | g8 << 16, 0xf800f800);   // -2^15
  }
  __device__ __forceinline__ static void decode(std::uint32_t word, Zero zero, std::uint32_t (&a)[4]) {
    const std::uint32_t g = __byte_perm(zero, zero, 0x1010), g8 = __byte_perm(zero, zero, 0x3232), upper = word >> 8;
    a[0] = fma_f16x2(word & 0x000f000f, 0x78007800, g);    // 2^15
    a[1] = fma_f16x2(word & 0x00f000f0, 0x68006800, g8);   // 2^11
    a[2] = fma_f16x2(upper & 0x000f000f, 0x78007800, g);
    a[3] = fma_f16x2(upper & 0x00f000f0, 0x68006800, g8);
  }
};

__device__ __forceinline__ std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const __nv_bfloat162 r = __hfma2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b),
                                   reinterpret_cast<const __nv_bfloat162&>(c));
  return reinterpret_cast<const std::uint32_t&>(r);
}
template <>
struct W4Decode<bf16> {
  static constexpr float unit = 64.0f;
  static constexpr std::uint32_t one = 0x3c803c80;
  using Zero = std::uint32_t;
  __device__ __forceinline__ static Zero zero(std::uint32_t g, std::uint32_t g8) {
    return fma_bf16x2(g | g8 << 16, 0xff00ff00, 0x80008000);   // -2^127; -0 changes nothing
  }
  __device__ __forceinline__ static void decode(std::uint32_t word, Zero zero, std::uint32_t (&a)[4]) {
    const std::uint32_t g = __byte_perm(zero, zero, 0x1010), g8 = __byte_perm(zero, zero, 0x3232), upper = word >> 8;
    a[0] = fma_bf16x2(word & 0x000f000f, 0x7f007f00, g);    // 2^127
    a[1] = fma_bf16x2(word & 0x00f000f0, 0x7d007d00, g8);   // 2^123
    a[2] = fma_bf16x2(upper & 0x000f000f, 0x7f007f00, g);
    a[3] = fma_bf16x2(upper & 0x00f000f0, 0x7d007d00, g8);
  }
};

}  // namespace rooftile::tile
