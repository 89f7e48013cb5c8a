// SPDX-License-Identifier: Apache-2.0
// What any plan of append must be, over many problems: a power of two of CTAs for an entry, one cluster exactly where a
// cluster can hold them, no more CTAs than work or device, and the worked example of plan.h.
#include <gtest/gtest.h>

#include <bit>
#include <string>

#include "kernels/kv_cache/params.h"
#include "kernels/kv_cache/plan.h"
#include "rooftile/error.h"

namespace rooftile::gpu {
namespace {

template <class F>
void for_each_problem(F&& f) {
  for (std::int64_t batch : {1, 2, 3, 7, 64, 1000, 100000})
    for (std::int64_t tokens : {1, 2, 31, 32, 33, 64, 500, 8192})
      for (std::int64_t kv_heads : {1, 3, 8, 64})
        for (std::int64_t q_heads : {0, 1, 32})
          for (int head_dim : {1, 64, 128, 512})
            for (bool kivi : {false, true})
              for (std::int64_t sms : {1, 46, 108, 132})
                for (std::int64_t cluster : {1, 8}) {
                  const AppendProblem p{batch, tokens, kv_heads, q_heads, head_dim, kivi};
                  SCOPED_TRACE(testing::Message() << "batch " << batch << " tokens " << tokens << " kv_heads "
                                                  << kv_heads << " q_heads " << q_heads << " head_dim " << head_dim
                                                  << (kivi ? " kivi" : "") << " sms " << sms << " cluster " << cluster);
                  f(p, AppendDevice{sms, cluster});
                }
}

TEST(AppendPlan, ItsCtasFitTheWorkTheDeviceAndTheCluster) {
  for_each_problem([](const AppendProblem& p, const AppendDevice& device) {
    const AppendPlan plan = plan_append("op", p, device, nullptr);
    const std::int64_t ctas = plan.entry_ctas;
    ASSERT_TRUE(ctas > 0 && std::has_single_bit(static_cast<std::uint64_t>(ctas)));
    ASSERT_EQ(plan.cluster_size, ctas <= device.largest_cluster ? ctas : 1);
    ASSERT_EQ(plan.is_one_launch(), ctas <= device.largest_cluster);
    ASSERT_STRNE(plan.why, "");
    // rounded up to a power of two within a cluster alone
    const std::int64_t fill = (8 * device.sms + p.batch - 1) / p.batch;
    ASSERT_LE(ctas, plan.is_one_launch() ? 2 * fill - 1 : fill);
    // a slice of a closing group is at most a warp's
    const std::int64_t slices = p.kv_heads * (append_slices(false, p.head_dim) + append_slices(true, p.head_dim)),
                       warps = append_work_tiles(p) + (p.kivi && p.tokens <= kv_group ? slices : 0);
    ASSERT_LT((ctas / 2) * append_warps, warps);
    // work of two rounds of a cluster needs no second launch
    if (append_work_tiles(p) <= 2 * device.largest_cluster * append_warps) { ASSERT_TRUE(plan.is_one_launch()); }
  });
}

TEST(AppendPlan, WorkTilesAreTokensGroupsAndPairsOfHeadsOfQ) {
  EXPECT_EQ(append_work_tiles({.batch = 1, .tokens = 5, .kv_heads = 8}), 5 * 2 * 8);
  EXPECT_EQ(append_work_tiles({.batch = 1, .tokens = 5, .kv_heads = 8, .q_heads = 33}), 5 * (2 * 8 + 17));
  // one token touches one group, two tokens up to two, 34 tokens up to three
  EXPECT_EQ(append_work_tiles({.batch = 1, .tokens = 1, .kv_heads = 8, .kivi = true}), 1 * 2 * 8);
  EXPECT_EQ(append_work_tiles({.batch = 1, .tokens = 2, .kv_heads = 8, .kivi = true}), 2 * 2 * 8);
  EXPECT_EQ(append_work_tiles({.batch = 1, .tokens = 33, .kv_heads = 8, .kivi = true}), 2 * 2 * 8);
  EXPECT_EQ(append_work_tiles({.batch = 1, .tokens = 34, .kv_heads = 8, .kivi = true}), 3 * 2 * 8);
}

TEST(AppendPlan, TheExampleOfItsHeader) {
  constexpr AppendDevice hopper{.sms = 132, .largest_cluster = 8};
  const AppendPlan step = plan_append({.batch = 4, .tokens = 1, .kv_heads = 8, .head_dim = 128}, hopper);
  EXPECT_EQ(text(step), "append entry_ctas=2 cluster_size=2");
  const AppendPlan prompt = plan_append({.batch = 1, .tokens = 2048, .kv_heads = 8, .head_dim = 128}, hopper);
  EXPECT_EQ(text(prompt), "append entry_ctas=1024 cluster_size=1");
  // without clusters every CTA stands alone
  EXPECT_TRUE(plan_append({.batch = 1, .tokens = 1, .kv_heads = 4, .head_dim = 128}, {132, 1}).is_one_launch());
  EXPECT_FALSE(plan_append({.batch = 1, .tokens = 64, .kv_heads = 4, .head_dim = 128}, {132, 1}).is_one_launch());
}

TEST(AppendPlan, TheTextOfAPlanIsThatPlan) {
  for_each_problem([](const AppendProblem& p, const AppendDevice& device) {
    const AppendPlan plan = plan_append(p, device), forced = plan_append("op", p, device, text(plan).c_str());
    ASSERT_EQ(forced.entry_ctas, plan.entry_ctas);
    ASSERT_EQ(forced.cluster_size, plan.cluster_size);
  });
}

TEST(AppendPlan, APlanThatDoesNotFitIsRefusedByItsField) {
  constexpr AppendProblem problem{.batch = 1, .tokens = 1, .kv_heads = 8, .head_dim = 128};
  const auto refused = [&](const char* plan, const char* says, AppendDevice device = {132, 8}) {
    try {
      plan_append("append", problem, device, plan);
      ADD_FAILURE() << plan;
    } catch (const Error& e) { EXPECT_NE(std::string(e.what()).find(says), std::string::npos) << e.what(); }
  };
  refused("append entry_ctas=3 cluster_size=1", "entry_ctas must be a power of two, got 3");
  refused("append entry_ctas=0 cluster_size=1", "entry_ctas must be 1 to 1056, got 0");
  refused("append entry_ctas=2048 cluster_size=1", "entry_ctas must be 1 to 1056, got 2048");
  refused("append entry_ctas=4 cluster_size=2", "cluster_size must be 1 or entry_ctas = 4, got 2");
  refused("append entry_ctas=16 cluster_size=16", "cluster_size must be 1 to 8, got 16");
  refused("append entry_ctas=2 cluster_size=2", "cluster_size must be 1 to 1, got 2", {108, 1});
  refused("append entry_ctas=2", "got no cluster_size");
  refused("avx2", "is no plan of the GPU kernels");
  EXPECT_EQ(plan_append("append", problem, {132, 8}, "append entry_ctas=8 cluster_size=1").entry_ctas, 8);
}

TEST(AppendPlan, MoreWorkThanIsCountedIsRefused) {
  EXPECT_THROW(plan_append("append", {.batch = 1, .tokens = 1 << 29, .kv_heads = 8}, {132, 8}, nullptr), Error);
}

TEST(AppendPlan, NothingToAppendHasAPlan) {
  for (const AppendProblem& p : {AppendProblem{.tokens = 3, .kv_heads = 1}, AppendProblem{.batch = 3, .kv_heads = 1}})
    EXPECT_EQ(text(plan_append(p, {132, 8})), "append entry_ctas=1 cluster_size=1");
}

}  // namespace
}  // namespace rooftile::gpu
