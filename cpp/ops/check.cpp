// SPDX-License-Identifier: Apache-2.0
#include "ops/check.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace rooftile::check {

bool overlaps_itself(const TensorView& t) {
  if (t.numel() == 0) return false;
  // From the smallest stride up, each dimension must step over all that lies inside it. Doubles: products may be vast.
  double reach = 0;
  bool done[TensorView::max_ndim] = {};
  for (int round = 0; round < t.ndim; ++round) {
    int next = -1;
    for (int i = 0; i < t.ndim; ++i)
      if (!done[i] && t.shape[i] > 1 && (next < 0 || std::abs(t.stride[i]) < std::abs(t.stride[next]))) next = i;
    if (next < 0) break;
    done[next] = true;
    const double stride = std::abs(static_cast<double>(t.stride[next]));
    if (stride <= reach) return true;
    reach += static_cast<double>(t.shape[next] - 1) * stride;
  }
  return false;
}

KernelName kernel_name(const cpu::Kernels& k, std::initializer_list<const char*> parts) {
  KernelName result;
  int used = std::snprintf(result.text, sizeof result.text, "cpu_%s", k.variant);
  for (const char* part : parts)
    if (used < static_cast<int>(sizeof result.text))
      used += std::snprintf(result.text + used, sizeof result.text - static_cast<std::size_t>(used), "_%s", part);
  return result;
}

}  // namespace rooftile::check
