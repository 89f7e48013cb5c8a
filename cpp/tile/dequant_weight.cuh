// SPDX-License-Identifier: Apache-2.0
// The register A operand of mma m16n8k16 from the packed layout of a weight of 4 or 8 bits (core/w4_layout.h).
#pragma once

#include <cute/tensor.hpp>
#include <type_traits>

#include "tile/dequant_kv.cuh"
#include "tile/element.cuh"

namespace rooftile::tile {

__device__ __forceinline__ std::uint32_t fma_bf16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  return bit_cast<std::uint32_t>(
      __hfma2(bit_cast<__nv_bfloat162>(a), bit_cast<__nv_bfloat162>(b), bit_cast<__nv_bfloat162>(c)));
}

// Codes -> exact operands (u - zero) / unit, A fragments: registers 0 and 2 of a fragment are row g of the tile, 1 and
// 3 row g + 8. Zeros are 0 to 255.
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

  // rZero (row g, row g + 8): -zero / unit as pairs of equal values.
  template <class Zeros>
  __device__ __forceinline__ static void set_zeros(Zeros& rZero, std::uint32_t g, std::uint32_t g8) {
    constexpr std::uint32_t lower = fp16 ? 0xf800f800 : 0xff00ff00;  // -2^15, -2^127
    const std::uint32_t both = fma(g | g8 << 16, lower, no_zero);
    rZero(0) = __byte_perm(both, both, 0x1010), rZero(1) = __byte_perm(both, both, 0x3232);
  }
  // rCodes (WORD, MMA_K): a lane's words of each k-step, 1 in 4 bits and 2 in 8; rA (MMA, 1, MMA_K).
  template <class Codes, class Zeros, class A>
  __device__ __forceinline__ static void dequant(const Codes& rCodes, const Zeros& rZero, A&& rA) {
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

// (a & mask) | bits in one LOP3: nvcc emits two instructions where both are constants, and CUTLASS writes its own LOP3s
// as PTX inside its converters.
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
      rZero_(0) = splat(0xe400 + zero[0]), rZero_(1) = splat(0xe400 + zero[1]);  // -(1024 + zero)
      // -(64 + zero): these codes lie 4 bits higher
      if (bits == 4) rZero_(1) = fma_f16x2(rZero_(1), one, splat(0x6380));
    } else {
      ExactDecode::set_zeros(rZero_, zero[0], zero[1]);
    }
    if constexpr (same_type) {
      if constexpr (!fp16) scale = fma_bf16x2(scale, splat(0x4280), 0x80008000);  // times 64, the unit of ExactDecode
      scale_[0] = __byte_perm(scale, scale, 0x1010), scale_[1] = __byte_perm(scale, scale, 0x3232);
      minimum_[0] = __byte_perm(minimum, minimum, 0x1010), minimum_[1] = __byte_perm(minimum, minimum, 0x3232);
    } else {
      const float2 scales = unpack<Scale>(scale), minima = unpack<Scale>(minimum);
      scale_[0] = scales.x * ExactDecode::unit, scale_[1] = scales.y * ExactDecode::unit;
      minimum_[0] = minima.x, minimum_[1] = minima.y;
    }
  }

  // As CodeDecode::dequant.
  template <class Codes, class A>
  __device__ __forceinline__ void dequant(const Codes& rCodes, A&& rA) const {
    cute::Tensor rA2 = cute::recast<std::uint32_t>(rA);  // (MMA / 2, 1, MMA_K)
    if constexpr (fp16 && same_type) {
      CUTE_UNROLL
      for (int k = 0; k < cute::size<1>(rCodes); ++k) {
        std::uint32_t a[4];  // (registers of a fragment)
        if constexpr (bits == 4) minus_zero_word(rCodes(0, k), a);
        else minus_zero_words(rCodes(0, k), rCodes(1, k), a);
        CUTE_UNROLL
        for (int r = 0; r < 4; ++r) rA2(r, 0, k) = a[r];
      }
    } else {
      ExactDecode::dequant(rCodes, rZero_, rA);
    }
    CUTE_UNROLL
    for (int i = 0; i < cute::size(rA2); ++i) rA2(i) = dequant_pair(rA2(i), i % 2);
  }

 private:
  static constexpr bool fp16 = std::is_same_v<T, half>, same_type = std::is_same_v<T, Scale>;
  using ExactDecode = CodeDecode<T, bits>;
  static constexpr std::uint32_t above = 0x64006400,  // 1024: a code in its low mantissa bits counts as 1024 + u
      one = 0x3c003c00;

  __device__ __forceinline__ static std::uint32_t splat(std::uint32_t x) { return x | x << 16; }
  __device__ __forceinline__ void minus_zero_word(std::uint32_t word, std::uint32_t (&a)[4]) const {
    constexpr std::uint32_t sixteenth = 0x2c002c00;
    const std::uint32_t upper = word >> 8;
    a[0] = fma_f16x2(and_or<0x000f000f>(word, above), one, rZero_(0));
    a[1] = fma_f16x2(and_or<0x00f000f0>(word, above), sixteenth, rZero_(1));
    a[2] = fma_f16x2(and_or<0x000f000f>(upper, above), one, rZero_(0));
    a[3] = fma_f16x2(and_or<0x00f000f0>(upper, above), sixteenth, rZero_(1));
  }
  __device__ __forceinline__ void minus_zero_words(std::uint32_t first, std::uint32_t second,
                                                   std::uint32_t (&a)[4]) const {
    a[0] = fma_f16x2(__byte_perm(first, above, 0x7270), one, rZero_(0));
    a[1] = fma_f16x2(__byte_perm(first, above, 0x7371), one, rZero_(1));
    a[2] = fma_f16x2(__byte_perm(second, above, 0x7270), one, rZero_(0));
    a[3] = fma_f16x2(__byte_perm(second, above, 0x7371), one, rZero_(1));
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
  // (row g, row g + 8): fp16 && same_type: -(1024 + zero), high nibbles -(64 + zero); the other types: as CodeDecode's
  decltype(cute::make_tensor<std::uint32_t>(cute::_2{})) rZero_;
};

}  // namespace rooftile::tile
