// SPDX-License-Identifier: Apache-2.0
// Stored codes -> pairs of fp16, exactly, in registers. No code needs more than 11 bits, so fp16 serves bf16 caches too.
#pragma once

#include "tile/element.cuh"

namespace rooftile::tile {

// (x & mask) | magic in one instruction: both constants must lie in registers for it.
__device__ __forceinline__ std::uint32_t mask_or(std::uint32_t x, std::uint32_t mask, std::uint32_t magic) {
  std::uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(x), "r"(mask), "r"(magic));
  return r;
}

__device__ __forceinline__ std::uint32_t add_f16x2(std::uint32_t a, std::uint32_t b) {
  const __half2 sum = __hadd2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const std::uint32_t&>(sum);
}
__device__ __forceinline__ std::uint32_t fma_f16x2(std::uint32_t a, std::uint32_t b, std::uint32_t c) {
  const __half2 r = __hfma2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b),
                            reinterpret_cast<const __half2&>(c));
  return reinterpret_cast<const std::uint32_t&>(r);
}
__device__ __forceinline__ std::uint32_t mul_f16x2(std::uint32_t a, std::uint32_t b) {
  const __half2 r = __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
  return reinterpret_cast<const std::uint32_t&>(r);
}

// Four int8 codes in a word -> (byte 0, byte 1), (byte 2, byte 3).
// 0x64 as a high byte makes 1024 + low byte; the sign bit is flipped first, so 1152 is taken off.
__device__ __forceinline__ void decode_int8(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
  constexpr std::uint32_t minus_1152 = 0xe480e480u;
  const std::uint32_t flipped = word ^ 0x80808080u;
  low = add_f16x2(__byte_perm(flipped, 0x64646464u, 0x4140), minus_1152);
  high = add_f16x2(__byte_perm(flipped, 0x64646464u, 0x4342), minus_1152);
}

// Eight unsigned nibbles u in a word -> u - 8, pair r being (nibble r, nibble r + 4).
// Ored under 0x6400 a nibble is 1024 + u, in the next place 1024 + 16 u; an exact multiply-add takes both to u - 8.
__device__ __forceinline__ void decode_uint4_minus_8(std::uint32_t word, std::uint32_t (&pair)[4]) {
  constexpr std::uint32_t minus_1032 = 0xe408e408u, sixteenth = 0x2c002c00u, minus_72 = 0xd480d480u;
  const std::uint32_t upper = word >> 8;
  pair[0] = add_f16x2(mask_or(word, 0x000f000fu, 0x64006400u), minus_1032);
  pair[1] = fma_f16x2(mask_or(word, 0x00f000f0u, 0x64006400u), sixteenth, minus_72);
  pair[2] = add_f16x2(mask_or(upper, 0x000f000fu, 0x64006400u), minus_1032);
  pair[3] = fma_f16x2(mask_or(upper, 0x00f000f0u, 0x64006400u), sixteenth, minus_72);
}

}  // namespace rooftile::tile
