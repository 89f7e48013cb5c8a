// SPDX-License-Identifier: Apache-2.0
// Activations and fast functions on a GPU, for every bf16 as the argument, against fp64 on the host. Bounds are in
// units of 2^-24, half a unit in the last place of a result just above a power of two: expf, erfcf and the fast
// division err by 2, 4 and 2 units in the last place, any other operation by a half one.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include "support/device.cuh"
#include "tile/activation.cuh"
#include "tile/softmax.cuh"

namespace rooftile::tile {
namespace {

constexpr int patterns = 1 << 16;
constexpr double unit = 0x1p-24, subnormal = 0x1p-149, smallest_normal = 0x1p-126;

__host__ __device__ std::uint32_t bits_of(int pattern) { return static_cast<std::uint32_t>(pattern) << 16; }

template <class F>
__global__ void evaluate(float* to) {
  const int i = thread_index();
  to[i] = F::of(__uint_as_float(bits_of(i)));
}

// Calls check(x, F(x)) for every bf16 x but NaN, whose result must be NaN.
template <class F, class Check>
void for_each_bf16(const Check& check) {
  const Shared<float> results(patterns);
  launch(evaluate<F>, patterns, results.data);
  for (int i = 0; i < patterns; ++i) {
    const float x = std::bit_cast<float>(bits_of(i)), found = results[static_cast<std::size_t>(i)];
    SCOPED_TRACE(testing::Message() << "x = " << x << ", found " << found);
    if (std::isnan(x)) {
      ASSERT_TRUE(std::isnan(found));
    } else {
      ASSERT_NO_FATAL_FAILURE(check(x, found));
    }
  }
}

// bounds: function of x, the relative bound in units. A result below the normals may be off by the error of the
// exponential there, times x. lost: magnitude of results that may be 0, because 1 + exp(-x) overflows.
template <class F, class Exact, class Bound>
void check_activation(const Exact& exact, const Bound& bound, double lost) {
  for_each_bf16<F>([&](float x, float found) {
    const double expected = exact(double{x});
    if (std::isnan(expected)) {  // -inf times 0
      ASSERT_TRUE(std::isnan(found));
    } else if (std::isinf(expected)) {
      ASSERT_EQ(found, static_cast<float>(expected));
    } else if (found != 0.0f || std::fabs(expected) > lost) {
      ASSERT_LE(std::fabs(found - expected),
                bound(double{x}) * unit * std::fabs(expected) + (4 * std::fabs(x) + 2) * subnormal)
          << "expected " << expected;
      ASSERT_EQ(std::signbit(found), std::signbit(expected));
    }
  });
}

double silu(double x) { return x / (1 + std::exp(-x)); }
// 2 u and (1 + tanh(u)) x / 2; exp(u) / cosh(u) keeps the digits of 1 + tanh(u) where it is small.
double tanh_argument(double x) { return 2 * std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x); }
double gelu_tanh(double x) {
  const double u = std::clamp(tanh_argument(x) / 2, -600.0, 600.0);
  return 0.5 * x * (std::exp(u) / std::cosh(u));
}
double gelu_erf(double x) { return 0.5 * x * std::erfc(-x * M_SQRT1_2); }

// The exponential 4, product, sum and quotient: 1 + 5 + 4. gelu_tanh: and 6 of the exponential's argument.
double silu_bound(double) { return 16; }
double gelu_tanh_bound(double x) { return 16 + 8 * std::min(std::fabs(tanh_argument(x)), 110.0); }
// erfc 8, two products; and 2 of its argument z, which are 2 z^2 + 1 times as many of erfc(z) at most.
double gelu_erf_bound(double x) { return 16 + 4 * (std::min(x * x / 2, 110.0) + 1); }

template <Activation a>
struct InEpilogue {
  static __device__ float of(float x) { return activate(a, x); }
};

// The fast exponential rounds the product of its argument and log2(e): 2 |z| more, down to the subnormals.
double silu_gate_bound(double x) { return silu_bound(x) + 2 * std::min(std::fabs(x), 110.0); }
double gelu_tanh_gate_bound(double x) { return gelu_tanh_bound(x) + 2 * std::min(std::fabs(tanh_argument(x)), 110.0); }

TEST_F(Tile, GatesKeepTheirDigits) {
  check_activation<Silu>(silu, silu_gate_bound, 0);
  check_activation<GeluTanh>(gelu_tanh, gelu_tanh_gate_bound, 0);
  check_activation<GeluErf>(gelu_erf, gelu_erf_bound, 0);
}
TEST_F(Tile, ActivationsOfAnEpilogue) {
  constexpr double largest = std::numeric_limits<float>::max();
  for_each_bf16<InEpilogue<Activation::none>>([](float x, float found) { ASSERT_EQ(found, x); });
  check_activation<InEpilogue<Activation::silu>>(silu, silu_bound, 89 / largest);
  check_activation<InEpilogue<Activation::gelu_tanh>>(gelu_tanh, gelu_tanh_bound, 11 / largest);
  check_activation<InEpilogue<Activation::gelu_erf>>(gelu_erf, gelu_erf_bound, 0);
}

struct FastExp2 {
  static __device__ float of(float x) { return fast_exp2(x); }
};
TEST_F(Tile, FastExp2) {
  for_each_bf16<FastExp2>([](float x, float found) {
    const double expected = std::exp2(double{x});
    if (expected > std::numeric_limits<float>::max()) {
      ASSERT_EQ(found, std::numeric_limits<float>::infinity());
    } else if (expected < smallest_normal) {
      ASSERT_EQ(found, 0.0f);
    } else {
      ASSERT_LE(std::fabs(found - expected), 4 * unit * expected);
    }
  });
}

struct FastReciprocal {
  static __device__ float of(float x) { return fast_reciprocal(x); }
};
TEST_F(Tile, FastReciprocal) {
  for_each_bf16<FastReciprocal>([](float x, float found) {
    const double expected = 1 / double{x};
    if (std::fabs(x) < smallest_normal) {  // counts as 0
      ASSERT_TRUE(std::isinf(found));
    } else if (std::fabs(expected) < smallest_normal) {
      ASSERT_EQ(found, 0.0f);
    } else {
      ASSERT_LE(std::fabs(found - expected), 2 * unit * std::fabs(expected));
    }
    ASSERT_EQ(std::signbit(found), std::signbit(x));
  });
}

}  // namespace
}  // namespace rooftile::tile
