// SPDX-License-Identifier: Apache-2.0
// The activations behind a product, in double precision.
#pragma once

#include <cmath>
#include <numbers>

#include "rooftile/gemm.h"

namespace rooftile::cpu::reference {

inline double activate(Activation a, double x) {
  switch (a) {
    case Activation::none:
      return x;
    case Activation::silu:
      return x / (1 + std::exp(-x));
    case Activation::gelu_tanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (x + 0.044715 * x * x * x)));
    case Activation::gelu_erf:
      return 0.5 * x * std::erfc(-x / std::numbers::sqrt2);
  }
  return 0;
}

}  // namespace rooftile::cpu::reference
