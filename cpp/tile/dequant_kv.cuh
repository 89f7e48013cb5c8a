// SPDX-License-Identifier: Apache-2.0
// Stored codes of a KV cache -> pairs of fp16, exactly, in registers. No code needs more than 8 bits of mantissa, so
// fp16 operands serve bf16 caches too.
#pragma once

#include "tile/element.cuh"

namespace rooftile::tile {

__device__ __forceinline__ std::uint32_t fma_f16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  return bit_cast<std::uint32_t>(__hfma2(bit_cast<__half2>(a), bit_cast<__half2>(b), bit_cast<__half2>(c)));
}
__device__ __forceinline__ std::uint32_t mul_f16x2(std::uint32_t a, std::uint32_t b) {
  return bit_cast<std::uint32_t>(__hmul2(bit_cast<__half2>(a), bit_cast<__half2>(b)));
}

// The low bits of an fp16 are an integer times 2^-24: masking a code gives an operand, code * code_one, a subnormal,
// which tensor cores multiply exactly. Codes stay unsigned; the caller subtracts the zero point's part from the sums.
inline constexpr float code_one = 0x1p-24f;

// Four int8 codes in a word -> (byte 0, byte 1) + 128, (byte 2, byte 3) + 128, times code_one.
__device__ __forceinline__ void decode_int8_plus_128(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
  const std::uint32_t flipped = word ^ 0x80808080u;
  low = __byte_perm(flipped, 0, 0x4140);
  high = __byte_perm(flipped, 0, 0x4342);
}
inline constexpr std::uint32_t pair_of_128 = 0x00800080u;  // 128 * code_one, twice

// Four E4M3 codes in a word -> (byte 0, byte 1), (byte 2, byte 3), times e4m3_one: the bits of a code, moved to an
// fp16's exponent and mantissa, are 2^-8 times its value. NaN, which caches do not hold, becomes 480.
__device__ __forceinline__ void decode_e4m3(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
  const auto placed = [](std::uint32_t upper_bytes) {
    return (upper_bytes & 0x80008000u) | (upper_bytes >> 1 & 0x3f803f80u);
  };
  low = placed(__byte_perm(word, 0, 0x1404));
  high = placed(__byte_perm(word, 0, 0x3424));
}
inline constexpr float e4m3_one = 0x1p-8f;

// Eight unsigned nibbles in a word -> (4 pairs): pair r is (nibble r, nibble r + 4), times code_one for even r,
// times odd_code_one for odd r.
__device__ __forceinline__ void decode_uint4(std::uint32_t word, std::uint32_t (&pair)[4]) {
  const std::uint32_t upper = word >> 8;
  pair[0] = word & 0x000f000fu;
  pair[1] = word & 0x00f000f0u;
  pair[2] = upper & 0x000f000fu;
  pair[3] = upper & 0x00f000f0u;
}
// What a product takes with pair r: elements r and r + 4 of eight, of which `low` holds the two neighbours with element
// r and `high` those with element r + 4.
__device__ __forceinline__ std::uint32_t uint4_pair(std::uint32_t low, std::uint32_t high, int r) {
  return __byte_perm(low, high, r % 2 ? 0x7632 : 0x5410);
}
inline constexpr float odd_code_one = 16 * code_one;
inline constexpr std::uint32_t pair_of_8 = 0x00080008u;  // 8 * code_one, twice

}  // namespace rooftile::tile
