// SPDX-License-Identifier: Apache-2.0
// Measurements of the machine's limits, for comparison with kernels.
#pragma once

#include "rooftile/context.h"
#include "rooftile/tensor.h"

namespace rooftile {

// Reads x once: contiguous uint8 [n] on a GPU, n a multiple of 16. sink: int32 [1] on the same device, left unchanged.
KernelName read_bytes(const Context&, TensorView x, TensorView sink);

}  // namespace rooftile
