// SPDX-License-Identifier: Apache-2.0
// The register A operand of mma m16n8k16 from the packed layout of a weight of 4 or 8 bits (core/w4_layout.h).
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "tile/dequant.cuh"
#include "tile/element.cuh"
#include "tile/mma.cuh"

namespace rooftile::tile {

__device__ __forceinline__ std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const __nv_bfloat162 r =
      __hfma2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b),
              reinterpret_cast<const __nv_bfloat162&>(c));
  return reinterpret_cast<const std::uint32_t&>(r);
}

// Codes -> exact operands (u - zero) / unit.
// decode: from codes, (fragment blocks of a step of 128 k) with a lane's 16 bytes of each, k-block k_block of 32 k: the
// A fragments of two k-steps of 16. Registers 0 and 2 of a fragment are row g of the tile, 1 and 3 row g + 8. zero(g,
// g8): the zeros of the two rows, 0 to 255, in one register.
//
// A code needs no exponent: its bits alone are the subnormal u * 2^-24 (fp16) or u * 2^-133 (bf16, subnormal below
// 128), of a nibble in bits 4 to 7 16 times that. One multiply-add by a power of two, with -zero / unit as the addend,
// gives the operand, and every value fits the mantissa.
template <class T, int bits>
struct CodeDecode {
  static constexpr bool fp16 = std::is_same_v<T, half>;
  static constexpr float unit = fp16 ? 512.0f : 64.0f;
  static constexpr std::uint32_t one = fp16 ? 0x18001800 : 0x3c803c80;  // 1 / unit
  // -zero_point / unit of symmetric codes as a pair: a power of two.
  static constexpr std::uint32_t symmetric_zero =
      0x10001u * (0x8000u | (fp16 ? (bits + 5u) << 10 : (bits + 120u) << 7));
  static constexpr std::uint32_t no_zero = 0x80008000;  // -0, which changes nothing
  using Zero = std::uint32_t;                           // (row g, row g + 8): -zero / unit

  __device__ __forceinline__ static Zero zero(std::uint32_t g, std::uint32_t g8) {
    constexpr std::uint32_t lower = fp16 ? 0xf800f800 : 0xff00ff00;  // -2^15, -2^127
    return fma(g | g8 << 16, lower, 0x80008000);                     // plus -0, which changes nothing
  }
  // rZero (row g, row g + 8): -zero / unit as pairs of equal values.
  template <class Zeros>
  __device__ __forceinline__ static void set_zeros(Zeros& rZero, std::uint32_t g, std::uint32_t g8) {
    const Zero both = zero(g, g8);
    rZero(0) = __byte_perm(both, both, 0x1010), rZero(1) = __byte_perm(both, both, 0x3232);
  }
  // rCodes (WORD, MMA_K): a lane's words of each k-step, 1 in 4 bits and 2 in 8; rA (MMA, 1, MMA_K).
  template <class Codes, class Zeros, class A>
  __device__ __forceinline__ static void dequant(const Codes& rCodes, const Zeros& rZero, A& rA) {
    cute::Tensor rA2 = cute::recast<std::uint32_t>(rA);  // (MMA / 2, 1, MMA_K)
    CUTE_UNROLL
    for (int k = 0; k < cute::size<1>(rCodes); ++k) {
      std::uint32_t a[4];  // (registers of a fragment)
      if constexpr (bits == 4) decode_word(rCodes(0, k), rZero(0), rZero(1), a);
      else decode_words(rCodes(0, k), rCodes(1, k), rZero(0), rZero(1), a);
      CUTE_UNROLL
      for (int r = 0; r < 4; ++r) rA2(r, 0, k) = a[r];
    }
  }
  __device__ __forceinline__ static void decode(const uint4 (&codes)[bits / 2], int k_block, Zero zero,
                                                FragmentA (&a)[2]) {
    const std::uint32_t g = __byte_perm(zero, zero, 0x1010), g8 = __byte_perm(zero, zero, 0x3232);
    if constexpr (bits == 4) {
      const uint4& vec = codes[k_block / 2];
      decode_word(k_block % 2 == 0 ? vec.x : vec.z, g, g8, a[0].r);
      decode_word(k_block % 2 == 0 ? vec.y : vec.w, g, g8, a[1].r);
    } else {
      const uint4& vec = codes[k_block];
      decode_words(vec.x, vec.y, g, g8, a[0].r);
      decode_words(vec.z, vec.w, g, g8, a[1].r);
    }
  }

 private:
  static constexpr std::uint32_t raise = fp16 ? 0x78007800 : 0x7f007f00,
                                 raise_high = fp16 ? 0x68006800 : 0x7d007d00;  // 2^15, 2^127 (bf16); 2^-4 of it

  __device__ __forceinline__ static void decode_word(std::uint32_t word, std::uint32_t g, std::uint32_t g8,
                                                     std::uint32_t (&a)[4]) {
    const std::uint32_t upper = word >> 8;
    a[0] = fma(word & 0x000f000f, raise, g);
    a[1] = fma(word & 0x00f000f0, raise_high, g8);
    a[2] = fma(upper & 0x000f000f, raise, g);
    a[3] = fma(upper & 0x00f000f0, raise_high, g8);
  }
  // 8 bits: bytes 0 and 2 of a word are one register, bytes 1 and 3 the next.
  __device__ __forceinline__ static void decode_words(std::uint32_t first, std::uint32_t second, std::uint32_t g,
                                                      std::uint32_t g8, std::uint32_t (&a)[4]) {
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

// (a & mask) | bits in one LOP3: nvcc emits two instructions where both are constants.
template <std::uint32_t mask>
__device__ __forceinline__ std::uint32_t and_or(std::uint32_t a, std::uint32_t bits) {
  std::uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(a), "n"(mask), "r"(bits));
  return r;
}

// Codes -> rounded weights: the A fragments of (u - zero) * scale + minimum, rounded to nearest T, for one scale block.
// Scales of type T: one packed multiply-add after the exact u - zero. Scales of the other 16-bit type: multiply-add in
// fp32, then rounding.
template <class T, int bits, class Scale>
class WeightDecode {
 public:
  // scale, minimum: pairs (row g in the low half, row g + 8 in the high half); minimum is 0 where the weight has none.
  // zero: (row g, row g + 8), 0 to 255.
  __device__ __forceinline__ WeightDecode(std::uint32_t scale, std::uint32_t minimum, const std::uint32_t (&zero)[2]) {
    if constexpr (fp16 && same_type) {
      zero_[0] = splat(0xe400 + zero[0]), zero_[1] = splat(0xe400 + zero[1]);  // -(1024 + zero)
      if (bits == 4) zero_[1] = fma_f16x2(zero_[1], one, splat(0x6380));  // -(64 + zero): these codes lie 4 bits higher
    } else {
      code_zero_ = Codes::zero(zero[0], zero[1]);
    }
    if constexpr (same_type) {
      if constexpr (!fp16) scale = fma_bf16x2(scale, splat(0x4280), 0x80008000);  // times 64, the unit of Codes
      scale_[0] = __byte_perm(scale, scale, 0x1010), scale_[1] = __byte_perm(scale, scale, 0x3232);
      minimum_[0] = __byte_perm(minimum, minimum, 0x1010), minimum_[1] = __byte_perm(minimum, minimum, 0x3232);
    } else {
      const float2 scales = unpack<Scale>(scale), minima = unpack<Scale>(minimum);
      scale_[0] = scales.x * Codes::unit, scale_[1] = scales.y * Codes::unit;
      minimum_[0] = minima.x, minimum_[1] = minima.y;
    }
  }

  __device__ __forceinline__ void decode(const uint4 (&codes)[bits / 2], int k_block, FragmentA (&a)[2]) const {
    if constexpr (fp16 && same_type) {
      const uint4& vec = codes[bits == 4 ? k_block / 2 : k_block];
      if constexpr (bits == 4) {
        minus_zero_word(k_block % 2 == 0 ? vec.x : vec.z, a[0].r);
        minus_zero_word(k_block % 2 == 0 ? vec.y : vec.w, a[1].r);
      } else {
        minus_zero_words(vec.x, vec.y, a[0].r);
        minus_zero_words(vec.z, vec.w, a[1].r);
      }
    } else {
      Codes::decode(codes, k_block, code_zero_, a);
    }
#pragma unroll
    for (FragmentA& fragment : a)
#pragma unroll
      for (int r = 0; r < 4; ++r) fragment.r[r] = dequant_pair(fragment.r[r], r % 2);
  }

 private:
  static constexpr bool fp16 = std::is_same_v<T, half>, same_type = std::is_same_v<T, Scale>;
  using Codes = CodeDecode<T, bits>;
  static constexpr std::uint32_t above = 0x64006400,  // 1024: a code in its low mantissa bits counts as 1024 + u
      one = 0x3c003c00;

  __device__ __forceinline__ static std::uint32_t splat(std::uint32_t x) { return x | x << 16; }
  __device__ __forceinline__ void minus_zero_word(std::uint32_t word, std::uint32_t (&a)[4]) const {
    constexpr std::uint32_t sixteenth = 0x2c002c00;
    const std::uint32_t upper = word >> 8;
    a[0] = fma_f16x2(and_or<0x000f000f>(word, above), one, zero_[0]);
    a[1] = fma_f16x2(and_or<0x00f000f0>(word, above), sixteenth, zero_[1]);
    a[2] = fma_f16x2(and_or<0x000f000f>(upper, above), one, zero_[0]);
    a[3] = fma_f16x2(and_or<0x00f000f0>(upper, above), sixteenth, zero_[1]);
  }
  __device__ __forceinline__ void minus_zero_words(std::uint32_t first, std::uint32_t second,
                                                   std::uint32_t (&a)[4]) const {
    a[0] = fma_f16x2(__byte_perm(first, above, 0x7270), one, zero_[0]);
    a[1] = fma_f16x2(__byte_perm(first, above, 0x7371), one, zero_[1]);
    a[2] = fma_f16x2(__byte_perm(second, above, 0x7270), one, zero_[0]);
    a[3] = fma_f16x2(__byte_perm(second, above, 0x7371), one, zero_[1]);
  }
  __device__ __forceinline__ std::uint32_t dequant_pair(std::uint32_t codes, int row) const {
    if constexpr (same_type && fp16) return fma_f16x2(codes, scale_[row], minimum_[row]);
    else if constexpr (same_type) return fma_bf16x2(codes, scale_[row], minimum_[row]);
    else {
      const float2 two = unpack<T>(codes);
      return pack<T>(fmaf(two.x, scale_[row], minimum_[row]), fmaf(two.y, scale_[row], minimum_[row]));
    }
  }

  using Factor = std::conditional_t<same_type, std::uint32_t, float>;  // same_type: a pair of equal values
  Factor scale_[2], minimum_[2];                                       // (row g, row g + 8)
  std::uint32_t zero_[2];           // (row g, row g + 8): fp16 && same_type: -(1024 + zero), high nibbles -(64 + zero)
  typename Codes::Zero code_zero_;  // the other types
};

}  // namespace rooftile::tile
