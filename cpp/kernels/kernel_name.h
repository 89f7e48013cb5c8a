// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <initializer_list>

#include "rooftile/context.h"

namespace rooftile::gpu {

// The parts with "_" between them: "cuda_bfloat16".
inline KernelName kernel_name(std::initializer_list<const char*> parts) {
  KernelName result;   // zeros
  std::size_t used = 0;
  for (const char* part : parts) {
    if (used > 0 && used + 1 < sizeof result.text) result.text[used++] = '_';
    for (; *part && used + 1 < sizeof result.text; ++part) result.text[used++] = *part;
  }
  return result;
}

}  // namespace rooftile::gpu
