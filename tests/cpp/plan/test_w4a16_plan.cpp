// SPDX-License-Identifier: Apache-2.0
// What any plan of a product with a weight of 4 or 8 bits must be, over many problems: every tile of K in exactly one K
// split, splits that start at a scale block, shared memory that every supported GPU has, a workspace bounded by the
// device, bits that depend on m through its bucket only.
#include <gtest/gtest.h>

#include <algorithm>
#include <tuple>

#include "core/w4_layout.h"
#include "kernels/gemm/plan.h"
#include "support/plans.h"

namespace rooftile::gpu {
namespace {

constexpr std::int64_t rows[] = {1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 300, 4096};
struct Weight {
  std::int64_t n, k;
};
constexpr Weight weights[] = {{1, 32},       {5, 50},       {192, 576},   {1024, 4096}, {4096, 4096},
                              {14336, 4096}, {4096, 14336}, {17, 100000}, {28600, 4096}};

template <class F>
void for_each_problem(F&& f) {
  for (const Weight& w : weights)
    for (std::int64_t m : rows)
      for (int group : {32, 64, 128, static_cast<int>(w.k)})
        for (int sms : {1, 46, 108, 132})
          for (int bits : {4, 8})
            if (w.k % group == 0) f(GemmProblem{.m = m, .n = w.n, .k = w.k, .bits = bits, .group = group, .sms = sms});
}

// Problems for wgmma_codes.cuh, with and without a gathered x, and with more tokens than are gathered at once.
template <class F>
void for_each_wgmma_problem(F&& f) {
  for_each_problem([&](GemmProblem p) {
    p.hopper = true;
    for (const std::int64_t m : {p.m, 11 * p.m})
      for (const bool copy : {false, true})
        for (const bool minima : {false, true}) {
          if (minima && p.bits == 8) continue;
          p.m = m;
          p.aligned_operands = !copy;
          p.zeros = minima ? W4Zeros::minima : W4Zeros::symmetric;
          f(p);
        }
  });
}

TEST(W4Plan, CoversTheProblemWithinTheDevice) {
  for_each_problem([](GemmProblem p) {
    for (int options = 0; options < 8; ++options) {
      p.batch_invariant = options & 1;
      p.hopper = options & 2;
      p.gated = options & 4 && p.n % 2 == 0;
      const std::int64_t outputs = p.gated ? p.n / 2 : p.n;
      const bool separate = p.gated && outputs % w4_tile_n != 0;
      const GemmPlan plan = plan_gemm(p);
      if (plan.path != GemmPath::codes_stream) continue;
      const W4StreamConfig config = w4_stream_config(p.bits, plan.config);
      const std::int64_t steps = (w4_tiles_k(p.k) + 1) / 2, split_steps = plan.split_steps;
      SCOPED_TRACE(testing::Message() << "m " << p.m << " n " << p.n << " k " << p.k << " group " << p.group << " sms "
                                      << p.sms << " bits " << p.bits);
      EXPECT_GE(plan.splits * split_steps, steps);
      EXPECT_LT((plan.splits - 1) * split_steps, steps);
      EXPECT_EQ(w4_step_k % plan.scale_k, 0);
      EXPECT_TRUE(plan.scale_k <= p.group || p.group == p.k);
      EXPECT_GE(config.x_tile_k / w4_step_k,
                config.stages - 1);  // the wait for a step's codes covers the next tile of x
      EXPECT_LE(plan.shared_bytes, 99u * 1024);
      if (p.hopper) { EXPECT_GT(3 * (plan.shared_bytes + 1024), 228u * 1024); }  // two CTAs an SM, never three
      EXPECT_GE(plan.x_tile_tokens, std::min<std::int64_t>(p.m, 8 * config.n_tiles));
      EXPECT_GE(plan.n_blocks * w4_warps * w4_tile_n, p.n);
      EXPECT_EQ(plan.separate_epilogue, separate || (plan.splits > 1 && plan.cluster == 1));
      EXPECT_EQ(plan.workspace_bytes == 0, !plan.separate_epilogue);
      EXPECT_EQ(plan.gate_tiles, p.gated && !separate ? outputs / w4_tile_n : 0);
      EXPECT_GE(plan.n_blocks * w4_warps / 2, plan.gate_tiles);
      if (plan.cluster > 1) {
        EXPECT_TRUE(p.hopper);
        EXPECT_EQ(plan.cluster, plan.splits);
        EXPECT_LE(plan.cluster, w4_max_cluster);
        EXPECT_EQ(plan.m_blocks, 1);
      }
      const W4EpilogueTiles epilogue = w4_epilogue_tiles(plan.gate_tiles > 0, plan.cluster);
      const int tiles = plan.gate_tiles > 0 ? w4_warps / 2 : w4_warps;
      EXPECT_GE(epilogue.tiles * plan.cluster, tiles);
      EXPECT_LT((epilogue.tiles - 1) * plan.cluster, tiles);
      const int sums = plan.cluster * epilogue.warps * 8 * config.n_tiles * w4_sums_pitch * 4;
      if (!plan.separate_epilogue) { EXPECT_LE(static_cast<std::size_t>(plan.sums_offset + sums), plan.shared_bytes); }
      const std::int64_t ctas = plan.n_blocks * plan.m_blocks * plan.splits,
                         most = separate ? ctas : std::min<std::int64_t>(ctas, 2 * p.sms);
      EXPECT_LE(plan.workspace_bytes, static_cast<std::size_t>(most) * w4_warps * 16 * w4_stream_block_m * 4);
    }
  });
}

// Clusters, workspaces and epilogues do not depend on W's bits.
TEST(W4Plan, ConfigsOfBothBitsTakeTheSameTokens) {
  for (int config = 0; config <= w4_stream_last; ++config)
    EXPECT_EQ(w4_stream_config(4, config).n_tiles, w4_stream_config(8, config).n_tiles);
  for (int config = 0; config <= w4_wgmma_last; ++config) {
    EXPECT_EQ(w4_wgmma_config(4, config).tokens, w4_wgmma_config(8, config).tokens);
    EXPECT_EQ(w4_wgmma_config(4, config).threads(), w4_wgmma_config(8, config).threads());
  }
}

TEST(W4Plan, WgmmaCoversTheProblemWithinHopper) {
  for_each_wgmma_problem([](const GemmProblem& p) {
    const GemmPlan plan = plan_gemm(p);
    SCOPED_TRACE(testing::Message() << "m " << p.m << " n " << p.n << " k " << p.k << " group " << p.group << " sms "
                                    << p.sms << " bits " << p.bits << (p.aligned_operands ? "" : " copy")
                                    << (p.zeros == W4Zeros::minima ? " minima" : ""));
    ASSERT_EQ(plan.path, p.m > w4_stream_max_m ? GemmPath::codes_wgmma : GemmPath::codes_stream);
    if (plan.path != GemmPath::codes_wgmma) return;
    const W4WgmmaConfig config = w4_wgmma_config(p.bits, plan.config);
    const std::int64_t steps = (w4_tiles_k(p.k) + 1) / 2, split_steps = plan.split_steps,
                       ctas = plan.n_blocks * plan.m_blocks * plan.splits;
    EXPECT_GE(plan.splits * split_steps, steps);
    EXPECT_LT((plan.splits - 1) * split_steps, steps);
    EXPECT_TRUE(plan.scale_k == 32 || plan.scale_k == 64 || plan.scale_k == 128);
    EXPECT_TRUE(plan.scale_k <= p.group || p.group == p.k);
    EXPECT_GT(plan.launch_tokens, 0);
    EXPECT_LE(plan.launch_tokens, p.m);
    EXPECT_GE(plan.m_blocks * config.tokens, plan.launch_tokens);
    EXPECT_LT((plan.m_blocks - 1) * config.tokens, plan.launch_tokens);
    EXPECT_GE(plan.n_blocks * config.warps() * w4_tile_n, p.n);
    EXPECT_EQ(plan.n_blocks % plan.cluster, 0);
    EXPECT_EQ(config.tokens / plan.cluster % 8, 0);  // whole swizzle atoms of 8 rows
    EXPECT_GE(plan.m_group, 1);
    const unsigned resident = ctas <= p.sms ? 1 : static_cast<unsigned>(config.ctas_per_sm);  // CTAs of an SM
    EXPECT_LE(plan.shared_bytes, (228u / resident - 1) * 1024);
    EXPECT_GT(plan.shared_bytes, (228u / (resident + 1) - 1) * 1024);
    const std::size_t fixup = plan.semaphore_bytes + plan.fixup_bytes, gathered = plan.gathered_bytes;
    EXPECT_EQ(plan.workspace_bytes == fixup + gathered, plan.splits == 1);
    if (plan.stream_k_ranges > 0) {
      const std::int64_t cluster_tiles = plan.n_blocks / plan.cluster,
                         ctas_of_ranges = plan.stream_k_ranges * plan.m_blocks * plan.cluster;
      EXPECT_EQ(plan.splits, 1);
      EXPECT_TRUE(w4_stream_k(config));
      EXPECT_LE(plan.stream_k_ranges, cluster_tiles);  // no work range is shorter than a tile's K
      EXPECT_LE(ctas_of_ranges, std::int64_t{p.sms} * config.ctas_per_sm);
      EXPECT_LE((cluster_tiles * steps + plan.stream_k_ranges - 1) / plan.stream_k_ranges,
                (cluster_tiles * plan.m_blocks * plan.cluster + p.sms * config.ctas_per_sm - 1) /
                    (p.sms * config.ctas_per_sm) * steps);
      EXPECT_EQ(fixup > 0, cluster_tiles % plan.stream_k_ranges != 0);
      if (fixup > 0) {
        EXPECT_GE(plan.semaphore_bytes, static_cast<std::size_t>(8 * ctas_of_ranges));
        EXPECT_EQ(plan.semaphore_bytes % 16, 0u);
        EXPECT_EQ(plan.fixup_bytes,
                  static_cast<std::size_t>(ctas_of_ranges * config.warps() * w4_tile_n * config.tokens * 4));
      }
    } else {
      EXPECT_EQ(fixup, 0u);
    }
    if (plan.splits > 1) {
      EXPECT_LE(ctas, std::int64_t{p.sms} * config.ctas_per_sm);  // which bounds the workspace
    }
  });
}

TEST(W4Plan, TheGatheredCopyOfXHasRoom) {
  for_each_wgmma_problem([](const GemmProblem& p) {
    const GemmPlan plan = plan_gemm(p);
    if (plan.path != GemmPath::codes_wgmma) return;
    SCOPED_TRACE(testing::Message() << "m " << p.m << " k " << p.k << " group " << p.group
                                    << (p.aligned_operands ? "" : " copy")
                                    << (p.zeros == W4Zeros::minima ? " minima" : ""));
    EXPECT_EQ(plan.launch_tokens, std::min(p.m, p.aligned_operands ? p.m : w4_gather_tokens));
    const W4WgmmaConfig config = w4_wgmma_config(p.bits, plan.config);
    EXPECT_TRUE(plan.launch_tokens == p.m ||
                plan.launch_tokens % config.tokens == 0);  // only the last launch has a partial m-block
    EXPECT_EQ(plan.gathered_bytes,
              p.aligned_operands ? 0u : static_cast<std::size_t>(plan.launch_tokens * ((p.k + 7) / 8) * 16));
    // what TMA reads starts at a multiple of 16 bytes
    EXPECT_EQ((plan.workspace_bytes - plan.gathered_bytes) % 16, 0u);
    EXPECT_EQ(plan.gathered_bytes % 16, 0u);
    EXPECT_GE(plan.gather_ctas, 1);
    EXPECT_LE(std::int64_t{plan.gather_ctas - 1} * w4_gather_columns, p.k);
  });
}

// Operands are exact where scales act on sums of at least 128 k, of 64 k in 4 bits up to 64 tokens, and the weight has
// no minima.
TEST(W4Plan, SmallScaleBlocksAndMinimaAreRoundedToOperands) {
  int two_sums = 0;
  for_each_wgmma_problem([&](GemmProblem p) {
    for (const bool bf16_scales : {false, true}) {
      p.scale_dtype = bf16_scales ? DType::bf16 : DType::f16;
      const GemmPlan plan = plan_gemm(p);
      const bool minima = p.zeros == W4Zeros::minima,
                 exact = plan.path == GemmPath::codes_stream || (!minima && plan.scale_k == 128),
                 two = !exact && !minima && plan.scale_k == 64 && p.bits == 4 && p.m <= 64;
      two_sums += two;
      EXPECT_EQ(plan.operand, exact         ? W4Operand::codes
                              : two         ? W4Operand::codes_64
                              : bf16_scales ? W4Operand::bf16_scales
                                            : W4Operand::f16_scales)
          << "m " << p.m << " k " << p.k << " group " << p.group << (minima ? " minima" : "");
    }
  });
  EXPECT_GT(two_sums, 0);
}

// Chunks of W expanded to 16 bits for many tokens: whole tiles of the 16-bit product, at most 32 MB, alone in the
// workspace.
TEST(W4Plan, ChunksOfExpandedRowsAreBounded) {
  int expanded = 0;
  for_each_wgmma_problem([&](GemmProblem p) {
    if (!p.aligned_operands) return;
    p.aligned_all = true;
    for (const bool bf16 : {false, true}) {
      p.dtype = bf16 ? DType::bf16 : DType::f16;
      const GemmPlan plan = plan_gemm(p);
      SCOPED_TRACE(testing::Message() << "m " << p.m << " n " << p.n << " k " << p.k << " group " << p.group
                                      << (p.zeros == W4Zeros::minima ? " minima" : "") << (bf16 ? " bf16" : ""));
      if (plan.operand == W4Operand::codes || p.m <= 512) { EXPECT_EQ(plan.expand_rows, 0); }
      if (plan.expand_rows == 0) continue;
      ++expanded;
      EXPECT_EQ(plan.splits, 1);
      EXPECT_EQ(plan.expand_rows % 256, 0);
      EXPECT_EQ(plan.workspace_bytes,
                static_cast<std::size_t>(2 * std::min<std::int64_t>(plan.expand_rows, p.n) * p.k));
      EXPECT_LE(plan.workspace_bytes, std::size_t{32} << 20);
      GemmProblem other = p;  // no expansion where the 16-bit product's kernel cannot run
      other.aligned_all = false;
      EXPECT_EQ(plan_gemm(other).expand_rows, 0);
      other = p;
      other.gated = p.n % 2 == 0;
      EXPECT_EQ(plan_gemm(other).expand_rows == 0, other.gated);
    }
  });
  EXPECT_GT(expanded, 20);
}

TEST(W4Plan, ChunksOfExpandedRowsFillWaves) {
  const auto rows = [](std::int64_t m, std::int64_t n, std::int64_t k) {
    return plan_gemm({.m = m,
                      .n = n,
                      .k = k,
                      .bits = 4,
                      .group = 32,
                      .zeros = W4Zeros::minima,
                      .sms = 132,
                      .hopper = true,
                      .aligned_operands = true,
                      .aligned_all = true})
        .expand_rows;
  };
  EXPECT_EQ(rows(4096, 4096, 4096), 4096);           // one chunk of 32 MB
  EXPECT_EQ(rows(1024, 4096, 4096), 0);              // writing W takes longer than it saves
  EXPECT_EQ(rows(1088, 4096, 14336), 0);             // chunks of 1024 rows would leave SMs idle
  EXPECT_EQ(rows(4096, 64, 4096), 0);                // split-K, to fill the device
  for (const std::int64_t m : {2048, 4096, 8192}) {  // no more waves than the whole product has, and one
    const std::int64_t chunk = rows(m, 14336, 4096), tokens = (m + 255) / 256;
    const auto waves = [&](std::int64_t n) { return ((n + 255) / 256 * 2 * tokens + 131) / 132; };
    EXPECT_LE(14336 / chunk * waves(chunk) + (14336 % chunk > 0 ? waves(14336 % chunk) : 0), waves(14336) + 1)
        << "m " << m << " chunk " << chunk;
  }
}

TEST(W4Plan, NothingIsGatheredForFewTokensOrInvariance) {
  for_each_wgmma_problem([](GemmProblem p) {
    for (const bool few : {false, true}) {
      p.m = few ? w4_stream_max_m : p.m;
      p.batch_invariant = !few;
      GemmProblem plain = p;
      plain.aligned_operands = true;
      plain.zeros = W4Zeros::symmetric;
      const GemmPlan plan = plan_gemm(p);
      EXPECT_EQ(plan.path, GemmPath::codes_stream);
      EXPECT_EQ(plan.gathered_bytes, 0u);
      EXPECT_EQ(plan.workspace_bytes, plan_gemm(plain).workspace_bytes);
    }
  });
}

TEST(W4Plan, WgmmaIsNotForBatchInvariance) {
  const GemmPlan plan = plan_gemm(
      {.m = 4096, .n = 4096, .k = 4096, .bits = 4, .group = 128, .sms = 132, .hopper = true, .batch_invariant = true});
  EXPECT_EQ(plan.path, GemmPath::codes_stream);
}

TEST(W4Plan, SplitsDependOnTheBucketOfMOnly) {
  for_each_problem([](GemmProblem p) {
    const auto cut = [&](std::int64_t m, bool invariant) {
      GemmProblem q = p;
      q.m = m;
      q.batch_invariant = invariant;
      const GemmPlan plan = plan_gemm(q);
      return std::pair{plan.splits, plan.split_steps};
    };
    EXPECT_EQ(cut(1, false), cut(8, false));
    EXPECT_EQ(cut(9, false), cut(16, false));
    EXPECT_EQ(cut(17, false), cut(32, false));
    EXPECT_EQ(cut(33, false), cut(64, false));
    EXPECT_EQ(cut(p.m, true), cut(1, true));
    p.hopper = p.aligned_operands = true;
    EXPECT_EQ(cut(17, false), cut(32, false));
    EXPECT_EQ(cut(33, false), cut(64, false));
    EXPECT_EQ(cut(65, false), cut(128, false));
    EXPECT_EQ(cut(385, false), cut(512, false));
    const auto plain = cut(3 * p.m, false);
    p.aligned_operands = false;  // K splits do not depend on x's strides
    EXPECT_EQ(cut(3 * p.m, false), plain);
  });
}

TEST(W4Plan, StreamKIsForALastWaveThatWouldBeShort) {
  const auto plan = [](std::int64_t m, std::int64_t n, std::int64_t k) {
    return plan_gemm(
        {.m = m, .n = n, .k = k, .bits = 4, .group = 128, .sms = 132, .hopper = true, .aligned_operands = true});
  };
  EXPECT_EQ(plan(256, 14336, 4096).stream_k_ranges, 33);  // 1.7 waves
  EXPECT_EQ(plan(384, 14336, 4096).stream_k_ranges, 22);
  EXPECT_EQ(plan(1024, 14336, 4096).stream_k_ranges, 8);  // whole work tiles, 8 m-blocks
  EXPECT_EQ(plan(1024, 14336, 4096).workspace_bytes, 0u);
  EXPECT_EQ(plan(128, 14336, 4096).stream_k_ranges, 0);   // one wave
  EXPECT_EQ(plan(256, 4096, 4096).stream_k_ranges, 0);    // split-K
  EXPECT_EQ(plan(256, 14336, 1024).stream_k_ranges, 0);   // too few steps to pay for it
  EXPECT_EQ(plan(4096, 14336, 4096).stream_k_ranges, 0);  // more x than stays in L2
}

TEST(W4Plan, TwoCtasOfAnSmShareItsIssueSlots) {
  const auto splits = [](std::int64_t n, std::int64_t k, int bits) {
    return plan_gemm({.m = 32,
                      .n = n,
                      .k = k,
                      .bits = bits,
                      .group = 128,
                      .sms = 132,
                      .hopper = true,
                      .aligned_operands = true})
        .splits;
  };
  EXPECT_EQ(splits(14336, 4096, 4), 1);  // 112 CTAs
  EXPECT_EQ(splits(4096, 4096, 4), 4);   // 128
  EXPECT_EQ(splits(4096, 14336, 4), 4);  // 128; 256 CTAs, two an SM, would take 14 steps of twice the time
  EXPECT_EQ(splits(14336, 4096, 8), 2);  // bound by the bytes of a step
}

TEST(W4Plan, OneMBlockHasClustersOnlyWhereTheyPay) {
  const auto cluster = [](std::int64_t m, std::int64_t n, std::int64_t k) {
    return plan_gemm(
               {.m = m, .n = n, .k = k, .bits = 4, .group = 128, .sms = 132, .hopper = true, .aligned_operands = true})
        .cluster;
  };
  for (std::int64_t m : {32, 48, 64}) {
    EXPECT_EQ(cluster(m, 4096, 4096), 1);   // split K
    EXPECT_EQ(cluster(m, 14336, 4096), 1);  // whole K
  }
  EXPECT_EQ(cluster(128, 4096, 4096), 1);   // split K
  EXPECT_EQ(cluster(128, 14336, 4096), 2);  // whole K
  EXPECT_EQ(cluster(256, 4096, 4096), 2);   // two m-blocks
  EXPECT_EQ(cluster(64, 28672, 4096), 2);   // stream-K
}

TEST(W4Plan, FewRowsOfALargeWeightKeepEverySmBusy) {
  for (const auto& [n, k] : {Weight{4096, 4096}, {14336, 4096}, {4096, 14336}}) {
    const GemmPlan plan = plan_gemm({.m = 1, .n = n, .k = k, .bits = 4, .group = 128, .sms = 132});
    EXPECT_GE(plan.n_blocks * plan.splits, 132);
    EXPECT_LE(plan.workspace_bytes, 1u << 20);
  }
}

const auto derived(const GemmPlan& p) {
  return std::tuple(p.scale_k, p.operand, p.separate_epilogue, p.gate_tiles, p.split_steps, p.x_tile_tokens,
                    p.sums_offset, p.launch_tokens, p.m_blocks, p.n_blocks, p.shared_bytes, p.workspace_bytes,
                    p.semaphore_bytes, p.fixup_bytes, p.gathered_bytes, p.gather_ctas);
}

TEST(W4Plan, APlanFitsItsProblemAndIsReadBackFromItsText) {
  const auto check = [](GemmProblem p) {
    const bool hopper = p.hopper;
    for (int flags = 0; flags < 16; ++flags) {
      p.hopper = hopper || (flags & 1);
      p.batch_invariant = flags & 2;
      p.gated = (flags & 4) && p.n % 2 == 0;
      p.aligned_all = (flags & 8) && p.aligned_operands;
      const GemmPlan plan = plan_gemm(p);
      ASSERT_EQ(check_plan(p, plan), "") << text(plan);
      const GemmPlan again = plan_gemm("op", p, text(plan).c_str());
      ASSERT_EQ(check_plan(p, again), "");
      ASSERT_EQ(text(again), text(plan));
      ASSERT_EQ(derived(again), derived(plan));
    }
  };
  for_each_problem(check);
  for_each_wgmma_problem(check);
}

TEST(W4Plan, AnEmptyWeightHasAPlan) {  // expanding no rows in no chunks once divided by 0
  for (std::int64_t m : {0, 1, 17, 1024})
    for (bool aligned : {false, true}) {
      const GemmProblem p{.m = m,
                          .n = 0,
                          .k = 4096,
                          .bits = 4,
                          .group = 32,
                          .sms = 132,
                          .hopper = true,
                          .aligned_operands = aligned,
                          .aligned_all = aligned};
      EXPECT_EQ(check_plan(p, plan_gemm(p)), "");
    }
}

// Another value of each field of a plan that fits is refused by the field's name.
TEST(W4Plan, EveryWrongFieldIsNamed) {
  const auto refused = [](const GemmProblem& p, const char* field, auto GemmPlan::* member, auto value) {
    GemmPlan plan = plan_gemm(p);
    ASSERT_EQ(check_plan(p, plan), "");
    plan.*member = static_cast<std::remove_reference_t<decltype(plan.*member)>>(value);
    EXPECT_TRUE(check_plan(p, plan).starts_with(std::string(field) + " must")) << field << ": " << check_plan(p, plan);
  };
  const GemmProblem stream{.m = 1, .n = 4096, .k = 4096, .bits = 4, .group = 128, .sms = 132};
  ASSERT_EQ(text(plan_gemm(stream)), "stream config=0 splits=8 cluster=1");
  for (int value : {-1, 4}) refused(stream, "config", &GemmPlan::config, value);
  for (int value : {0, -1, 9, 17, 32}) refused(stream, "splits", &GemmPlan::splits, value);  // 9: more than 264 CTAs
  for (int value : {0, 2, 8}) refused(stream, "cluster", &GemmPlan::cluster, value);
  refused(stream, "path", &GemmPlan::path, GemmPath::codes_wgmma);
  refused(stream, "path", &GemmPlan::path, GemmPath::tma);
  GemmProblem other = stream;
  other.m = 9;
  refused(other, "config", &GemmPlan::config, 0);
  other = stream;
  other.k = 256;
  refused(other, "splits", &GemmPlan::splits, 2);  // one step for each
  other = stream;
  other.batch_invariant = true;
  refused(other, "splits", &GemmPlan::splits, 1);
  other.hopper = true;
  refused(other, "path", &GemmPlan::path, GemmPath::codes_wgmma);
  other = stream;
  other.hopper = true;
  for (int value : {2, 4, 9}) refused(other, "cluster", &GemmPlan::cluster, value);  // 8 splits

  GemmProblem wgmma{
      .m = 64, .n = 28672, .k = 4096, .bits = 4, .group = 128, .sms = 132, .hopper = true, .aligned_operands = true};
  ASSERT_EQ(text(plan_gemm(wgmma)), "wgmma config=1 splits=1 cluster=2 m_group=8 stream_k_ranges=66 expand_rows=0");
  for (int value : {-1, 3}) refused(wgmma, "config", &GemmPlan::config, value);
  for (int value : {0, 2, 17}) refused(wgmma, "splits", &GemmPlan::splits, value);
  for (int value : {0, 3}) refused(wgmma, "cluster", &GemmPlan::cluster, value);
  for (int value : {0, 9}) refused(wgmma, "m_group", &GemmPlan::m_group, value);
  for (int value : {-1, 67, 1 << 20}) refused(wgmma, "stream_k_ranges", &GemmPlan::stream_k_ranges, value);
  refused(wgmma, "stream_k_ranges", &GemmPlan::config, 0);  // two CTAs per SM have no stream-K
  for (int value : {-256, 256}) refused(wgmma, "expand_rows", &GemmPlan::expand_rows, value);
  other = wgmma;
  other.n = 16 * 8 * 3;  // three blocks of N
  refused(other, "cluster", &GemmPlan::cluster, 2);
  other = wgmma;
  other.gated = true;
  other.n = 28672 + 16;  // gates and ups at different rows of their tiles
  refused(other, "path", &GemmPlan::path, GemmPath::codes_wgmma);
  other = {.m = 4096,
           .n = 4096,
           .k = 4096,
           .bits = 4,
           .group = 32,
           .sms = 132,
           .hopper = true,
           .aligned_operands = true,
           .aligned_all = true};
  ASSERT_EQ(plan_gemm(other).expand_rows, 4096);
  for (int value : {-256, 128, 300, 4096 + 256}) refused(other, "expand_rows", &GemmPlan::expand_rows, value);
  other.group = 128;  // exact operands
  refused(other, "expand_rows", &GemmPlan::expand_rows, 256);

  for (const GemmProblem& p : {stream, wgmma}) {
    refused(p, "operand", &GemmPlan::operand, W4Operand::bf16_scales);
    refused(p, "scale_k", &GemmPlan::scale_k, 32);
    refused(p, "separate_epilogue", &GemmPlan::separate_epilogue, !plan_gemm(p).separate_epilogue);
    refused(p, "gate_tiles", &GemmPlan::gate_tiles, 1);
    refused(p, "split_steps", &GemmPlan::split_steps, 31);
    refused(p, "x_tile_tokens", &GemmPlan::x_tile_tokens, 3);
    refused(p, "sums_offset", &GemmPlan::sums_offset, 16);
    refused(p, "launch_tokens", &GemmPlan::launch_tokens, 3);
    refused(p, "m_blocks", &GemmPlan::m_blocks, 3);
    refused(p, "n_blocks", &GemmPlan::n_blocks, 3);
    refused(p, "threads", &GemmPlan::threads, 31);
    refused(p, "shared_bytes", &GemmPlan::shared_bytes, 3);
    refused(p, "workspace_bytes", &GemmPlan::workspace_bytes, 3);
    refused(p, "semaphore_bytes", &GemmPlan::semaphore_bytes, 3);
    refused(p, "fixup_bytes", &GemmPlan::fixup_bytes, 3);
    refused(p, "gathered_bytes", &GemmPlan::gathered_bytes, 3);
    refused(p, "gather_ctas", &GemmPlan::gather_ctas, 30);
  }
}

// The K splits of up to 16 tokens on Hopper may be a cluster of two to eight CTAs, which needs no second kernel.
TEST(W4Plan, SplitsMayBeACluster) {
  GemmProblem p{.m = 1, .n = 2048, .k = 8192, .bits = 4, .group = 128, .sms = 132, .hopper = true};
  const auto plan = [&](int config, int splits, int cluster) {
    return plan_gemm("op", p,
                     ("stream config=" + std::to_string(config) + " splits=" + std::to_string(splits) +
                      " cluster=" + std::to_string(cluster))
                         .c_str());
  };
  const auto fits = [&](int config, int splits, int cluster) {
    return support::error_of([&] { plan(config, splits, cluster); }).empty();
  };
  for (p.m = 1; p.m <= 16; ++p.m)
    for (int splits = 2; splits <= 8; ++splits) {
      const int config = p.m <= 8 ? 0 : 1;
      EXPECT_TRUE(fits(config, splits, splits)) << p.m << " tokens, " << splits << " splits";
      EXPECT_FALSE(plan(config, splits, splits).separate_epilogue);
      EXPECT_TRUE(plan(config, splits, 1).separate_epilogue);
      EXPECT_FALSE(fits(config, splits, splits - 1) && splits > 2);
    }
  p.m = 1;
  EXPECT_TRUE(fits(0, 13, 1));  // of 64 steps, five each
  EXPECT_FALSE(fits(0, 13, 13));
  EXPECT_FALSE(fits(2, 4, 4));  // a config of more tokens has no clusters
  p.hopper = false;
  EXPECT_TRUE(fits(0, 4, 1));
  EXPECT_FALSE(fits(0, 4, 4));
  p.hopper = true;
  p.gated = true;
  EXPECT_TRUE(fits(0, 4, 4));
  p.n = 2 * 1000;  // a gate and its up at different rows of their tiles
  EXPECT_TRUE(fits(0, 4, 1));
  EXPECT_FALSE(fits(0, 4, 4));
}

// Any numbers in a forced plan lead to a plan that fits or to a typed error, and what fits stays within the device.
TEST(W4Plan, AnyForcedPlanFitsOrIsRefused) {
  int fit = 0;
  const auto force = [&](const GemmProblem& p, const std::string& forced) {
    const std::string error = support::error_of([&] {
      const GemmPlan plan = plan_gemm("op", p, forced.c_str());
      ++fit;
      EXPECT_EQ(check_plan(p, plan), "");
      EXPECT_LE(plan.shared_bytes, (plan.path == GemmPath::codes_wgmma ? 227u : 99u) * 1024) << forced;
    });
    EXPECT_TRUE(error.empty() || error.starts_with("value: op: plan \"" + forced + "\" does not fit this call: "))
        << error;
  };
  constexpr int values[] = {-1, 0, 1, 2, 3, 66, 2147483647};
  constexpr int rows[] = {-1, 0, 1, 66, 256};
  for (std::int64_t m : {0, 9, 700})
    for (std::int64_t n : {0, 17, 4096})
      for (int bits : {4, 8})
        for (bool wgmma : {false, true}) {
          const GemmProblem p{.m = m,
                              .n = n,
                              .k = 576,
                              .bits = bits,
                              .group = 64,
                              .sms = 132,
                              .hopper = wgmma,
                              .aligned_operands = true,
                              .aligned_all = true};
          for (int a : values)
            for (int b : values)
              for (int c : values) {
                const std::string start =
                    " config=" + std::to_string(a) + " splits=" + std::to_string(b) + " cluster=" + std::to_string(c);
                force(p, "stream" + start);
                for (int d : {0, 8})
                  for (int e : rows)
                    for (int f : rows)
                      if (e == 0 || f == 0)
                        force(p, "wgmma" + start + " m_group=" + std::to_string(d) +
                                     " stream_k_ranges=" + std::to_string(e) + " expand_rows=" + std::to_string(f));
              }
        }
  EXPECT_GT(fit, 100);
}

}  // namespace
}  // namespace rooftile::gpu
