// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <string>

#include "core/kernel_name.h"

namespace rooftile {
namespace {

TEST(KernelName, IsItsPartsOneAfterAnother) {
  EXPECT_STREQ(kernel_name("cuda_", "float16", "_w", 4, "g", 128L, "", "_t", 16).text, "cuda_float16_w4g128_t16");
  EXPECT_STREQ(kernel_name(-7, "x", 0).text, "-7x0");
}

TEST(KernelName, EndsWhereItsRoomEnds) {
  const std::string most(sizeof KernelName::text - 1, 'a');
  EXPECT_EQ(kernel_name((most + "b").c_str(), "c", 5).text, most);
  EXPECT_EQ(kernel_name(most.substr(3).c_str(), 12345).text, most.substr(3) + "123");
}

}  // namespace
}  // namespace rooftile
