// SPDX-License-Identifier: Apache-2.0
// Division by a number the host knows. A device division by a variable is a chain of about 25 dependent instructions.
#pragma once

#include <bit>
#include <cstdint>

#include "core/hd.h"

namespace rooftile {

// A divisor and its rounded-up reciprocal: two instructions, exact for 0 <= a < 2^31 (Granlund and Montgomery 1994).
struct Divisor {
  int value = 1, shift = 0;
  std::uint32_t reciprocal = 0;  // unused for value 1
  Divisor() = default;
  explicit Divisor(int b) : value(b) {
    if (b == 1) return;
    const int bits = std::bit_width(static_cast<unsigned>(b) - 1);
    shift = bits - 1;
    reciprocal = static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + bits)) + static_cast<unsigned>(b) - 1) /
                                            static_cast<unsigned>(b));
  }
};
ROOFTILE_HD inline int divide(int a, const Divisor& b) {
#ifdef __CUDA_ARCH__
  const std::uint32_t high = __umulhi(static_cast<std::uint32_t>(a), b.reciprocal);
#else
  const std::uint32_t high =
      static_cast<std::uint32_t>(std::uint64_t{static_cast<std::uint32_t>(a)} * b.reciprocal >> 32);
#endif
  return b.value == 1 ? a : static_cast<int>(high >> b.shift);
}

// The same for 0 <= a < 2^53: a product with the rounded reciprocal, which errs by at most one, and a correction. On a
// device a 64-bit integer division would be a function call.
struct Divisor64 {
  std::int64_t value = 1;
  double reciprocal = 1;
  Divisor64() = default;
  explicit Divisor64(std::int64_t b) : value(b), reciprocal(1.0 / static_cast<double>(b)) {}
};
struct Division64 {
  std::int64_t quotient, remainder;
};
ROOFTILE_HD inline Division64 divide(std::int64_t a, const Divisor64& b) {
  std::int64_t quotient = static_cast<std::int64_t>(static_cast<double>(a) * b.reciprocal);
  std::int64_t remainder = a - quotient * b.value;
  if (remainder < 0) --quotient, remainder += b.value;
  if (remainder >= b.value) ++quotient, remainder -= b.value;
  return {quotient, remainder};
}

}  // namespace rooftile
