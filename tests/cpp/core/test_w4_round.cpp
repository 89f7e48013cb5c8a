// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "core/w4_round.h"

namespace rooftile {
namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

TEST(W4Round, FiniteValuesStayFiniteAndInfiniteOnesInfinite) {
  for (DType t : {DType::f16, DType::bf16}) {
    const float largest = t == DType::f16 ? 65504.0f : 0x1.fep+127f;
    EXPECT_EQ(w4_stored(infinity, t), infinity);
    EXPECT_EQ(w4_stored(-infinity, t), -infinity);
    EXPECT_EQ(w4_stored(std::numeric_limits<float>::max(), t), largest);
    EXPECT_EQ(w4_stored(-std::numeric_limits<float>::max(), t), -largest);
    EXPECT_EQ(w4_stored(-0.375f, t), -0.375f);
    EXPECT_TRUE(std::isnan(w4_stored(NAN, t)));
  }
  EXPECT_EQ(w4_stored(1.0f + 0x1p-12f, DType::f16), 1.0f);  // ties and less go to the even neighbour
  EXPECT_EQ(w4_stored(1.0f + 0x1p-8f, DType::bf16), 1.0f);
}

TEST(W4Round, APositiveScaleNeverBecomesZero) {
  EXPECT_EQ(w4_stored_scale(1e-20f, DType::f16, false), 0x1p-24f);
  EXPECT_EQ(w4_stored_scale(0x1p-140f, DType::bf16, false), 0x1p-133f);
  EXPECT_EQ(w4_stored_scale(0.0f, DType::f16, false), 0.0f);
  EXPECT_FALSE(std::signbit(w4_stored_scale(0.0f, DType::f16, false)));
}

TEST(W4Round, FifteenOfTheLargestScaleAboveAMinimumAreFinite) {
  EXPECT_EQ(w4_stored_scale(infinity, DType::f16, true), 65504.0f);
  EXPECT_EQ(w4_stored_scale(infinity, DType::bf16, true), 0x1.1p+124f);
  EXPECT_TRUE(std::isfinite(15.0f * w4_stored_scale(infinity, DType::bf16, true)));
  EXPECT_EQ(w4_stored_scale(infinity, DType::bf16, false), 0x1.fep+127f);
}

TEST(W4Round, CodesOfAGroupByHand) {
  const W4Group minima = W4Group::of(-2.0f, 5.5f, true, true, 4, DType::f16);  // scale 0.5 above -2
  EXPECT_EQ(minima.scale, 0.5f);
  EXPECT_EQ(minima.minimum, -2.0f);
  EXPECT_EQ(minima.code(-2.0f), 0);
  EXPECT_EQ(minima.code(5.5f), 15);
  EXPECT_EQ(minima.code(-1.75f), 0);  // half a step: to the even code
  EXPECT_EQ(minima.code(-1.25f), 2);
  EXPECT_EQ(minima.code(9.0f), 15);
  const W4Group symmetric = W4Group::of(-3.5f, 1.0f, true, false, 4, DType::f16);  // scale 0.5 around code 8
  EXPECT_EQ(symmetric.scale, 0.5f);
  EXPECT_EQ(symmetric.minimum, 0.0f);
  EXPECT_EQ(symmetric.code(-3.5f), 1);
  EXPECT_EQ(symmetric.code(0.0f), 8);
  EXPECT_EQ(symmetric.code(1.0f), 10);
  EXPECT_EQ(W4Group::of(-127.0f, 3.0f, true, false, 8, DType::f16).code(-127.0f), 1);
  EXPECT_EQ(W4Group::of(0.0f, 0.0f, true, false, 4, DType::f16).code(0.0f), 8);
  EXPECT_EQ(W4Group::of(0.0f, 0.0f, true, true, 4, DType::f16).code(0.0f), 0);
  EXPECT_TRUE(std::isnan(W4Group::of(0.0f, infinity, false, true, 4, DType::f16).scale));
  EXPECT_EQ(W4Group::of(0.0f, infinity, false, true, 4, DType::f16).code(1.0f), 0);
  EXPECT_EQ(W4Group::of(0.0f, infinity, false, false, 4, DType::f16).code(1.0f), 8);
}

}  // namespace
}  // namespace rooftile
