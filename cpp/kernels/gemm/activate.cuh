// SPDX-License-Identifier: Apache-2.0
// The activation as a functor of CUTLASS's epilogues: applied to one value or to an array, chosen at run time.
#pragma once

#include <cutlass/array.h>
#include <cutlass/cutlass.h>

#include <type_traits>

#include "rooftile/gemm.h"
#include "tile/activation.cuh"
#include "tile/element.cuh"

namespace rooftile::gpu {

struct ActivationChoice {
  Activation activation = Activation::none;
};

template <class X>
struct Activate {
  using Arguments = ActivationChoice;
  CUTLASS_DEVICE X operator()(X x, ActivationChoice chosen) const {
    if constexpr (std::is_same_v<X, float>) {
      x = tile::activate(chosen.activation, x);
    } else if (chosen.activation != Activation::none) {
#pragma unroll
      for (int i = 0; i < X::kElements; ++i) x[i] = tile::activate(chosen.activation, x[i]);
    }
    return x;
  }
};

}  // namespace rooftile::gpu
