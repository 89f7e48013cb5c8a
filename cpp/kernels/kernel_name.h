// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <charconv>
#include <concepts>
#include <cstddef>

#include "rooftile/context.h"

namespace rooftile::gpu {

// Texts and numbers, one after another: kernel_name("cuda_", name(dtype), "_t", 16). Every call makes one, and snprintf took 0.2 us for it.
template <class... Parts>
KernelName kernel_name(Parts... parts) {
  KernelName result;   // zeros, of which the last one stays
  std::size_t used = 0;
  const auto append = [&](auto part) {
    constexpr std::size_t room = sizeof result.text - 1;
    if constexpr (std::integral<decltype(part)>) {
      const auto [end, error] = std::to_chars(result.text + used, result.text + room, part);
      if (error == std::errc()) used = static_cast<std::size_t>(end - result.text);
    } else {
      for (const char* text = part; *text && used < room; ++text) result.text[used++] = *text;
    }
  };
  (append(parts), ...);
  return result;
}

}  // namespace rooftile::gpu
