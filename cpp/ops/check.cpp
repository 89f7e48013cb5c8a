// SPDX-License-Identifier: Apache-2.0
#include "ops/check.h"

#include <cstdio>

namespace rooftile::check {

KernelName kernel_name(const cpu::Kernels& k, std::initializer_list<const char*> parts) {
  KernelName result;
  int used = std::snprintf(result.text, sizeof result.text, "cpu_%s", k.variant);
  for (const char* part : parts)
    if (used < static_cast<int>(sizeof result.text))
      used += std::snprintf(result.text + used, sizeof result.text - static_cast<std::size_t>(used), "_%s", part);
  return result;
}

}  // namespace rooftile::check
