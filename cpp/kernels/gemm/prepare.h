// SPDX-License-Identifier: Apache-2.0
// The kernels that run before a product with W in 4 or 8 bits: x gathered, rows of W expanded to 16 bits.
#pragma once

#include "kernels/gemm/params.h"
#include "kernels/gemm/plan.h"
#include "kernels/launch.h"

namespace rooftile::gpu {

// Gathers x of the tokens of one launch to `to` (gather_x.cuh).
void gather_x(const DeviceScope&, const GemmPlan&, const CodesParams&, std::uint16_t* to);
// Writes a chunk of W's rows in x's type (expand.cuh).
void expand_rows(const DeviceScope&, const ExpandParams&, DType);
void load_prepare_kernels(const char* op);

}  // namespace rooftile::gpu
