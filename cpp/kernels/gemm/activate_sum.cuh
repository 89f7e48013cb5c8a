// SPDX-License-Identifier: Apache-2.0
// What a product does with its sums, as a functor of CUTLASS's epilogues.
#pragma once

#include <cutlass/array.h>
#include <cutlass/cutlass.h>

#include "rooftile/gemm.h"
#include "tile/activation.cuh"
#include "tile/element.cuh"

namespace rooftile::gpu {

struct ActivationChoice {
  Activation activation = Activation::none;
};

// activation(sum + bias) + residual of neighbouring outputs. Fragment: cutlass::Array of floats.
template <class Fragment>
struct ActivateSum {
  using Arguments = ActivationChoice;
  CUTLASS_DEVICE Fragment operator()(const Fragment& sum, const Fragment& bias, const Fragment& residual,
                                     ActivationChoice chosen) const {
    Fragment y;
#pragma unroll
    for (int i = 0; i < Fragment::kElements; ++i) y[i] = sum[i] + bias[i];
    if (chosen.activation != Activation::none) {
#pragma unroll
      for (int i = 0; i < Fragment::kElements; ++i) y[i] = tile::activate(chosen.activation, y[i]);
    }
#pragma unroll
    for (int i = 0; i < Fragment::kElements; ++i) y[i] += residual[i];
    return y;
  }
};

}  // namespace rooftile::gpu
