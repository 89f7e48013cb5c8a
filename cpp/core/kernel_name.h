// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <concepts>
#include <cstddef>

#include "rooftile/context.h"

namespace rooftile {

// Texts and numbers, one after another: kernel_name("cuda_", name(dtype), "_t", 16). Every call makes one, and snprintf
// took 0.2 us for it.
template <class... Parts>
KernelName kernel_name(Parts... parts) {
  KernelName result;  // zeros, of which the last one stays
  std::size_t used = 0;
  const auto append = [&](auto part) {
    char digits[24] = {};  // of 64 bits and a sign at most 20
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
