// SPDX-License-Identifier: Apache-2.0
// What any plan of a product with a weight of 4 or 8 bits must be, over many problems: every tile of K in exactly one
// chunk, chunks that start on a span, shared memory that every supported GPU has, a workspace bounded by the device,
// bits that depend on m by regime.
#include <gtest/gtest.h>

#include <algorithm>

#include "core/w4_layout.h"
#include "kernels/w4a16/plan.h"

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
            if (w.k % group == 0) f(W4Problem{.m = m, .n = w.n, .k = w.k, .bits = bits, .group = group, .sms = sms});
}

// With all that may have to be prepared, and more tokens than are prepared at once.
template <class F>
void for_each_tiles_problem(F&& f) {
  for_each_problem([&](W4Problem p) {
    p.tiles = true;
    for (const std::int64_t m : {p.m, 11 * p.m})
      for (const bool copy : {false, true})
        for (const bool minima : {false, true}) {
          if (minima && p.bits == 8) continue;
          p.m = m;
          p.copy_x = copy;
          p.minima = minima;
          f(p);
        }
  });
}

TEST(W4Plan, CoversTheProblemWithinTheDevice) {
  for_each_problem([](W4Problem p) {
    for (int options = 0; options < 8; ++options) {
      p.batch_invariant = options & 1;
      p.clusters = options & 2;
      p.gated = options & 4 && p.n % 2 == 0;
      const std::int64_t outputs = p.gated ? p.n / 2 : p.n;
      const bool apart = p.gated && outputs % w4_tile_n != 0;
      const W4Plan plan = plan_w4a16(p);
      const W4Form form = w4_form(p.bits, plan.form);
      const std::int64_t steps = (w4_tiles_k(p.k) + 1) / 2, chunk = plan.chunk_steps;
      SCOPED_TRACE(testing::Message() << "m " << p.m << " n " << p.n << " k " << p.k << " group " << p.group << " sms "
                                      << p.sms << " bits " << p.bits);
      EXPECT_GE(plan.splits * chunk, steps);
      EXPECT_LT((plan.splits - 1) * chunk, steps);
      EXPECT_EQ(w4_step_k % plan.span, 0);
      EXPECT_TRUE(plan.span <= p.group || p.group == p.k);
      EXPECT_GE(form.panel_k / w4_step_k, form.stages - 1);  // the ring's wait covers the panel's
      EXPECT_LE(plan.shared_bytes, 99u * 1024);
      EXPECT_GE(plan.x_rows, std::min<std::int64_t>(p.m, 8 * form.token_tiles));
      EXPECT_GE(plan.row_blocks * w4_warps * w4_tile_n, p.n);
      EXPECT_EQ(plan.finish, apart || (plan.splits > 1 && plan.cluster == 1));
      EXPECT_EQ(plan.workspace_bytes == 0, !plan.finish);
      EXPECT_EQ(plan.gate_tiles, p.gated && !apart ? outputs / w4_tile_n : 0);
      EXPECT_GE(plan.row_blocks * w4_warps / 2, plan.gate_tiles);
      if (plan.cluster > 1) {
        EXPECT_TRUE(p.clusters);
        EXPECT_EQ(plan.cluster, plan.splits);
        EXPECT_EQ(plan.token_blocks, 1);
      }
      const int shift = plan.cluster > 1 ? 1 : 0;
      const W4Finisher finisher = w4_finisher(plan.gate_tiles > 0, shift);
      EXPECT_EQ(finisher.outputs << shift, plan.gate_tiles > 0 ? w4_warps / 2 : w4_warps);
      const int sums = plan.cluster * finisher.warps * 8 * form.token_tiles * w4_sums_pitch * 4;
      if (!plan.finish) { EXPECT_LE(static_cast<std::size_t>(plan.sums_at + sums), plan.shared_bytes); }
      const std::int64_t ctas = plan.row_blocks * plan.token_blocks * plan.splits,
                         most = apart ? ctas : std::min<std::int64_t>(ctas, 2 * p.sms);
      EXPECT_LE(plan.workspace_bytes, static_cast<std::size_t>(most) * w4_warps * 16 * w4_tokens * 4);
    }
  });
}

// Clusters, workspaces and what finishes sums know nothing of W's bits.
TEST(W4Plan, FormsOfBothBitsTakeTheSameTokens) {
  for (int form = 0; form < 4; ++form) EXPECT_EQ(w4_form(4, form).token_tiles, w4_form(8, form).token_tiles);
  for (int form = 0; form < 3; ++form) {
    EXPECT_EQ(w4_tiles_form(4, form).tokens, w4_tiles_form(8, form).tokens);
    EXPECT_EQ(w4_tiles_form(4, form).threads(), w4_tiles_form(8, form).threads());
  }
}

TEST(W4Plan, TilesCoverTheProblemWithinHopper) {
  for_each_tiles_problem([](const W4Problem& p) {
    const W4Plan plan = plan_w4a16(p);
    SCOPED_TRACE(testing::Message() << "m " << p.m << " n " << p.n << " k " << p.k << " group " << p.group << " sms "
                                    << p.sms << " bits " << p.bits << (p.copy_x ? " copy" : "")
                                    << (p.minima ? " minima" : ""));
    ASSERT_EQ(plan.tiles, p.m > w4_stream_tokens);
    if (!plan.tiles) return;
    const W4TilesForm form = w4_tiles_form(p.bits, plan.form);
    const std::int64_t steps = (w4_tiles_k(p.k) + 1) / 2, chunk = plan.chunk_steps,
                       ctas = plan.row_blocks * plan.token_blocks * plan.splits;
    EXPECT_GE(plan.splits * chunk, steps);
    EXPECT_LT((plan.splits - 1) * chunk, steps);
    EXPECT_TRUE(plan.span == 32 || plan.span == 64 || plan.span == 128);
    EXPECT_TRUE(plan.span <= p.group || p.group == p.k);
    EXPECT_GT(plan.launch_tokens, 0);
    EXPECT_LE(plan.launch_tokens, p.m);
    EXPECT_GE(plan.token_blocks * form.tokens, plan.launch_tokens);
    EXPECT_LT((plan.token_blocks - 1) * form.tokens, plan.launch_tokens);
    EXPECT_GE(plan.row_blocks * form.warps() * w4_tile_n, p.n);
    EXPECT_EQ(plan.row_blocks % plan.cluster, 0);
    EXPECT_EQ(form.tokens / plan.cluster % 8, 0);  // rows of a swizzle
    EXPECT_GE(plan.token_group, 1);
    EXPECT_LE(plan.shared_bytes, (228u / static_cast<unsigned>(form.ctas) - 1) * 1024);
    const std::size_t handed = plan.ticket_bytes + plan.handed_bytes, prepared = plan.copy_bytes;
    EXPECT_EQ(plan.workspace_bytes == handed + prepared, plan.splits == 1);
    if (plan.shares > 0) {
      const std::int64_t row_groups = plan.row_blocks / plan.cluster,
                         sharing = plan.shares * plan.token_blocks * plan.cluster;
      EXPECT_EQ(plan.splits, 1);
      EXPECT_TRUE(w4_tiles_shares(form));
      EXPECT_LE(plan.shares, row_groups);  // none is shorter than an item
      EXPECT_LE(sharing, std::int64_t{p.sms} * form.ctas);
      EXPECT_LE((row_groups * steps + plan.shares - 1) / plan.shares,
                (row_groups * plan.token_blocks * plan.cluster + p.sms * form.ctas - 1) / (p.sms * form.ctas) * steps);
      EXPECT_EQ(handed > 0, row_groups % plan.shares != 0);
      if (handed > 0) {
        EXPECT_GE(plan.ticket_bytes, static_cast<std::size_t>(8 * sharing));
        EXPECT_EQ(plan.ticket_bytes % 16, 0u);
        EXPECT_EQ(plan.handed_bytes, static_cast<std::size_t>(sharing * form.warps() * w4_tile_n * form.tokens * 4));
      }
    } else {
      EXPECT_EQ(handed, 0u);
    }
    if (plan.splits > 1) {
      EXPECT_LE(ctas, std::int64_t{p.sms} * form.ctas);  // and so is the workspace
    }
  });
}

TEST(W4Plan, WhatIsPreparedForTilesHasRoom) {
  for_each_tiles_problem([](const W4Problem& p) {
    const W4Plan plan = plan_w4a16(p);
    if (!plan.tiles) return;
    SCOPED_TRACE(testing::Message() << "m " << p.m << " k " << p.k << " group " << p.group << (p.copy_x ? " copy" : "")
                                    << (p.minima ? " minima" : ""));
    EXPECT_EQ(plan.launch_tokens, std::min(p.m, p.copy_x ? w4_copied_tokens : p.m));
    const W4TilesForm form = w4_tiles_form(p.bits, plan.form);
    EXPECT_TRUE(plan.launch_tokens == p.m ||
                plan.launch_tokens % form.tokens == 0);  // only the last launch has a block with less
    EXPECT_EQ(plan.copy_bytes, p.copy_x ? static_cast<std::size_t>(plan.launch_tokens * ((p.k + 7) / 8) * 16) : 0u);
    // arrays that the copy engine reads start at multiples of 16 bytes
    EXPECT_EQ((plan.workspace_bytes - plan.copy_bytes) % 16, 0u);
    EXPECT_EQ(plan.copy_bytes % 16, 0u);
    EXPECT_GE(plan.prepare_parts, 1);
    EXPECT_LE(std::int64_t{plan.prepare_parts - 1} * w4_prepare_columns, p.k);
  });
}

// Exact operands where scales act on sums of 128 k at least, and nothing is added to a weight.
TEST(W4Plan, SmallScaleBlocksAndMinimaAreRoundedToOperands) {
  for_each_tiles_problem([](W4Problem p) {
    for (const bool bf16_scales : {false, true}) {
      p.bf16_scales = bf16_scales;
      const W4Plan plan = plan_w4a16(p);
      const bool exact = !plan.tiles || (!p.minima && plan.span == 128);
      EXPECT_EQ(plan.operand, exact         ? W4Operand::codes
                              : bf16_scales ? W4Operand::bf16_scales
                                            : W4Operand::f16_scales)
          << "m " << p.m << " k " << p.k << " group " << p.group << (p.minima ? " minima" : "");
    }
  });
}

// Chunks of W in 16 bits for many tokens: whole tiles of the 16-bit product, 32 MB at most, nothing else in the
// workspace.
TEST(W4Plan, ChunksOfExpandedRowsAreBounded) {
  int expanded = 0;
  for_each_tiles_problem([&](W4Problem p) {
    p.linear_tiles = true;
    for (const bool bf16 : {false, true}) {
      p.bf16 = bf16;
      const W4Plan plan = plan_w4a16(p);
      SCOPED_TRACE(testing::Message() << "m " << p.m << " n " << p.n << " k " << p.k << " group " << p.group
                                      << (p.minima ? " minima" : "") << (bf16 ? " bf16" : ""));
      if (plan.operand == W4Operand::codes || p.m <= 512) { EXPECT_EQ(plan.expand_rows, 0); }
      if (plan.expand_rows == 0) continue;
      ++expanded;
      EXPECT_EQ(plan.splits, 1);
      EXPECT_EQ(plan.expand_rows % 256, 0);
      EXPECT_EQ(plan.workspace_bytes,
                static_cast<std::size_t>(2 * std::min<std::int64_t>(plan.expand_rows, p.n) * p.k));
      EXPECT_LE(plan.workspace_bytes, std::size_t{32} << 20);
      W4Problem other = p;  // what leaves the 16-bit product out leaves this out
      other.linear_tiles = false;
      EXPECT_EQ(plan_w4a16(other).expand_rows, 0);
      other = p;
      other.gated = p.n % 2 == 0;
      EXPECT_EQ(plan_w4a16(other).expand_rows == 0, other.gated);
    }
  });
  EXPECT_GT(expanded, 20);
}

TEST(W4Plan, ChunksOfExpandedRowsFillWaves) {
  const auto rows = [](std::int64_t m, std::int64_t n, std::int64_t k) {
    return plan_w4a16({.m = m,
                       .n = n,
                       .k = k,
                       .group = 32,
                       .sms = 132,
                       .clusters = true,
                       .tiles = true,
                       .minima = true,
                       .linear_tiles = true})
        .expand_rows;
  };
  EXPECT_EQ(rows(4096, 4096, 4096), 4096);           // one chunk of 32 MB
  EXPECT_EQ(rows(1024, 4096, 4096), 0);              // what writing W takes is more than what it saves
  EXPECT_EQ(rows(1088, 4096, 14336), 0);             // chunks of 1024 rows would leave SMs idle
  EXPECT_EQ(rows(4096, 64, 4096), 0);                // cut along K, to fill the device
  for (const std::int64_t m : {2048, 4096, 8192}) {  // no more waves than the whole product has, and one
    const std::int64_t chunk = rows(m, 14336, 4096), tokens = (m + 255) / 256;
    const auto waves = [&](std::int64_t n) { return ((n + 255) / 256 * 2 * tokens + 131) / 132; };
    EXPECT_LE(14336 / chunk * waves(chunk) + (14336 % chunk > 0 ? waves(14336 % chunk) : 0), waves(14336) + 1)
        << "m " << m << " chunk " << chunk;
  }
}

TEST(W4Plan, NothingIsPreparedForFewTokensOrInvariance) {
  for_each_tiles_problem([](W4Problem p) {
    for (const bool few : {false, true}) {
      p.m = few ? w4_stream_tokens : p.m;
      p.batch_invariant = !few;
      W4Problem plain = p;
      plain.tiles = plain.copy_x = plain.minima = false;
      const W4Plan plan = plan_w4a16(p);
      EXPECT_FALSE(plan.tiles);
      EXPECT_EQ(plan.copy_bytes, 0u);
      EXPECT_EQ(plan.workspace_bytes, plan_w4a16(plain).workspace_bytes);
    }
  });
}

TEST(W4Plan, TilesAreNotForBatchInvariance) {
  EXPECT_FALSE(
      plan_w4a16({.m = 4096, .n = 4096, .k = 4096, .group = 128, .sms = 132, .batch_invariant = true, .tiles = true})
          .tiles);
}

TEST(W4Plan, SplitsDependOnTheRegimeOnly) {
  for_each_problem([](W4Problem p) {
    const auto cut = [&](std::int64_t m, bool invariant) {
      W4Problem q = p;
      q.m = m;
      q.batch_invariant = invariant;
      const W4Plan plan = plan_w4a16(q);
      return std::pair{plan.splits, plan.chunk_steps};
    };
    EXPECT_EQ(cut(1, false), cut(8, false));
    EXPECT_EQ(cut(9, false), cut(16, false));
    EXPECT_EQ(cut(17, false), cut(32, false));
    EXPECT_EQ(cut(33, false), cut(64, false));
    EXPECT_EQ(cut(p.m, true), cut(1, true));
    p.tiles = true;
    EXPECT_EQ(cut(17, false), cut(32, false));
    EXPECT_EQ(cut(33, false), cut(64, false));
    EXPECT_EQ(cut(65, false), cut(128, false));
    EXPECT_EQ(cut(385, false), cut(512, false));
    const auto plain = cut(3 * p.m, false);
    p.copy_x = true;  // not on x's strides
    EXPECT_EQ(cut(3 * p.m, false), plain);
  });
}

TEST(W4Plan, SharesAreForALastRoundThatWouldBeShort) {
  const auto plan = [](std::int64_t m, std::int64_t n, std::int64_t k) {
    return plan_w4a16({.m = m, .n = n, .k = k, .group = 128, .sms = 132, .clusters = true, .tiles = true});
  };
  EXPECT_EQ(plan(256, 14336, 4096).shares, 33);  // 1.7 rounds
  EXPECT_EQ(plan(384, 14336, 4096).shares, 22);
  EXPECT_EQ(plan(1024, 14336, 4096).shares, 8);  // whole rows of 8 blocks of tokens
  EXPECT_EQ(plan(1024, 14336, 4096).workspace_bytes, 0u);
  EXPECT_EQ(plan(128, 14336, 4096).shares, 0);   // one round
  EXPECT_EQ(plan(256, 4096, 4096).shares, 0);    // in chunks
  EXPECT_EQ(plan(256, 14336, 1024).shares, 0);   // too few steps to pay for it
  EXPECT_EQ(plan(4096, 14336, 4096).shares, 0);  // more x than stays in L2
}

TEST(W4Plan, FewRowsOfALargeWeightKeepEverySmBusy) {
  for (const auto& [n, k] : {Weight{4096, 4096}, {14336, 4096}, {4096, 14336}}) {
    const W4Plan plan = plan_w4a16({.m = 1, .n = n, .k = k, .group = 128, .sms = 132});
    EXPECT_GE(plan.row_blocks * plan.splits, 132);
    EXPECT_LE(plan.workspace_bytes, 1u << 20);
  }
}

}  // namespace
}  // namespace rooftile::gpu
