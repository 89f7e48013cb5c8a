// SPDX-License-Identifier: Apache-2.0
// Machine code runs on its own major version from its minor on, "a" code on one GPU alone, PTX on everything newer.
#include <gtest/gtest.h>

#include "kernels/targets.h"

namespace rooftile::gpu {
namespace {

struct Gpu {
  int major, minor;
};
constexpr Gpu gpus[] = {{7, 0}, {7, 5}, {8, 0}, {8, 6}, {8, 7}, {8, 9}, {9, 0}, {10, 0}, {10, 3}, {12, 0}, {12, 1}};

// The capabilities of `gpus` that run a build for these targets.
std::string run_by(const char* targets) {
  std::string all;
  for (const auto [major, minor] : gpus)
    if (!refusal(targets, major, minor))
      (all += std::to_string(major)).append(".").append(std::to_string(minor)).append(" ");
  if (!all.empty()) all.pop_back();
  return all;
}

TEST(Targets, WhoRunsABuild) {
  EXPECT_EQ(run_by("sm_80, compute_80, sm_90a"), "8.0 8.6 8.7 8.9 9.0 10.0 10.3 12.0 12.1");
  EXPECT_EQ(run_by("sm_80, sm_90a"), "8.0 8.6 8.7 8.9 9.0");
  EXPECT_EQ(run_by("sm_90a"), "9.0");
  EXPECT_EQ(run_by("compute_90a"), "9.0");
  EXPECT_EQ(run_by("sm_86"), "8.6 8.7 8.9");
  EXPECT_EQ(run_by("sm_86, compute_86"), "8.6 8.7 8.9 9.0 10.0 10.3 12.0 12.1");
  EXPECT_EQ(run_by("sm_100"), "10.0 10.3");
  EXPECT_EQ(run_by("sm_100a, sm_120a"), "10.0 12.0");
  EXPECT_EQ(run_by(""), "");
}

TEST(Targets, WhetherHopperHasCodeOfItsOwn) {
  for (const char* targets : {"sm_80, compute_80, sm_90a", "sm_90a", "compute_90a"})
    EXPECT_TRUE(built_for_hopper(targets)) << targets;
  for (const char* targets : {"", "sm_80, compute_80", "compute_80", "sm_90, compute_90", "sm_100a"})
    EXPECT_FALSE(built_for_hopper(targets)) << targets;
}

TEST(Targets, ARefusalNamesTheGpuAndTheBuild) {
  EXPECT_EQ(refusal("sm_90a", 8, 6),
            "has compute capability 8.6, which runs none of what this build is compiled for: sm_90a");
}

}  // namespace
}  // namespace rooftile::gpu
