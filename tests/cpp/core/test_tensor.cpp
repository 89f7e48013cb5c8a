// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>

#include "rooftile/tensor.h"

namespace rooftile {
namespace {

TensorView expanded(std::initializer_list<std::int64_t> shape) {  // strides 0: a shape costs nothing to claim
  TensorView t;
  t.ndim = 0;
  for (std::int64_t n : shape) t.shape[t.ndim++] = n;
  return t;
}

TEST(TensorView, CountsElements) {
  EXPECT_EQ(TensorView{}.numel(), 0);
  EXPECT_EQ(expanded({}).numel(), 1);
  EXPECT_EQ(expanded({2, 3, 5}).numel(), 30);
  EXPECT_EQ(expanded({2, 3, 5}).rows(), 6);
  EXPECT_EQ(expanded({2, 0, 5}).numel(), 0);
}

TEST(TensorView, CountsStopAtTheLargestNumber) {
  constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max(), huge = std::int64_t{1} << 62;
  EXPECT_EQ(expanded({most}).numel(), most);
  EXPECT_EQ(expanded({huge, 4}).numel(), most);  // 2^64: a product of 64 bits would be 0, "nothing to do"
  EXPECT_EQ(expanded({huge, 4, 7}).rows(), most);
  EXPECT_EQ(expanded({1 << 30, 1 << 30, 1 << 30, 3}).numel(), most);
  EXPECT_EQ(expanded({huge, huge, 0}).numel(), 0);
  EXPECT_EQ(expanded({0, huge, huge}).numel(), 0);
}

}  // namespace
}  // namespace rooftile
