// SPDX-License-Identifier: Apache-2.0
// What the machine itself can do, for measurements to be held against.
#pragma once

#include "rooftile/context.h"
#include "rooftile/tensor.h"

namespace rooftile {

// Reads x, contiguous uint8 [n] on a GPU with n a multiple of 16, once. sink: int32 [1] beside it, left as it is.
KernelName read_bytes(const Context&, TensorView x, TensorView sink);

}  // namespace rooftile
