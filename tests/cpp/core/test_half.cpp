// SPDX-License-Identifier: Apache-2.0
// Every fp16, bf16 and E4M3 code, both ways, against arithmetic in double that shares nothing with core/half.h.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/half.h"

namespace rooftile {
namespace {

double half_value(unsigned bits) {
  const double sign = bits & 0x8000 ? -1 : 1;
  const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
  if (exponent == 31) return mantissa ? std::nan("") : sign * std::numeric_limits<double>::infinity();
  return exponent ? sign * std::ldexp(1024 + mantissa, exponent - 25) : sign * std::ldexp(mantissa, -24);
}

TEST(Half, EveryCodeDecodesAndComesBack) {
  for (unsigned bits = 0; bits < 0x10000; ++bits) {
    const Half h{static_cast<std::uint16_t>(bits)};
    const double expected = half_value(bits);
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(to_float(h)));
      EXPECT_TRUE(std::isnan(to_float(from_float<Half>(to_float(h)))));
    } else {
      ASSERT_EQ(static_cast<double>(to_float(h)), expected) << bits;
      ASSERT_EQ(from_float<Half>(to_float(h)).bits, bits);
    }
  }
}

TEST(Half, HalfwayPointsGoToEven) {
  for (unsigned bits = 0; bits < 0x7bff; ++bits) {  // between neighbouring finite codes
    const double low = half_value(bits), high = half_value(bits + 1);
    const float middle = static_cast<float>((low + high) / 2);
    ASSERT_EQ(from_float<Half>(middle).bits, bits + (bits & 1)) << bits;
    ASSERT_EQ(from_float<Half>(std::nextafter(middle, 0.0f)).bits, bits);
    ASSERT_EQ(from_float<Half>(std::nextafter(middle, 1e9f)).bits, bits + 1);
    ASSERT_EQ(from_float<Half>(-middle).bits, (bits + (bits & 1)) | 0x8000u);
  }
  EXPECT_EQ(from_float<Half>(65519.996f).bits, 0x7bff);
  EXPECT_EQ(from_float<Half>(65520.0f).bits, 0x7c00);
  EXPECT_EQ(from_float<Half>(1e30f).bits, 0x7c00);
}

TEST(BFloat16, RoundsToNearestEven) {
  for (unsigned bits = 0; bits < 0x7f80; ++bits) {
    const float low = to_float(BFloat16{static_cast<std::uint16_t>(bits)});
    ASSERT_EQ(from_float<BFloat16>(low).bits, bits);
    const float middle = std::bit_cast<float>((bits << 16) | 0x8000u);
    ASSERT_EQ(from_float<BFloat16>(middle).bits, bits + (bits & 1));
    ASSERT_EQ(from_float<BFloat16>(std::bit_cast<float>((bits << 16) | 0x8001u)).bits, bits + 1);
    ASSERT_EQ(from_float<BFloat16>(std::bit_cast<float>((bits << 16) | 0x7fffu)).bits, bits);
  }
  EXPECT_TRUE(std::isnan(to_float(from_float<BFloat16>(std::nanf("")))));
}

double e4m3_value(unsigned bits) {
  const double sign = bits & 0x80 ? -1 : 1;
  const int exponent = bits >> 3 & 15, mantissa = bits & 7;
  if (exponent == 15 && mantissa == 7) return std::nan("");
  return exponent ? sign * std::ldexp(8 + mantissa, exponent - 10) : sign * std::ldexp(mantissa, -9);
}

TEST(E4M3, EveryCodeDecodesAndComesBack) {
  for (unsigned bits = 0; bits < 0x100; ++bits) {
    const float value = to_float(E4M3{static_cast<std::uint8_t>(bits)});
    if ((bits & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value));
    } else {
      EXPECT_EQ(static_cast<double>(value), e4m3_value(bits));
      EXPECT_EQ(std::signbit(value), bits >= 0x80);
    }
    EXPECT_EQ(from_float<E4M3>(value).bits, bits);
  }
}

TEST(E4M3, HalfwayPointsGoToEvenAndPastTheLargestIsTheLargest) {
  for (unsigned bits = 0; bits < 0x7e; ++bits) {
    const float middle = static_cast<float>((e4m3_value(bits) + e4m3_value(bits + 1)) / 2);
    EXPECT_EQ(from_float<E4M3>(middle).bits, bits + (bits & 1)) << bits;
    EXPECT_EQ(from_float<E4M3>(std::nextafter(middle, 0.0f)).bits, bits);
    EXPECT_EQ(from_float<E4M3>(std::nextafter(middle, 1e9f)).bits, bits + 1);
    EXPECT_EQ(from_float<E4M3>(-middle).bits, (bits + (bits & 1)) | 0x80u);
  }
  for (const float x : {448.01f, 463.99f, 464.0f, 480.0f, 1e30f, std::numeric_limits<float>::infinity()}) {
    EXPECT_EQ(from_float<E4M3>(x).bits, 0x7e);
    EXPECT_EQ(from_float<E4M3>(-x).bits, 0xfe);
  }
}

}  // namespace
}  // namespace rooftile
