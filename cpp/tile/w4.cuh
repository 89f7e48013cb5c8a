// SPDX-License-Identifier: Apache-2.0
// The register A operand of mma m16n8k16 from the kernel form of a 4-bit weight (core/w4_layout.h).
#pragma once

#include "tile/dequant.cuh"
#include "tile/element.cuh"

namespace rooftile::tile {

// decode: one word (a lane's codes of one k-step) -> the four fragment registers u - zero, exactly. Registers 0 and 2 are row
// g of the tile, 1 and 3 row g + 8; zero(low, high, given) holds the zeros of the two rows, 0 to 255; given: they are the
// weight's own, and not 8 or 0 for all rows.
template <class T>
struct W4Decode;

// fp16: a nibble ored under 0x6400 is 1024 + u, one place higher 1024 + 16 u; an addition or a multiply-add takes the rest
// off.
template <>
struct W4Decode<half> {
  static constexpr std::uint32_t one = 0x3c003c00;
  struct Zero {
    std::uint32_t low, high;   // -(1024 + zero), -(64 + zero), twice
  };
  __device__ __forceinline__ static Zero zero(int low, int high, bool) {
    const std::uint32_t a = __half_as_ushort(__int2half_rn(-1024 - low)), b = __half_as_ushort(__int2half_rn(-64 - high));
    return {a | a << 16, b | b << 16};
  }
  __device__ __forceinline__ static void decode(std::uint32_t word, const Zero& zero, std::uint32_t (&a)[4]) {
    constexpr std::uint32_t sixteenth = 0x2c002c00;
    const std::uint32_t upper = word >> 8;
    a[0] = add_f16x2(mask_or(word, 0x000f000f, 0x64006400), zero.low);
    a[1] = fma_f16x2(mask_or(word, 0x00f000f0, 0x64006400), sixteenth, zero.high);
    a[2] = add_f16x2(mask_or(upper, 0x000f000f, 0x64006400), zero.low);
    a[3] = fma_f16x2(mask_or(upper, 0x00f000f0, 0x64006400), sixteenth, zero.high);
  }
};

// bf16: a nibble in the mantissa of 128 is 128 + u. 128 + zero is exact up to 255: zeros that may be larger come off alone.
__device__ __forceinline__ std::uint32_t add_bf16x2(std::uint32_t a, std::uint32_t b) {
  const __nv_bfloat162 sum = __hadd2(reinterpret_cast<const __nv_bfloat162&>(a), reinterpret_cast<const __nv_bfloat162&>(b));
  return reinterpret_cast<const std::uint32_t&>(sum);
}
template <>
struct W4Decode<bf16> {
  static constexpr std::uint32_t one = 0x3f803f80;
  struct Zero {
    std::uint32_t low, high;   // -(128 + zero), or -zero if given; twice
    bool given;
  };
  __device__ __forceinline__ static Zero zero(int low, int high, bool given) {
    const int base = given ? 0 : 128;
    const std::uint32_t a = __bfloat16_as_ushort(__int2bfloat16_rn(-base - low)), b = __bfloat16_as_ushort(__int2bfloat16_rn(-base - high));
    return {a | a << 16, b | b << 16, given};
  }
  __device__ __forceinline__ static void decode(std::uint32_t word, const Zero& zero, std::uint32_t (&a)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const std::uint32_t raised = mask_or(word >> (4 * r), 0x000f000f, 0x43004300), off = r % 2 ? zero.high : zero.low;
      a[r] = add_bf16x2(raised, zero.given ? 0xc300c300 : off);
      if (zero.given) a[r] = add_bf16x2(a[r], off);
    }
  }
};

}  // namespace rooftile::tile
