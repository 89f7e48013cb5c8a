// SPDX-License-Identifier: Apache-2.0
// fp16, bf16 and fp8 as storage types. Conversions round to nearest even and keep subnormals and NaN.
#pragma once

#include <bit>
#include <cstdint>

#include "core/hd.h"
#include "rooftile/tensor.h"

namespace rooftile {

struct Half {
  std::uint16_t bits;
};
struct BFloat16 {
  std::uint16_t bits;
};
struct E4M3 {  // OCP fp8: 1 sign, 4 exponent (bias 7), 3 mantissa bits; up to 448, no infinity, NaN is S.1111.111
  std::uint8_t bits;
};

constexpr float to_float(float x) { return x; }

constexpr float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<std::uint32_t>(x.bits) << 16); }

constexpr float to_float(Half x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x8000u) << 16;
  const std::uint32_t exponent = (x.bits >> 10) & 0x1fu;
  const std::uint32_t mantissa = x.bits & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | (mantissa << 13));
  if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24, exact in fp32
    const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

constexpr float to_float(E4M3 x) {
  const std::uint32_t sign = static_cast<std::uint32_t>(x.bits & 0x80u) << 24, magnitude = x.bits & 0x7fu;
  if (magnitude == 0x7f) return std::bit_cast<float>(sign | 0x7fc00000u);
  if (magnitude < 8) {  // zero or subnormal: mantissa * 2^-9
    const float value = static_cast<float>(magnitude) * 0x1p-9f;
    return sign ? -value : value;
  }
  return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

template <class T>
constexpr T from_float(float x);

template <>
constexpr float from_float<float>(float x) {
  return x;
}

template <>
constexpr BFloat16 from_float<BFloat16>(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

template <>
constexpr Half from_float<Half>(float x) {
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 16) & 0x8000u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint16_t>(sign | 0x7e00u | ((magnitude >> 13) & 0x3ffu))};
  if (magnitude >= 0x477ff000u) return {static_cast<std::uint16_t>(sign | 0x7c00u)};  // rounds to infinity
  if (magnitude < 0x38800000u) {  // below the smallest normal: adding 0.5 rounds at the last subnormal bit
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return {static_cast<std::uint16_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x3f000000u))};
  }
  const std::uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23);
  return {static_cast<std::uint16_t>(sign | (rounded >> 13))};
}

template <>
constexpr E4M3 from_float<E4M3>(float x) {  // saturates to 448
  const std::uint32_t bits = std::bit_cast<std::uint32_t>(x);
  const std::uint32_t sign = (bits >> 24) & 0x80u;
  const std::uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return {static_cast<std::uint8_t>(sign | 0x7fu)};
  if (magnitude >= 0x43e00000u) return {static_cast<std::uint8_t>(sign | 0x7eu)};  // 448
  if (magnitude < 0x3c800000u) {  // below the smallest normal: adding 2^14 rounds at the last subnormal bit
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return {static_cast<std::uint8_t>(sign | (std::bit_cast<std::uint32_t>(shifted) - 0x46800000u))};
  }
  const std::uint32_t rounded = magnitude + 0x7ffffu + ((magnitude >> 20) & 1u) - (120u << 23);
  return {static_cast<std::uint8_t>(sign | (rounded >> 20))};
}

// The largest scale a quantised group may store: the largest finite number of the type; for affine formats, whose
// readers multiply it by up to 15, the largest one with a finite multiple.
ROOFTILE_HD constexpr float largest_scale(DType t, bool affine) {
  return t == DType::f16 ? 65504.0f : affine ? 0x1.1p+124f : 0x1.fep+127f;
}

}  // namespace rooftile
