// SPDX-License-Identifier: Apache-2.0
// Floats as integers in two planes of bytes, for products with codes: x = step * v, |v| <= 32639, v = 256 high + low
// with high and low from -128 to 127. Include isa.h first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "cpu/simd/vec.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

// A power of two, at least 2^-54; the largest |x| of a block is at most 32639 of it.
ROOFTILE_INLINE float step_of(float largest) {
  constexpr std::uint32_t smallest = (127 - 40) << 23;  // 2^-40
  std::uint32_t exponent;
  std::memcpy(&exponent, &largest, sizeof exponent);
  exponent = std::max(exponent & 0x7f800000u, smallest) - (14u << 23);
  float step;
  std::memcpy(&step, &exponent, sizeof step);
  return largest > 32639 * step ? 2 * step : step;
}

// v of x; inverse: 1 / step.
ROOFTILE_INLINE I32 to_integers(F32 x, F32 inverse) { return (I32)_mm512_cvtps_epi32((__m512)(x * inverse)); }
// The planes' bytes, in the lowest byte of each lane.
ROOFTILE_INLINE U32 high_byte(I32 v) { return (U32)((v + 128) >> 8) & 255; }
ROOFTILE_INLINE U32 low_byte(I32 v) { return (U32)v & 255; }

}  // namespace
}  // namespace rooftile::cpu::ROOFTILE_ISA
