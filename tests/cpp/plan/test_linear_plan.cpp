// SPDX-License-Identifier: Apache-2.0
// What any plan of a 16-bit product must be, over many problems: every step of K in exactly one chunk, no more warps
// and shared memory than a CTA has, a workspace bounded by the device, for few tokens nothing that a bit depends on
// taken from m.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "kernels/gemm/plan.h"
#include "support/plans.h"

namespace rooftile::gpu {
namespace {

constexpr std::int64_t rows[] = {1, 2, 7, 8, 9, 16, 17, 32, 64, 65, 128, 300, 1024, 4096};
struct Weight {
  std::int64_t n, k;
};
constexpr Weight weights[] = {{1, 1},        {0, 64},        {5, 50},      {3, 0},       {192, 576},
                              {64, 16384},   {1024, 4096},   {4096, 4096}, {6144, 4096}, {14336, 4096},
                              {4096, 14336}, {128256, 4096}, {17, 100000}};

template <class F>
void for_each_problem(F&& f) {
  for (const Weight& w : weights)
    for (std::int64_t m : rows)
      for (int sms : {1, 46, 108, 132})
        for (int aligned : {0, 1, 2})
          for (bool wgmma : {false, true}) {
            const GemmProblem p{.m = m,
                                .n = w.n,
                                .k = w.k,
                                .sms = sms,
                                .hopper = wgmma,
                                .aligned_operands = aligned > 0,
                                .aligned_all = aligned > 1};
            SCOPED_TRACE(testing::Message() << "m " << m << " n " << w.n << " k " << w.k << " sms " << sms
                                            << (p.aligned_operands ? " aligned operands" : "")
                                            << (p.aligned_all ? " all aligned" : "") << (wgmma ? " wgmma" : ""));
            f(p, plan_gemm(p));
          }
}

TEST(LinearPlan, WhoRuns) {
  for_each_problem([](const GemmProblem& p, const GemmPlan& plan) {
    const auto hopper = p.aligned_all && p.m > 64 ? GemmPath::collective
                        : p.aligned_operands      ? GemmPath::tma
                                                  : GemmPath::stream;
    const auto other = p.aligned_all && p.m > 16 ? GemmPath::multistage : GemmPath::stream;
    EXPECT_EQ(plan.path, p.hopper ? hopper : other);
    EXPECT_STRNE(plan.why, "");
  });
}

TEST(LinearPlan, TmaTilesCoverTheProblemWithinTheDevice) {
  for_each_problem([](const GemmProblem& p, const GemmPlan& plan) {
    if (plan.path != GemmPath::tma) return;
    const std::int64_t steps = (p.k + linear_tma_step_k - 1) / linear_tma_step_k;
    const int tokens = linear_tma_block_m[plan.config];
    EXPECT_GE(plan.n_blocks * plan.tma_rows, p.n);
    EXPECT_LT((plan.n_blocks - 1) * plan.tma_rows, p.n);
    EXPECT_GE(plan.m_blocks * tokens, p.m);
    EXPECT_LT((plan.m_blocks - 1) * tokens, p.m);
    EXPECT_TRUE(plan.config == 0 || p.m > linear_tma_block_m[plan.config - 1]);
    EXPECT_GE(plan.cluster * plan.split_steps, steps);
    EXPECT_LE((plan.cluster - 1) * plan.split_steps, steps);  // the last chunk may have nothing to read, but no less
    EXPECT_TRUE(plan.tma_rows <= linear_tma_max_rows &&
                plan.tma_rows % (8 * plan.cluster) == 0);  // eight rows have one CTA that finishes them
    // Tensor cores read 64 rows at a time, within the CTA's shared memory; sums take the ring's place.
    const int stage = linear_tma_tiles_per_step * linear_tma_tile_bytes(plan.tma_rows + tokens),
              w = linear_tma_tiles_per_step * linear_tma_tile_bytes(plan.tma_rows),
              read = linear_tma_tile_bytes((plan.tma_rows + 63) / 64 * 64);
    EXPECT_GE(plan.shared_bytes,
              static_cast<std::size_t>((plan.stages - 1) * stage + w - linear_tma_tile_bytes(plan.tma_rows) + read));
    EXPECT_GE(plan.shared_bytes, static_cast<std::size_t>(plan.stages * (stage + 16)));
    EXPECT_GE(plan.stages * stage,
              plan.cluster * tokens * (plan.tma_rows / plan.cluster + 4) * static_cast<int>(sizeof(float)));
    const bool one_each = plan.n_blocks * plan.cluster * plan.m_blocks <= p.sms;
    EXPECT_TRUE(one_each ? plan.split_steps <= 16 || plan.shared_bytes > 113u * 1024
                         : plan.shared_bytes <= 113u * 1024);  // or two CTAs fit
    EXPECT_GE(plan.stages, one_each ? 3 : 2);
    EXPECT_LE(plan.shared_bytes, 227u * 1024);
    EXPECT_EQ(plan.workspace_bytes, 0u);
    const GemmPlan one = plan_gemm({.m = 1,
                                    .n = p.n,
                                    .k = p.k,
                                    .sms = p.sms,
                                    .hopper = true,
                                    .aligned_operands = true,
                                    .aligned_all = p.aligned_all});
    EXPECT_EQ(std::tuple(one.cluster, one.split_steps), std::tuple(plan.cluster, plan.split_steps));
  });
}

TEST(LinearPlan, AStreamCoversTheProblemWithinTheDevice) {
  for_each_problem([](const GemmProblem& p, const GemmPlan& plan) {
    if (plan.path != GemmPath::stream) return;
    const std::int64_t steps = (p.k + linear_step_k - 1) / linear_step_k, warps = plan.row_tiles << plan.slices_log2;
    EXPECT_GE(plan.n_blocks * plan.row_tiles * linear_rows, p.n);
    EXPECT_LT((plan.n_blocks - 1) * plan.row_tiles * linear_rows, p.n);
    EXPECT_GE(plan.m_blocks * linear_stream_tokens, p.m);
    EXPECT_GE(std::int64_t{plan.splits} * plan.split_steps, steps);
    EXPECT_TRUE(plan.splits == 1 || (plan.splits - 1) * plan.split_steps < steps);
    EXPECT_TRUE(warps >= 1 && warps <= linear_warps);
    EXPECT_TRUE(plan.config == 1 || p.m <= 8);
    EXPECT_EQ(plan.shared_bytes, static_cast<std::size_t>(warps * linear_stages * linear_step_bytes));
    EXPECT_LE(plan.shared_bytes, 99u * 1024);
    EXPECT_LE(16 * linear_rows * static_cast<int>(sizeof(float)),
              linear_stages * linear_step_bytes);  // a warp's sums take its ring's place
    EXPECT_EQ(plan.workspace_bytes == 0, plan.splits == 1);
    EXPECT_LE(plan.workspace_bytes,
              static_cast<std::size_t>(2 * p.sms) * linear_warps * linear_rows * linear_stream_tokens * sizeof(float));
    EXPECT_TRUE(plan.splits == 1 || p.m <= linear_stream_tokens);
  });
}

TEST(LinearPlan, UpToSixteenStreamedTokensTheOrderOfASumIsOne) {
  for_each_problem([](GemmProblem p, const GemmPlan&) {
    const auto order = [&](std::int64_t m) {
      p.m = m;
      const GemmPlan plan = plan_gemm(p);
      return std::tuple(plan.slices_log2, plan.splits, plan.split_steps);
    };
    for (std::int64_t m : {2, 8, 9, 16}) EXPECT_EQ(order(1), order(m));
  });
}

TEST(LinearPlan, OneRowOfALargeWeightKeepsEverySmReading) {
  for (const auto& [n, k] : {Weight{4096, 4096}, {6144, 4096}, {14336, 4096}, {28672, 4096}, {4096, 14336}}) {
    const GemmPlan tma =
        plan_gemm({.m = 1, .n = n, .k = k, .sms = 132, .hopper = true, .aligned_operands = true, .aligned_all = true});
    const std::int64_t ctas = tma.n_blocks * tma.cluster, each = (ctas + 131) / 132;
    EXPECT_LE(each, 2);
    EXPECT_GE(static_cast<double>(n * tma.cluster), 0.94 * static_cast<double>(each * 132 * tma.tma_rows)) << n;
    EXPECT_GE(tma.stages * linear_tma_tiles_per_step * linear_tma_tile_bytes(tma.tma_rows), 64 * 1024);
    const GemmPlan plan = plan_gemm({.m = 1, .n = n, .k = k, .sms = 132, .aligned_all = true});
    const std::int64_t rounds = (plan.n_blocks + 131) / 132;
    EXPECT_EQ(plan.splits, 1);
    EXPECT_LE(rounds, 2);  // as many as run at once
    EXPECT_GE(static_cast<double>(n), 0.95 * static_cast<double>(rounds * 132 * plan.row_tiles * linear_rows)) << n;
    EXPECT_GE(plan.row_tiles << plan.slices_log2, 6);
  }
}

TEST(LinearPlan, CollectiveSplitsAreEqualWithinTheDeviceAndItsWorkspace) {
  for_each_problem([](GemmProblem p, const GemmPlan& plan) {
    if (plan.path != GemmPath::collective) return;
    const LinearTile tile = linear_collective_tiles[plan.config];
    EXPECT_EQ(plan.workspace_bytes == 0, plan.splits == 1);
    if (plan.splits > 1) {
      EXPECT_LE(p.m, linear_split_tokens);
      EXPECT_TRUE(linear_may_split(tile));
      EXPECT_EQ(p.k % (8 * plan.splits), 0);  // every split begins at a multiple of TMA's 16 bytes
      EXPECT_LE(linear_collective_ctas(tile, p.n, p.m) * plan.splits, p.sms);
      EXPECT_EQ(plan.workspace_bytes,
                sizeof(float) * static_cast<std::size_t>(plan.splits * p.m * ((p.n + 15) / 16 * 16)));
      EXPECT_LE(plan.workspace_bytes, static_cast<std::size_t>(p.sms * tile.rows * tile.tokens) * sizeof(float));
    }
    EXPECT_EQ(linear_collective_ctas(tile, p.n, p.m) % 2, 0);  // whole clusters
    // one plan for all of a bucket
    for (std::int64_t first : {65, 129})
      if (const std::int64_t last = (first + 127) / 128 * 128; first <= p.m && p.m <= last)
        for (std::int64_t m : {first, last}) {
          p.m = m;
          const GemmPlan other = plan_gemm(p);
          EXPECT_EQ(std::tuple(other.config, other.splits), std::tuple(plan.config, plan.splits));
        }
  });
}

TEST(LinearPlan, TilesFillTheLastWave) {
  struct Expected {
    std::int64_t m, n, k;
    int rows, tokens, splits;
  };
  for (const Expected& e : {Expected{65, 4096, 4096, 64, 128, 1},
                            {256, 4096, 4096, 64, 128, 1},
                            {128, 14336, 4096, 128, 128, 1},
                            {128, 4096, 14336, 64, 128, 2},
                            {256, 4096, 14336, 128, 128, 2},
                            {256, 14336, 4096, 224, 128, 1},
                            {1024, 6144, 4096, 192, 128, 1},
                            {1024, 14336, 4096, 224, 128, 1},
                            {1024, 4096, 4096, 128, 256, 1},
                            {4096, 14336, 4096, 128, 256, 1}}) {
    const GemmPlan plan = plan_gemm(
        {.m = e.m, .n = e.n, .k = e.k, .sms = 132, .hopper = true, .aligned_operands = true, .aligned_all = true});
    const LinearTile tile = linear_collective_tiles[plan.config];
    EXPECT_EQ(std::tuple(tile.rows, tile.tokens, plan.splits), std::tuple(e.rows, e.tokens, e.splits))
        << "m " << e.m << " n " << e.n << " k " << e.k;
  }
}

TEST(LinearPlan, APlanFitsItsProblemAndIsReadBackFromItsText) {
  for_each_problem([](const GemmProblem& p, const GemmPlan& plan) {
    ASSERT_EQ(check_plan(p, plan), "") << text(plan);
    const GemmPlan again = plan_gemm("op", p, text(plan).c_str());
    ASSERT_EQ(check_plan(p, again), "");
    ASSERT_EQ(text(again), text(plan));
    ASSERT_EQ(std::tuple(again.m_blocks, again.n_blocks, again.split_steps, again.shared_bytes, again.workspace_bytes),
              std::tuple(plan.m_blocks, plan.n_blocks, plan.split_steps, plan.shared_bytes, plan.workspace_bytes));
  });
}

// Another value of each field of a plan that fits is refused by the field's name.
TEST(LinearPlan, EveryWrongFieldIsNamed) {
  const auto refused = [](const GemmProblem& p, const char* field, auto GemmPlan::* member, auto value) {
    GemmPlan plan = plan_gemm(p);
    plan.*member = static_cast<std::remove_reference_t<decltype(plan.*member)>>(value);
    EXPECT_TRUE(check_plan(p, plan).starts_with(std::string(field) + " must")) << field << ": " << check_plan(p, plan);
  };
  const GemmProblem stream{.m = 1, .n = 64, .k = 16384, .sms = 132, .aligned_all = false};
  ASSERT_EQ(text(plan_gemm(stream)), "stream config=0 row_tiles=1 slices_log2=3 splits=5");
  for (int value : {-1, 2}) refused(stream, "config", &GemmPlan::config, value);
  for (int value : {0, 9, -1}) refused(stream, "row_tiles", &GemmPlan::row_tiles, value);
  refused(stream, "slices_log2", &GemmPlan::row_tiles, 8);  // 64 warps
  for (int value : {-1, 4, 30}) refused(stream, "slices_log2", &GemmPlan::slices_log2, value);
  for (int value : {0, -1, 17}) refused(stream, "splits", &GemmPlan::splits, value);
  GemmProblem other = stream;
  other.m = 9;
  refused(other, "config", &GemmPlan::config, 0);  // 8 tokens a CTA
  other.m = 17;
  refused(other, "splits", &GemmPlan::splits, 2);  // the workspace would grow with M
  other = stream;
  other.k = 64;
  refused(other, "splits", &GemmPlan::splits, 2);  // one step of K
  for (const auto path : {GemmPath::tma, GemmPath::collective, GemmPath::multistage})
    refused(stream, "path", &GemmPlan::path, path);
  refused(stream, "path", &GemmPlan::path, static_cast<GemmPath>(9));

  const GemmProblem tma{
      .m = 20, .n = 4096, .k = 4096, .sms = 132, .hopper = true, .aligned_operands = true, .aligned_all = true};
  ASSERT_EQ(plan_gemm(tma).path, GemmPath::tma);
  for (int value : {-1, 4}) refused(tma, "config", &GemmPlan::config, value);
  for (int value : {0, 8, 24, 144, -16}) refused(tma, "tma_rows", &GemmPlan::tma_rows, value);
  for (int value : {0, 3, 4}) refused(tma, "cluster", &GemmPlan::cluster, value);
  for (int value : {0, 1, 30, 65}) refused(tma, "stages", &GemmPlan::stages, value);
  refused(tma, "path", &GemmPlan::path, GemmPath::multistage);
  for (const GemmProblem& p : {stream, tma}) {
    refused(p, "m_blocks", &GemmPlan::m_blocks, 3);
    refused(p, "n_blocks", &GemmPlan::n_blocks, 3);
    refused(p, "split_steps", &GemmPlan::split_steps, 3);
    refused(p, "threads", &GemmPlan::threads, 31);
    refused(p, "shared_bytes", &GemmPlan::shared_bytes, 3);
    refused(p, "workspace_bytes", &GemmPlan::workspace_bytes, 3);
  }
  GemmProblem collective = tma;
  collective.m = 1024;
  for (int value : {-1, 5}) refused(collective, "config", &GemmPlan::config, value);
  refused(collective, "splits", &GemmPlan::splits, 2);  // more than 256 tokens
  collective.m = 128;
  collective.k = 14336;
  ASSERT_EQ(text(plan_gemm(collective)), "collective config=0 splits=2");
  for (int value : {0, -1, 17, 3, 5}) refused(collective, "splits", &GemmPlan::splits, value);  // 14336 = 2048 * 7
  for (int value : {1, 3, 4}) refused(collective, "splits", &GemmPlan::config, value);  // tiles that are not split
  refused(collective, "workspace_bytes", &GemmPlan::workspace_bytes, 3);
  collective.k = 4096 + 8;
  refused(collective, "splits", &GemmPlan::splits, 2);  // the second would begin at no multiple of 16 bytes
  collective.k = 64;
  refused(collective, "splits", &GemmPlan::splits, 2);  // half a step of K
}

TEST(LinearPlan, AForcedPlanIsOneThatFits) {
  GemmProblem p{
      .m = 3, .n = 4096, .k = 4096, .sms = 132, .hopper = true, .aligned_operands = true, .aligned_all = true};
  const GemmPlan plan = plan_gemm("op", p, " stream splits=4  config=1 slices_log2=1 row_tiles=2 ");
  EXPECT_EQ(std::tuple(plan.path, plan.config, plan.row_tiles, plan.slices_log2, plan.splits, plan.split_steps),
            std::tuple(GemmPath::stream, 1, 2, 1, 4, 16));
  EXPECT_STREQ(plan.why, "forced by plan=");
  EXPECT_EQ(plan_gemm("op", p, "collective config=1 splits=1").config, 1);  // fewer tokens than it is chosen for
  EXPECT_EQ(plan_gemm("op", p, "collective splits=4 config=2").workspace_bytes, 4u * 4 * 3 * 4096);
  for (int m : {1, 64, 65, 300})  // every tile of every path, at every M
    for (int config : {0, 1, 2, 3}) {
      p.m = m;
      EXPECT_EQ(
          plan_gemm("op", p, ("tma tma_rows=64 cluster=2 stages=4 config=" + std::to_string(config)).c_str()).m_blocks,
          (m + linear_tma_block_m[config] - 1) / linear_tma_block_m[config]);
      EXPECT_EQ(plan_gemm("op", p, ("collective splits=1 config=" + std::to_string(config + 1)).c_str()).config,
                config + 1);
    }
  p.m = 3;
  const auto error = [&](const char* text) { return support::error_of([&] { plan_gemm("op", p, text); }); };
  EXPECT_EQ(
      error("tma config=9 tma_rows=64 cluster=2 stages=4"),
      "value: op: plan \"tma config=9 tma_rows=64 cluster=2 stages=4\" does not fit this call: config must be 0 to "
      "3, got 9");
  EXPECT_EQ(error("avx512").substr(0, 62), "not_supported: op: plan \"avx512\" is no plan of the GPU kernels");
  EXPECT_EQ(error("collective"),
            "value: op: plan \"collective\" must read \"collective config= splits=\", got no config");
  EXPECT_EQ(
      error("collective config=1 config=1"),
      "value: op: plan \"collective config=1 config=1\" must read \"collective config= splits=\", got config twice");
  EXPECT_EQ(error("collective depth=1"),
            "value: op: plan \"collective depth=1\" must read \"collective config= splits=\", got depth");
  for (const char* number : {"", "x", "1x", "99999999999", "=", " "})
    EXPECT_EQ(error((std::string("collective config=") + number).c_str()).substr(0, 28),
              "value: op: plan \"collective ");
  EXPECT_EQ(error("").substr(0, 24), "not_supported: op: plan ");
  const std::string longest(120, 'x'), cut = '"' + longest + "...\" (100000 bytes)";
  EXPECT_EQ(error(longest.c_str()).substr(24, 129), '"' + longest + "\" is no ");
  EXPECT_EQ(error(std::string(100000, 'x').c_str()).substr(24, cut.size()), cut);
  for (const std::string character : {"\u00e9", "\u20ac", "\U0001f642"})  // of 2, 3 and 4 bytes
    for (std::size_t before = 110; before <= 120; ++before) {
      std::string text(before, 'x');
      for (int i = 0; i < 40; ++i) text += character;
      const std::string shown = error(text.c_str()).substr(25 + before);
      EXPECT_EQ(shown.substr(0, shown.find('.')).size() % character.size(), 0u);
    }
  EXPECT_LT(error(("collective config=" + std::string(100000, '1')).c_str()).size(), 600u);
  EXPECT_LT(error(("collective " + std::string(100000, 'x')).c_str()).size(), 600u);
}

// The examples that the comments of plan.cpp work through.
TEST(LinearPlan, WorkedExamples) {
  const auto plan = [](std::int64_t m, std::int64_t n, std::int64_t k, bool wgmma) {
    return text(plan_gemm(
        {.m = m, .n = n, .k = k, .sms = 132, .hopper = wgmma, .aligned_operands = true, .aligned_all = true}));
  };
  EXPECT_EQ(plan(1, 1024, 4096, false), "stream config=0 row_tiles=1 slices_log2=3 splits=1");
  EXPECT_EQ(plan(1, 4096, 4096, false), "stream config=0 row_tiles=2 slices_log2=2 splits=1");
  EXPECT_EQ(plan(1, 4096, 4096, true), "tma config=0 tma_rows=64 cluster=2 stages=6");
  EXPECT_EQ(plan(1024, 14336, 4096, true), "collective config=4 splits=1");
  EXPECT_EQ(plan(128, 4096, 14336, true), "collective config=0 splits=2");
}

}  // namespace
}  // namespace rooftile::gpu
