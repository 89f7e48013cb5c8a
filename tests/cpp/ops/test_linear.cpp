// SPDX-License-Identifier: Apache-2.0
// Every CPU variant of the 16-bit (and fp32) product against the reference, in buffers of exactly the size needed.
#include <gtest/gtest.h>

#include <random>

#include "rooftile/error.h"
#include "rooftile/gemm.h"
#include "support/host_tensor.h"

namespace rooftile {
namespace {

struct Case {
  std::int64_t n, k;
};
constexpr Case cases[] = {{1, 1}, {16, 64}, {17, 96}, {5, 50}, {33, 384}, {40, 192}, {3, 577}, {4, 0}};

void fill(Tensor& t, std::mt19937& rng) {
  for (std::int64_t i = 0; i < t.view.numel(); ++i) t.set(i, static_cast<float>(static_cast<int>(rng() % 5) - 2));
}

TEST(Linear, EveryVariantGivesTheExactProductOfSmallIntegers) {
  std::mt19937 rng(1);
  for (const Case& c : cases)
    for (DType dtype : {DType::f32, DType::f16, DType::bf16})
      for (std::int64_t m : {1, 2, 9, 100}) {
        Tensor x(dtype, {m, c.k}), weight(dtype, {c.n, c.k}), bias(dtype, {c.n}), residual(dtype, {m, c.n}),
            expected(dtype, {m, c.n});
        for (Tensor* t : {&x, &weight, &bias, &residual}) fill(*t, rng);
        const LinearOptions options{.bias = bias.view, .residual = residual.view};
        linear({.variant = "reference"}, x.view, weight.view, expected.view, options);
        for (std::int64_t i = 0; i < m * c.n; ++i) {  // the reference itself, written out
          float sum = bias.get(i % c.n) + residual.get(i);
          for (std::int64_t k = 0; k < c.k; ++k) sum += x.get(i / c.n * c.k + k) * weight.get(i % c.n * c.k + k);
          Tensor rounded(dtype, {1});
          rounded.set(0, sum);
          ASSERT_EQ(expected.get(i), rounded.get(0)) << "n " << c.n << " k " << c.k << " m " << m << " index " << i;
        }
        for (const std::string& name : variants())
          for (int threads : m == 9 ? std::vector{1, 3} : std::vector{1}) {
            Tensor y(dtype, {m, c.n});
            linear({.threads = threads, .variant = name.c_str()}, x.view, weight.view, y.view, options);
            for (std::int64_t i = 0; i < m * c.n; ++i)
              ASSERT_EQ(y.get(i), expected.get(i))
                  << name << " n " << c.n << " k " << c.k << " m " << m << " index " << i;
          }
      }
}

TEST(Linear, StridesAreFollowed) {
  std::mt19937 rng(2);
  const std::int64_t m = 7, n = 19, k = 70;
  Tensor x(DType::f16, {k, m}), weight(DType::f16, {k, n}), straight_x(DType::f16, {m, k}),
      straight_weight(DType::f16, {n, k});
  fill(x, rng);
  fill(weight, rng);
  for (std::int64_t i = 0; i < m * k; ++i) straight_x.set(i, x.get(i % k * m + i / k));
  for (std::int64_t i = 0; i < n * k; ++i) straight_weight.set(i, weight.get(i % k * n + i / k));
  const auto turned = [](TensorView t) {
    std::swap(t.shape[0], t.shape[1]);
    std::swap(t.stride[0], t.stride[1]);
    return t;
  };
  for (const std::string& name : variants()) {
    Tensor y(DType::f16, {m, n}), y_turned(DType::f16, {n, m});
    linear({.variant = name.c_str()}, straight_x.view, straight_weight.view, y.view);
    linear({.variant = name.c_str()}, turned(x.view), turned(weight.view), turned(y_turned.view));
    for (std::int64_t i = 0; i < m * n; ++i)
      ASSERT_EQ(y.get(i), y_turned.get(i % n * m + i / n)) << name << " index " << i;
  }
}

TEST(Linear, WrongTensorsAreRefused) {
  const Tensor x(DType::f16, {3, 8}), weight(DType::f16, {5, 8}), y(DType::f16, {3, 5});
  const Tensor narrow(DType::f16, {5, 7}), wide(DType::f32, {5, 8}), flat(DType::f16, {8}), small(DType::f16, {4});
  EXPECT_NO_THROW(linear({}, x.view, weight.view, y.view));
  for (const Tensor* wrong : {&narrow, &wide, &flat}) {
    EXPECT_THROW(linear({}, x.view, wrong->view, y.view), Error);
    EXPECT_THROW(linear_workspace({}, x.view, wrong->view), Error);
  }
  EXPECT_THROW(linear({}, x.view, weight.view, x.view), Error);
  EXPECT_THROW(linear({}, x.view, weight.view, y.view, {.bias = small.view}), Error);
  EXPECT_THROW(linear({}, x.view, weight.view, y.view, {.residual = small.view}), Error);
  EXPECT_THROW(linear({.variant = "none such"}, x.view, weight.view, y.view), Error);
  EXPECT_EQ(linear_workspace({}, x.view, weight.view), 0u);
}

}  // namespace
}  // namespace rooftile
