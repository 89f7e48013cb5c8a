// SPDX-License-Identifier: Apache-2.0
// The parameters of the 16-bit product kernels, and their host entry points.
#pragma once

#include <cstdint>

#include "core/divisor.h"
#include "kernels/launch.h"
#include "kernels/gemm/bits16_plan.h"
#include "kernels/gemm/params.h"

namespace rooftile::gpu {

struct LinearParams : Product {
  const void* w = nullptr;
  std::int64_t w_stride = 0, w_last_stride = 0;  // elements between rows; between neighbouring k
  std::int64_t x_stride = 0;                     // elements between rows of x, where all rows have one stride
  std::int64_t k = 0;
  Divisor by_m_blocks{}, by_n_blocks{};  // CTAs along tokens, and along rows of W
  int row_tiles = 0, slices_log2 = 0, steps = 0,
      split_steps = 0;  // as in LinearPlan; steps: k-steps of all of K, of the kernel's own length
};

// Launch one product on the path that the plan chose. The tensors meet that path's alignment rules (linear.cu).
void linear_tma(const DeviceScope&, const LinearParams&, DType, const LinearPlan&);
void linear_collective_half(const DeviceScope&, const LinearParams&, int config);
void linear_collective_bf16(const DeviceScope&, const LinearParams&, int config);
inline void linear_collective(const DeviceScope& scope, const LinearParams& p, DType dtype, int config) {
  (dtype == DType::f16 ? linear_collective_half : linear_collective_bf16)(scope, p, config);
}
void linear_multistage(const DeviceScope&, const LinearParams&, DType);
void load_linear_tma(const char* op);
void load_linear_collectives_half(const char* op);
void load_linear_collectives_bf16(const char* op);
void load_linear_multistage(const char* op);

}  // namespace rooftile::gpu
