// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace rooftile {

// Whether an address is a multiple of `bytes`.
ROOFTILE_HD inline bool is_aligned(const void* at, unsigned bytes) {
  return reinterpret_cast<std::uintptr_t>(at) % bytes == 0;
}

}  // namespace rooftile
