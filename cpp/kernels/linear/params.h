// SPDX-License-Identifier: Apache-2.0
// What the kernels of a 16-bit product receive, and where the host finds them.
#pragma once

#include <cstdint>

#include "kernels/launch.h"
#include "kernels/linear/plan.h"
#include "kernels/products/product.h"

namespace rooftile::gpu {

struct LinearParams : Product {
  const void* w = nullptr;
  std::int64_t w_stride = 0, w_last_stride = 0;  // elements, from row to row and in a row
  std::int64_t x_stride = 0;                     // of rows that lie evenly
  std::int64_t k = 0;
  unsigned m_blocks = 0, n_blocks = 0;
  int row_tiles = 0, slices_log2 = 0, steps = 0,
      split_steps = 0;  // as in LinearPlan; steps: of all of K, as long as the kernel's are
};

// One product by boxes or by tiles; its tensors lie as these need it (linear.cu). The plan's path says whose.
void linear_tma(const DeviceScope&, const LinearParams&, DType, const LinearPlan&);
void linear_collective(const DeviceScope&, const LinearParams&, DType, int config);
void linear_multistage(const DeviceScope&, const LinearParams&, DType);
void load_linear_tma(const char* op);
void load_linear_collectives(const char* op);
void load_linear_multistage(const char* op);

}  // namespace rooftile::gpu
