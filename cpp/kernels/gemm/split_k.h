// SPDX-License-Identifier: Apache-2.0
// The split-K reduction: a kernel that follows the one that wrote the partial sums.
#pragma once

#include "kernels/gemm/params.h"
#include "kernels/launch.h"

namespace rooftile::gpu {

// y = activation(sum of p.partial over the splits, in order, + bias) + residual for the tokens of this launch. With
// p.gated: y = activation(gate) * up + residual. dtype: f16 or bf16.
void split_k_epilogue(const DeviceScope&, const GemmParams& p, DType dtype);
void load_split_k_kernels(const char* op);

}  // namespace rooftile::gpu
