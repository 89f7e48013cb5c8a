// SPDX-License-Identifier: Apache-2.0
// The sum of what several chunks of K left, as a kernel behind theirs.
#pragma once

#include "kernels/launch.h"
#include "kernels/products/product.h"

namespace rooftile::gpu {

// y = activation(sum of p.partial over the chunks, in order, + bias) + residual for the tokens of this launch. dtype:
// f16 or bf16.
void finish_product(const DeviceScope&, const Product& p, DType dtype);

}  // namespace rooftile::gpu
