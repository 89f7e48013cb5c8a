// SPDX-License-Identifier: Apache-2.0
// The activations of the library, in fp32: as gates of silu_mul and gelu_mul, and in the epilogue of a product.
#pragma once

#include "rooftile/gemm.h"

namespace rooftile::tile {

// The gates take exp of a non-positive number: nothing overflows, and small results keep their digits down to the
// subnormals. exp and the division are the fast ones: the division within 2 units in the last place, exp(x) within
// 2 + 2 |x| of them, which 16-bit results do not show: expf takes the kernel an eighth more instructions.
struct Silu {
  static __device__ __forceinline__ float of(float g) {
    const float e = __expf(-fabsf(g));
    return __fdividef(g < 0 ? g * e : g, 1 + e);
  }
};
struct GeluTanh {  // 0.5 * (1 + tanh(u)) = 1 / (1 + exp(-2u)) with u = sqrt(2 / pi) * (g + 0.044715 g^3)
  static __device__ __forceinline__ float of(float g) {
    const float u2 = 1.5957691216057308f * fmaf(0.044715f * g * g, g, g), e = __expf(-fabsf(u2));
    return __fdividef(g < 0 ? g * e : g, 1 + e);
  }
};
struct GeluErf {
  static __device__ __forceinline__ float of(float g) { return 0.5f * g * erfcf(g * -0.70710678118654752f); }
};

// The activation of a product's epilogue, chosen at run time. silu and gelu_tanh divide with correct rounding, so their
// bits are not those of the gates; gelu_erf is the gate's.
__device__ __forceinline__ float activate(Activation a, float x) {
  switch (a) {
    case Activation::none:
      return x;
    case Activation::silu:
      return x / (1.0f + expf(-x));
    case Activation::gelu_tanh:
      return x / (1.0f + expf(-1.5957691216057308f * x * fmaf(0.044715f * x, x, 1.0f)));
    case Activation::gelu_erf:
      return GeluErf::of(x);
  }
  return x;
}

}  // namespace rooftile::tile
