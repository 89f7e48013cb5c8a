// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <concepts>
#include <cstddef>

#include "rooftile/context.h"

namespace rooftile {

// Concatenates texts and numbers: kernel_name("cuda_", name(dtype), "_t", 16). Every op call makes a name, and snprintf
// would cost 0.2 us.
template <class... Parts>
KernelName kernel_name(Parts... parts) {
  KernelName result;  // zero-filled; the last byte stays 0
  std::size_t used = 0;
  const auto append = [&](auto part) {
    char digits[24] = {};  // a signed 64-bit number has at most 20
    const char* text = digits;
    if constexpr (std::integral<decltype(part)>) {
      std::to_chars(digits, digits + sizeof digits - 1, part);
    } else {
      text = part;
    }
    for (; *text && used < sizeof result.text - 1; ++text) result.text[used++] = *text;
  };
  (append(parts), ...);
  return result;
}

}  // namespace rooftile
