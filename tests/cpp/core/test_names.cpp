// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "rooftile/names.h"

namespace rooftile {
namespace {

std::string meant(const char* given, const std::vector<std::string>& known) { return did_you_mean(given, known); }

TEST(DidYouMean, TheNameWithTheMostLettersInOrder) {
  EXPECT_EQ(meant("symmetrik", {"integer", "symmetric", "minima"}), ", did you mean \"symmetric\"?");
  EXPECT_EQ(meant("fp61", {"int8", "fp8", "fp16"}), ", did you mean \"fp16\"?");
  EXPECT_EQ(meant("bfloat61", {"float32", "float16", "bfloat16"}), ", did you mean \"bfloat16\"?");
}

TEST(DidYouMean, ALongerNameThatHoldsAsManyIsNotNearer) {
  EXPECT_EQ(meant("int4-kivy", {"int4-kivi", "int4-kivi-sym"}), ", did you mean \"int4-kivi\"?");
  EXPECT_EQ(meant("int4-kivy", {"int4-kivi-sym", "int4-kivi"}), ", did you mean \"int4-kivi\"?");
  EXPECT_EQ(meant("int9", {"int8", "int4"}), ", did you mean \"int8\"?");  // of equals the first
}

TEST(DidYouMean, CapitalLettersAreTheSame) {
  EXPECT_EQ(meant("INT8", {"fp8", "int8"}), ", did you mean \"int8\"?");
  EXPECT_EQ(meant("layers.Q", {"layers.K", "Layers.q"}), ", did you mean \"Layers.q\"?");
}

TEST(DidYouMean, NothingWhereNothingIsNear) {
  EXPECT_EQ(meant("zzz", {"int8", "int4"}), "");
  EXPECT_EQ(meant("", {"int8"}), "");
  EXPECT_EQ(meant("8tni", {"int8"}), "");  // letters in another order
  EXPECT_EQ(meant("int8", {}), "");
  EXPECT_EQ(meant(std::string(100000, 'a').c_str(), {"aaaa"}), "");
}

}  // namespace
}  // namespace rooftile
