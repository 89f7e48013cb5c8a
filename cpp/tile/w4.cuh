// SPDX-License-Identifier: Apache-2.0
// The register A operand of mma m16n8k16 from the kernel form of a weight of 4 or 8 bits (core/w4_layout.h).
#pragma once

#include <type_traits>

#include "tile/dequant.cuh"
#include "tile/element.cuh"
#include "tile/mma.cuh"

namespace rooftile::tile {

__device__ __forceinline__ std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const __nv_bfloat162 r = __hfma2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b),
                                   reinterpret_cast<const __nv_bfloat162&>(c));
  return reinterpret_cast<const std::uint32_t&>(r);
}

// decode: a lane's codes of 32 k, of a step of 128 in its runs -> the fragment registers (u - zero) / unit of two k-steps, exactly.
// Registers 0 and 2 are row g of the tile, 1 and 3 row g + 8. zero(g, g8): the zeros of the two rows, 0 to 255, in one register.
//
// A code needs no exponent: its bits alone are u * 2^-24 (fp16, subnormal) or u * 2^-133 (bf16, subnormal below 128), a nibble's one
// place higher 16 times that. One multiply-add with a power of two and -zero / unit does the rest; every value has few enough bits.
template <class T, int bits>
struct CodeDecode {
  static constexpr bool fp16 = std::is_same_v<T, half>;
  static constexpr float unit = fp16 ? 512.0f : 64.0f;
  static constexpr std::uint32_t one = fp16 ? 0x18001800 : 0x3c803c80;   // 1 / unit
  using Zero = std::uint32_t;                                            // -zero / unit

  __device__ __forceinline__ static Zero zero(std::uint32_t g, std::uint32_t g8) {
    constexpr std::uint32_t lower = fp16 ? 0xf800f800 : 0xff00ff00;   // -2^15, -2^127
    return fma(g | g8 << 16, lower, 0x80008000);                      // and -0, which changes nothing
  }
  __device__ __forceinline__ static void decode(const uint4 (&runs)[bits / 2], int quarter, Zero zero, FragmentA (&a)[2]) {
    const std::uint32_t g = __byte_perm(zero, zero, 0x1010), g8 = __byte_perm(zero, zero, 0x3232);
    if constexpr (bits == 4) {
      const uint4& four = runs[quarter / 2];
      decode_word(quarter % 2 == 0 ? four.x : four.z, g, g8, a[0].r);
      decode_word(quarter % 2 == 0 ? four.y : four.w, g, g8, a[1].r);
    } else {
      const uint4& four = runs[quarter];
      decode_words(four.x, four.y, g, g8, a[0].r);
      decode_words(four.z, four.w, g, g8, a[1].r);
    }
  }

 private:
  static constexpr std::uint32_t raise = fp16 ? 0x78007800 : 0x7f007f00, raise_less = fp16 ? 0x68006800 : 0x7d007d00;   // 2^15, 2^127; 2^-4 of it

  __device__ __forceinline__ static void decode_word(std::uint32_t word, std::uint32_t g, std::uint32_t g8, std::uint32_t (&a)[4]) {
    const std::uint32_t upper = word >> 8;
    a[0] = fma(word & 0x000f000f, raise, g);
    a[1] = fma(word & 0x00f000f0, raise_less, g8);
    a[2] = fma(upper & 0x000f000f, raise, g);
    a[3] = fma(upper & 0x00f000f0, raise_less, g8);
  }
  // 8 bits: bytes 0 and 2 of a word are a pair, 1 and 3 the next.
  __device__ __forceinline__ static void decode_words(std::uint32_t first, std::uint32_t second, std::uint32_t g, std::uint32_t g8, std::uint32_t (&a)[4]) {
    a[0] = fma(first & 0x00ff00ff, raise, g);
    a[1] = fma(__byte_perm(first, 0, 0x4341), raise, g8);
    a[2] = fma(second & 0x00ff00ff, raise, g);
    a[3] = fma(__byte_perm(second, 0, 0x4341), raise, g8);
  }
  __device__ __forceinline__ static std::uint32_t fma(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
    if constexpr (fp16) return fma_f16x2(a, b, c);
    else return fma_bf16x2(a, b, c);
  }
};

}  // namespace rooftile::tile
