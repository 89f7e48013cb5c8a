// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/divisor.h"

namespace rooftile {
namespace {

TEST(Divisor, DividesAsHardwareDoes) {
  constexpr std::int64_t most = 0x7fffffff;
  std::vector<int> divisors(2000);
  std::iota(divisors.begin(), divisors.end(), 1);
  for (int bits = 11; bits < 31; ++bits)
    for (int more : {-1, 0, 1, 3}) divisors.push_back((1 << bits) + more);
  divisors.push_back(0x7fffffff);
  const auto check = [](std::int64_t a, int b) {
    ASSERT_EQ(divide(static_cast<int>(a), Divisor(b)), a / b) << a << " / " << b;
  };
  for (const int b : divisors) {
    for (const std::int64_t quotient :
         {std::int64_t{0}, std::int64_t{1}, std::int64_t{2}, std::int64_t{77}, most / b / 2, most / b - 1, most / b})
      for (const int more : {-1, 0, 1, b - 1}) check(std::clamp<std::int64_t>(quotient * b + more, 0, most), b);
    for (const std::int64_t a : {most, most - 1, std::int64_t{123456789}}) check(a, b);
  }
}

TEST(Divisor, Divides53BitsAsHardwareDoes) {
  constexpr std::int64_t most = (std::int64_t{1} << 53) - 1;
  for (int bits = 0; bits < 53; ++bits)
    for (const int more : {-1, 0, 1, 3, 5}) {
      const std::int64_t b = std::clamp((std::int64_t{1} << bits) + more, std::int64_t{1}, most);
      for (const std::int64_t quotient : {std::int64_t{0}, std::int64_t{1}, most / b / 3, most / b - 1, most / b})
        for (const int at : {-1, 0, 1}) {
          const std::int64_t a = std::clamp(quotient * b + at, std::int64_t{0}, most);
          const Division64 found = divide(a, Divisor64(b));
          ASSERT_EQ(found.quotient, a / b) << a << " / " << b;
          ASSERT_EQ(found.remainder, a % b) << a << " / " << b;
        }
    }
}

// Of every second b or so the rounded reciprocal is too small: the product of a multiple then lies below its quotient.
TEST(Divisor, MultiplesOfNumbersWhoseReciprocalIsRoundedDown) {
  ASSERT_LT(49.0 * (1.0 / 49.0), 1.0);
  for (std::int64_t b = 1; b < 3000; ++b)
    for (const std::int64_t quotient : {1, 2, 3, 7, 100, 12345}) {
      const Division64 found = divide(quotient * b, Divisor64(b));
      ASSERT_EQ(found.quotient, quotient) << b;
      ASSERT_EQ(found.remainder, 0) << b;
    }
}

}  // namespace
}  // namespace rooftile
