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

}  // namespace rooftile
