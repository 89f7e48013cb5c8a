// SPDX-License-Identifier: Apache-2.0
// Division by what the host knows: one by a variable is some 25 instructions that wait for each other.
#pragma once

#include <bit>
#include <cstdint>

#include "core/hd.h"

namespace rooftile {

// Its rounded-up reciprocal: two instructions, exact for 0 <= a < 2^31 (Granlund and Montgomery 1994).
struct Divisor {
  int value = 1, shift = 0;
  std::uint32_t reciprocal = 0;  // of 1: none
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
