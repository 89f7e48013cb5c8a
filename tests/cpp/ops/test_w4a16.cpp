// SPDX-License-Identifier: Apache-2.0
// Every CPU variant of the products with weights of 4 and 8 bits against the reference, in buffers of exactly the size
// needed, so that a read or write past an end is seen by the address sanitizer; and the forms of a weight against each
// other.
#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "rooftile/error.h"
#include "rooftile/gemm.h"
#include "support/host_tensor.h"

namespace rooftile {
namespace {

struct Weight {
  Tensor codes, scales, offsets;  // canonical
  Tensor kernel_codes, kernel_scales, kernel_offsets;
  W4View view;
};

Weight make_weight(std::int64_t n, std::int64_t k, int bits, int group, W4Zeros zeros, DType scale_dtype,
                   std::mt19937& rng) {
  Weight w;
  w.codes = Tensor(DType::u8, {n, k * bits / 8});
  for (std::byte& b : w.codes.bytes) b = static_cast<std::byte>(rng() & 255);
  w.scales = Tensor(scale_dtype, {n, k / group});
  const W4Sizes sizes = w4_sizes("test", n, k, bits, group, zeros);
  w.kernel_codes = Tensor(DType::u8, {sizes.codes});
  w.kernel_scales = Tensor(DType::u8, {sizes.scales});
  for (std::int64_t i = 0; i < w.scales.view.numel(); ++i)
    w.scales.set(i, std::ldexp(1.0f, -static_cast<int>(rng() % 3)));
  if (zeros != W4Zeros::symmetric) {
    w.offsets = Tensor(zeros == W4Zeros::integer ? DType::u8 : scale_dtype, {n, k / group});
    w.kernel_offsets = Tensor(DType::u8, {sizes.offsets});
    for (std::int64_t i = 0; i < w.offsets.view.numel(); ++i) {
      const int x = static_cast<int>(rng() % (1u << bits));
      if (zeros == W4Zeros::integer) {
        w.offsets.view.as<std::uint8_t>()[i] = static_cast<std::uint8_t>(x);
      } else {
        w.offsets.set(i, static_cast<float>(x - 8));
      }
    }
  }
  w4_pack({}, w.codes.view, w.scales.view, w.offsets.view, zeros, bits, group, w.kernel_codes.view,
          w.kernel_scales.view, w.kernel_offsets.view);
  w.view = w4_view(n, k, bits, group, zeros, scale_dtype, w.kernel_codes.view, w.kernel_scales.view,
                   w.kernel_offsets.view, {});
  return w;
}

struct Kind {
  int bits;
  W4Zeros zeros;
};
constexpr Kind kinds[] = {{4, W4Zeros::symmetric},
                          {4, W4Zeros::integer},
                          {4, W4Zeros::minima},
                          {8, W4Zeros::symmetric},
                          {8, W4Zeros::integer}};
struct Case {
  std::int64_t n, k;
  int group;
};
constexpr Case cases[] = {{1, 32, 32},    {16, 64, 64},   {17, 96, 32}, {5, 50, 50},
                          {33, 384, 128}, {40, 192, 192}, {3, 576, 64}};

TEST(W4A16, EveryVariantGivesTheExactProductOfSmallIntegers) {
  std::mt19937 rng(1);
  for (const Case& c : cases)
    for (const auto [bits, zeros] : kinds)
      for (DType dtype : {DType::f32, DType::f16, DType::bf16})
        for (std::int64_t m : {1, 2, 9, 100}) {
          const Weight w =
              make_weight(c.n, c.k, bits, c.group, zeros, dtype == DType::bf16 ? DType::bf16 : DType::f16, rng);
          Tensor x(dtype, {m, c.k}), bias(dtype, {c.n}), expected(dtype, {m, c.n});
          for (std::int64_t i = 0; i < m * c.k; ++i) x.set(i, static_cast<float>(static_cast<int>(rng() % 5) - 2));
          for (std::int64_t i = 0; i < c.n; ++i) bias.set(i, static_cast<float>(i % 7));
          const auto multiply = bits == 4 ? w4a16_matmul : w8a16_matmul;
          multiply({.variant = "reference"}, x.view, w.view, expected.view, {.bias = bias.view});
          for (const std::string& name : variants())
            for (int threads : m == 9 ? std::vector{1, 3} : std::vector{1}) {
              Tensor y(dtype, {m, c.n});
              multiply({.threads = threads, .variant = name.c_str()}, x.view, w.view, y.view, {.bias = bias.view});
              for (std::int64_t i = 0; i < m * c.n; ++i)
                ASSERT_EQ(y.get(i), expected.get(i))
                    << name << " n " << c.n << " k " << c.k << " group " << c.group << ' ' << rooftile::name(zeros)
                    << " bits " << bits << " m " << m << " index " << i;
            }
        }
}

TEST(W4A16, UnpackGivesBackEveryBit) {
  std::mt19937 rng(2);
  for (const Case& c : cases)
    for (const auto [bits, zeros] : kinds) {
      const Weight w = make_weight(c.n, c.k, bits, c.group, zeros, DType::f16, rng);
      Tensor codes(DType::u8, {c.n, c.k * bits / 8}), scales(DType::f16, {c.n, c.k / c.group}), offsets;
      if (zeros != W4Zeros::symmetric) offsets = Tensor(w.offsets.view.dtype, {c.n, c.k / c.group});
      w4_unpack({}, w.view, codes.view, scales.view, offsets.view);
      EXPECT_EQ(codes.bytes, w.codes.bytes);
      EXPECT_EQ(scales.bytes, w.scales.bytes);
      EXPECT_EQ(offsets.bytes, w.offsets.bytes);
    }
}

TEST(W4A16, QuantizedWeightIsWithinHalfAStep) {
  std::mt19937 rng(3);
  std::normal_distribution<float> normal;
  for (const Case& c : cases)
    for (const auto [bits, zeros] : kinds) {
      if (zeros == W4Zeros::integer) continue;  // nothing rounds to these
      Tensor x(DType::f32, {c.n, c.k}), back(DType::f32, {c.n, c.k});
      for (std::int64_t i = 0; i < c.n * c.k; ++i) x.set(i, normal(rng));
      Weight w = make_weight(c.n, c.k, bits, c.group, zeros, DType::f16, rng);
      w4_quantize({}, x.view, bits, c.group, zeros, w.codes.view, w.scales.view, w.offsets.view);
      w4_pack({}, w.codes.view, w.scales.view, w.offsets.view, zeros, bits, c.group, w.kernel_codes.view,
              w.kernel_scales.view, w.kernel_offsets.view);
      w4_dequantize({}, w.view, back.view);
      for (std::int64_t i = 0; i < c.n * c.k; ++i) {
        const float scale = w.scales.get(i / c.group);
        ASSERT_LE(std::abs(back.get(i) - x.get(i)), 0.51f * scale + (bits == 4 ? 0.01f : 0.001f)) << "index " << i;
      }
    }
}

TEST(W4A16, WrongKernelTensorsAreRefused) {
  std::mt19937 rng(4);
  const Weight w = make_weight(17, 96, 4, 32, W4Zeros::minima, DType::f16, rng);
  const auto view = [&](int group, const TensorView& codes, const TensorView& scales, const TensorView& offsets) {
    return w4_view(17, 96, 4, group, W4Zeros::minima, DType::f16, codes, scales, offsets, {});
  };
  const Tensor small(DType::u8, {4});
  EXPECT_NO_THROW(view(32, w.kernel_codes.view, w.kernel_scales.view, w.kernel_offsets.view));
  EXPECT_THROW(view(32, small.view, w.kernel_scales.view, w.kernel_offsets.view), Error);
  EXPECT_THROW(view(32, w.kernel_codes.view, small.view, w.kernel_offsets.view), Error);
  EXPECT_THROW(view(32, w.kernel_codes.view, w.kernel_scales.view, small.view), Error);
  EXPECT_THROW(view(32, w.kernel_codes.view, w.kernel_scales.view, {}), Error);
  EXPECT_THROW(view(64, w.kernel_codes.view, w.kernel_scales.view, w.kernel_offsets.view), Error);
  EXPECT_THROW(view(48, w.kernel_codes.view, w.kernel_scales.view, w.kernel_offsets.view), Error);
  EXPECT_THROW(w4_sizes("test", 17, 96, 8, 32, W4Zeros::minima), Error);
  EXPECT_THROW(w4_sizes("test", 17, 96, 5, 32, W4Zeros::symmetric), Error);
}

TEST(W4A16, AWeightOfOtherBitsIsRefused) {
  std::mt19937 rng(5);
  const Weight four = make_weight(16, 64, 4, 32, W4Zeros::symmetric, DType::f16, rng),
               eight = make_weight(16, 64, 8, 32, W4Zeros::symmetric, DType::f16, rng);
  const Tensor x(DType::f32, {1, 64}), y(DType::f32, {1, 16});
  EXPECT_NO_THROW(w8a16_matmul({}, x.view, eight.view, y.view));
  EXPECT_THROW(w4a16_matmul({}, x.view, eight.view, y.view), Error);
  EXPECT_THROW(w8a16_matmul({}, x.view, four.view, y.view), Error);
  EXPECT_THROW(w4a16_workspace({}, x.view, eight.view), Error);
  EXPECT_THROW(w8a16_workspace({}, x.view, four.view), Error);
}

}  // namespace
}  // namespace rooftile
