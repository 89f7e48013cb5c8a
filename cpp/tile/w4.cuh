// SPDX-License-Identifier: Apache-2.0
// The register A operand of mma m16n8k16 from the kernel form of a 4-bit weight (core/w4_layout.h).
#pragma once

#include <type_traits>

#include "tile/dequant.cuh"
#include "tile/element.cuh"

namespace rooftile::tile {

__device__ __forceinline__ std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const __nv_bfloat162 r = __hfma2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b),
                                   reinterpret_cast<const __nv_bfloat162&>(c));
  return reinterpret_cast<const std::uint32_t&>(r);
}

// decode: one word (a lane's codes of one k-step) -> the four fragment registers (u - zero) / unit, exactly. Registers 0 and
// 2 are row g of the tile, 1 and 3 row g + 8. zero(g, g8): the zeros of the two rows, 0 to 255, in one register.
//
// A nibble needs no exponent: its bits alone are the subnormal number u * 2^-24 (fp16) or u * 2^-133 (bf16), one place
// higher 16 times that. One multiply-add with a power of two and -zero / unit does the rest; every value has few enough bits.
template <class T>
struct W4Decode {
  static constexpr bool fp16 = std::is_same_v<T, half>;
  static constexpr float unit = fp16 ? 512.0f : 64.0f;
  static constexpr std::uint32_t one = fp16 ? 0x18001800 : 0x3c803c80;   // 1 / unit
  using Zero = std::uint32_t;                                            // -zero / unit

  __device__ __forceinline__ static Zero zero(std::uint32_t g, std::uint32_t g8) {
    constexpr std::uint32_t lower = fp16 ? 0xf800f800 : 0xff00ff00;   // -2^15, -2^127
    return fma(g | g8 << 16, lower, 0x80008000);                      // and -0, which changes nothing
  }
  __device__ __forceinline__ static void decode(std::uint32_t word, Zero zero, std::uint32_t (&a)[4]) {
    constexpr std::uint32_t raise = fp16 ? 0x78007800 : 0x7f007f00, raise_less = fp16 ? 0x68006800 : 0x7d007d00;   // 2^15, 2^127; 2^-4 of it
    const std::uint32_t g = __byte_perm(zero, zero, 0x1010), g8 = __byte_perm(zero, zero, 0x3232), upper = word >> 8;
    a[0] = fma(word & 0x000f000f, raise, g);
    a[1] = fma(word & 0x00f000f0, raise_less, g8);
    a[2] = fma(upper & 0x000f000f, raise, g);
    a[3] = fma(upper & 0x00f000f0, raise_less, g8);
  }

 private:
  __device__ __forceinline__ static std::uint32_t fma(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
    if constexpr (fp16) return fma_f16x2(a, b, c);
    else return fma_bf16x2(a, b, c);
  }
};

}  // namespace rooftile::tile
