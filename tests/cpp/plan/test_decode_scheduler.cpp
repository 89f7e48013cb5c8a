// SPDX-License-Identifier: Apache-2.0
// The arithmetic that distributes decode attention: every KV split has one owner, partials fit the places reserved for
// them, and a cache row is reduced by the same expression however many CTAs share it. Partials are texts here, so that
// expressions are compared, not rounded values.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/decode/plan.h"
#include "kernels/decode/scheduler.h"
#include "support/plans.h"

namespace rooftile::gpu {
namespace {

using Random = std::mt19937;
int between(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

std::string merged(const std::string& a, const std::string& b) { return "(" + a + b + ")"; }

struct Partial {
  int at, level;
  std::string state;
};

// KV splits [first, last) of a work tile of `splits`, reduced in order by one CTA: its partials, or the result of a
// whole work tile.
struct Reduced {
  std::vector<Partial> partials;
  std::string whole;
};
Reduced reduce(int first, int last, int splits) {
  Reduced range;
  std::array<std::optional<Partial>, reduction_levels> waiting;
  for (int split = first; split < last; ++split) {
    Partial partial{split, 0, std::string("<").append(std::to_string(split)) + ">"};
    while (partial.level + 1 < reduction_levels && (partial.at >> partial.level) % 2 == 1 &&
           waiting[static_cast<std::size_t>(partial.level)]) {
      std::optional<Partial>& left = waiting[static_cast<std::size_t>(partial.level)];
      partial = {left->at, partial.level + 1, merged(left->state, partial.state)};
      left.reset();
    }
    if (partial.level + 1 < reduction_levels && (partial.at >> partial.level) % 2 == 1)
      range.partials.push_back(partial);  // the left half belongs to another CTA
    else waiting[static_cast<std::size_t>(partial.level)] = partial;
  }
  if (first > 0 || last < splits) {
    for (int level = reduction_levels - 1; level >= 0; --level)
      if (waiting[static_cast<std::size_t>(level)]) range.partials.push_back(*waiting[static_cast<std::size_t>(level)]);
    return range;
  }
  for (const std::optional<Partial>& partial : waiting)
    if (partial) range.whole = range.whole.empty() ? partial->state : merged(partial->state, range.whole);
  return range;
}

// The tree over 64 KV splits, where missing splits are empty, from partials that cover it.
std::string tree(const std::vector<Partial>& partials) {
  std::array<std::string, max_splits> state;
  std::array<int, max_splits> came;
  came.fill(-1);
  for (const Partial& partial : partials) {
    state[static_cast<std::size_t>(partial.at)] = partial.state;
    came[static_cast<std::size_t>(partial.at)] = partial.level;
  }
  const auto merge = [&](std::string& a, const std::string& b) { a = a.empty() ? b : b.empty() ? a : merged(a, b); };
  for (int level = 1; level < reduction_levels; ++level)
    for (int start = 0; start < max_splits; start += 1 << level)
      if (came[static_cast<std::size_t>(start)] < level)
        merge(state[static_cast<std::size_t>(start)], state[static_cast<std::size_t>(start + (1 << (level - 1)))]);
  return state[0];
}

TEST(DecodeScheduler, DividesRoundedUp) {
  for (int bits = 0; bits < 12; ++bits)
    for (const int b : {(1 << bits) - 1, 1 << bits, (1 << bits) + 1})
      for (int a = 0; b > 0 && a < 5 * b + 3; ++a) ASSERT_EQ(ceil_div_pow2(a, b), (a + b - 1) / b) << a << " / " << b;
}

TEST(DecodeScheduler, RangesDecomposeExactlyAndFitTheirPartials) {
  for (int first = 0; first < max_splits; ++first)
    for (int last = first + 1; last <= max_splits; ++last) {
      int count = 0, at = first;
      while (at < last) {
        const int level = partial_level(at, last);
        ASSERT_GE(level, 0);
        ASSERT_LT(level, reduction_levels);
        ASSERT_EQ(at % (1 << level), 0);
        at += 1 << level;
        ++count;
      }
      ASSERT_EQ(at, last);
      ASSERT_LE(count, first > 0 ? partials_inside : partials_start) << first << ", " << last;
    }
}

TEST(DecodeScheduler, AReductionLeavesTheCanonicalPartialsInOrder) {
  for (int first = 0; first < max_splits; ++first)
    for (int last = first + 1; last <= max_splits; ++last) {
      const Reduced range = reduce(first, last, last + 1);  // a range that ends inside its work tile
      int at = first;
      for (const Partial& partial : range.partials) {
        ASSERT_EQ(partial.at, at);
        ASSERT_EQ(partial.level, partial_level(at, last));
        at += 1 << partial.level;
      }
      ASSERT_EQ(at, last);
    }
}

TEST(DecodeScheduler, AnyPartitionOfARowIsTheExpressionOfOneCta) {
  Random random(1);
  for (int splits = 1; splits <= max_splits; ++splits) {
    const std::string expected = reduce(0, splits, splits).whole;
    EXPECT_EQ(std::count(expected.begin(), expected.end(), '<'), splits);
    for (int trial = 0; trial < 60; ++trial) {
      std::vector<Partial> partials;
      for (int first = 0; first < splits;) {
        const int last = std::min(splits, first + between(random, 1, trial % 2 ? splits : 5));
        const Reduced range = reduce(first, last, splits);
        if (!range.whole.empty()) { ASSERT_EQ(range.whole, expected); }
        partials.insert(partials.end(), range.partials.begin(), range.partials.end());
        first = last;
      }
      if (!partials.empty()) { ASSERT_EQ(tree(partials), expected) << splits << " splits"; }
    }
  }
}

TEST(DecodeScheduler, SplitsAreFewAndLongOnlyInLongRows) {
  Random random(2);
  for (int trial = 0; trial < 20000; ++trial) {
    const KvFormat format = trial % 2 ? KvFormat::int4_kivi : KvFormat::int8;
    const int tokens = trial < 9000   ? trial + 1
                       : trial < 9200 ? (trial - 8999) * max_splits * 128
                                      : between(random, 1, trial % 4 < 2 ? 1 << 20 : 0x7fffff80);
    const int block_m = trial % 3 ? mma_n : 2 * mma_n;
    const std::int64_t tiles = kv_split_tiles(format, block_m, tokens), split = tiles * kv_tile_tokens,
                       splits = (tokens + split - 1) / split;
    ASSERT_GE(tiles, 8);
    ASSERT_EQ(tiles % 4, 0);  // a KV tile for each warp
    ASSERT_LE(splits, max_splits) << tokens;
    ASSERT_TRUE(tiles == 8 || splits > (block_m == mma_n ? 6 : 8)) << tokens;
    ASSERT_TRUE(tiles > 8 || tokens <= 8192) << tokens;
    ASSERT_LE(tiles, kv_split_tiles(format, block_m, tokens == 0x7fffff80 ? tokens : tokens + 1)) << tokens;
  }
}

TEST(DecodeScheduler, SplitsGrowAt3072TokensIn4BitCodesAndAt8192InOthers) {
  const auto last_of_256 = [](KvFormat format, int block_m) {
    int tokens = 1;
    while (kv_split_tiles(format, block_m, tokens + 1) == 8) ++tokens;
    return tokens;
  };
  EXPECT_EQ(last_of_256(KvFormat::int4_kivi, mma_n), 3072);
  EXPECT_EQ(last_of_256(KvFormat::int4, 2 * mma_n), 4096);
  EXPECT_EQ(last_of_256(KvFormat::int8, mma_n), 8192);
  EXPECT_EQ(last_of_256(KvFormat::fp16, 2 * mma_n), 8192);
  EXPECT_EQ(kv_split_tiles(KvFormat::int4, mma_n, 3073), 16);
}

TEST(DecodeScheduler, FirstSplitFromFindsTheFirstSplitThatStartsThere) {
  for (int tiles : {1, 2, 7})
    for (int paged : {0, 1, 5, 35, 64 * 7})
      for (bool raw : {false, true}) {
        RowWork w;
        w.split_tiles = tiles;
        w.split_cost = tiles + 2;
        w.begin = 64;
        w.end = w.begin + paged * kv_tile_tokens;
        w.splits = paged == 0 && raw ? 1 : ceil_div(paged, tiles);
        w.raw = raw;
        for (int at = -3; at <= w.work_tile_cost(); ++at) {
          int expected = 0;
          while (expected < w.splits && w.split_begin(expected) < at) ++expected;
          ASSERT_EQ(w.first_split_from(at), expected)
              << tiles << " KV tiles, " << w.splits << " splits, raw " << raw << ", from " << at;
        }
      }
}

// The tokens that the queries of one cache row see, one by one.
TEST(DecodeScheduler, ARowsWorkIsWhatItsQueriesSee) {
  Random random(3);
  for (int trial = 0; trial < 20000; ++trial) {
    const KvFormat format =
        std::array{KvFormat::fp16, KvFormat::int8, KvFormat::int4_kivi}[static_cast<std::size_t>(trial % 3)];
    const int tokens = between(random, 1, 32), count = between(random, 0, tokens),
              length = between(random, 0, trial % 2 ? 200 : 20000);
    const int window = trial % 5 < 2 ? between(random, 1, 300) : 0;
    const RowWork w = row_work(format, mma_n, 20000, 3, 4, length, count, tokens, 0, window);
    SCOPED_TRACE(testing::Message() << name(format) << " length " << length << " count " << count << " window "
                                    << window);
    ASSERT_EQ(w.fault, KvFault::none);
    ASSERT_EQ(w.row, 3);
    if (length == 0 || count == 0) {
      ASSERT_EQ(w.work_tile_cost(), 0);
      continue;
    }
    // the earliest and the latest token that any query reads from pages
    int begin = length, end = 0;
    for (int i = 0; i < count; ++i) {
      const int position = length - count + i;
      if (position < 0) continue;
      const int from = window > 0 ? std::max(0, position + 1 - window) : 0;
      const int to = is_kivi(format) ? position / 32 * 32 : position + 1;
      if (from >= to) continue;
      begin = std::min(begin, from);
      end = std::max(end, to);
    }
    ASSERT_EQ(w.raw, is_kivi(format));
    ASSERT_EQ(w.begin % 32, 0);
    if (begin < end) {
      ASSERT_LE(w.begin, begin);
      ASSERT_GT(w.begin + 32, begin);
      ASSERT_EQ(w.end, end);
      const std::int64_t split = std::int64_t{w.split_tiles} * kv_tile_tokens;
      ASSERT_EQ(w.split_tiles, kv_split_tiles(format, mma_n, w.end - w.begin));
      ASSERT_GE(w.splits * split, w.end - w.begin);
      ASSERT_LT((w.splits - 1) * split, w.end - w.begin);
    } else {
      ASSERT_TRUE(is_kivi(format)) << "a query of a row that holds tokens sees its own";
      ASSERT_EQ(w.splits, 1);  // raw tokens alone
    }
    ASSERT_LE(w.splits, max_splits);
    ASSERT_EQ(w.work_tile_cost(), (w.end - w.begin + 31) / 32 + (w.raw ? 1 : 0));
    ASSERT_GE(w.splits, 1);
  }
}

TEST(DecodeScheduler, WhatCannotBeIsAFaultAndNoWork) {
  const auto fault = [](KvFormat f, int row, int length, int count, int raw_from) {
    const RowWork w = row_work(f, mma_n, 1000, row, 4, length, count, 8, raw_from, 0);
    EXPECT_TRUE(w.fault == KvFault::none || w.work_tile_cost() == 0);
    return w.fault;
  };
  for (KvFormat f : {KvFormat::bf16, KvFormat::int4_kivi}) {
    EXPECT_EQ(fault(f, 0, 1000, 8, 0), KvFault::none);
    EXPECT_EQ(fault(f, -1, 10, 1, 0), KvFault::row);
    EXPECT_EQ(fault(f, 4, 10, 1, 0), KvFault::row);
    EXPECT_EQ(fault(f, 3, -1, 1, 0), KvFault::length);
    EXPECT_EQ(fault(f, 3, 1001, 1, 0), KvFault::length);
    EXPECT_EQ(fault(f, 3, 10, -1, 0), KvFault::count);
    EXPECT_EQ(fault(f, 3, 10, 9, 0), KvFault::count);
  }
  // The first query's group must still be in the ring of raw tokens.
  EXPECT_EQ(fault(KvFormat::int4_kivi, 0, 70, 1, 64), KvFault::none);
  EXPECT_EQ(fault(KvFormat::int4_kivi, 0, 70, 1, 65), KvFault::raw);
  EXPECT_EQ(fault(KvFormat::int4_kivi, 0, 70, 8, 64), KvFault::raw);  // the first query is at position 62
  EXPECT_EQ(fault(KvFormat::int4_kivi, 0, 5, 8, 0), KvFault::none);   // fewer tokens than queries
}

TEST(DecodeScheduler, WorkRangesOfAPartition) {
  Random random(4);
  for (int trial = 0; trial < 2000; ++trial) {
    const int total = between(random, 1, trial % 2 ? 500 : 1 << 30), ctas = between(random, 1, 300);
    const WorkPartition partition(total, ctas, trial % 3 == 0);
    ASSERT_EQ(partition.begin(0), 0);
    ASSERT_EQ(partition.begin(ctas), total);
    const std::int64_t least = (total + ctas - 1) / ctas;
    ASSERT_GE(partition.cost_per_cta, least);
    ASSERT_LE(partition.cost_per_cta - least, trial % 3 == 0 ? least / 16 : 0)
        << "no work range is much larger than it must be";
    for (int cta = 0; cta < ctas; ++cta) {
      const int begin = partition.begin(cta), end = partition.begin(cta + 1);
      ASSERT_LE(begin, end);
      if (begin == end) continue;
      ASSERT_EQ(partition.owner(begin), cta);
      ASSERT_EQ(partition.owner(end - 1), cta);
    }
  }
}

// All CTAs of a batch, one after another, against what combine expects to find.
TEST(DecodeScheduler, EverySplitHasOneOwnerAndEveryRowItsExpression) {
  Random random(5);
  std::vector<std::string> expected(max_splits + 1);
  for (int splits = 1; splits <= max_splits; ++splits)
    expected[static_cast<std::size_t>(splits)] = reduce(0, splits, splits).whole;
  int with_own_ctas = 0;
  for (int trial = 0; trial < 600; ++trial) {
    const KvFormat format = trial % 2 ? KvFormat::int4_kivi : KvFormat::bf16;
    const int batch = between(random, 1, trial % 3 ? 6 : 40), work_tiles = between(random, 1, 12),
              ctas = between(random, 1, trial % 5 ? 40 : 396);
    const int longest = std::array{40, 3000, 60000}[static_cast<std::size_t>(trial % 3)];
    std::vector<RowWork> works;
    for (int b = 0; b < batch; ++b) {
      const int length = between(random, 0, 4) == 0 ? 0 : between(random, 0, longest);
      works.push_back(row_work(format, mma_n, longest, b, batch, trial % 7 < 3 ? longest : length,
                               trial % 7 < 3 ? 3 : between(random, 0, 3), 3, 0, trial % 4 ? 0 : 500));
    }
    const bool uniform = std::all_of(works.begin(), works.end(),
                                     [&](const RowWork& w) { return w.work_tile_cost() == works[0].work_tile_cost(); });
    int total = 0;
    for (RowWork& w : works) {
      if (!uniform) w.add_overheads(format);
      total += w.work_tile_cost() * work_tiles;
    }
    if (total == 0) continue;
    const WorkPartition partition(total, ctas, uniform);
    const int ctas_per_tile = ctas_per_tile_of(uniform, works[0].work_tile_cost(),
                                               ctas_per_tile_if_uniform(std::int64_t{batch} * work_tiles, ctas));
    with_own_ctas += ctas_per_tile > 0;
    std::vector<int> uses(static_cast<std::size_t>(ctas * partials_per_cta));
    int base = 0, tile_index = 0;
    for (const RowWork& w : works) {
      const int splits = w.splits;
      for (int tile = 0; tile < work_tiles && w.work_tile_cost() > 0;
           ++tile, ++tile_index, base += w.work_tile_cost()) {
        const auto owner = [&](int split) {
          return ctas_per_tile ? tile_index * ctas_per_tile + w.cta_of_split(split, ctas_per_tile)
                               : partition.owner(base + w.split_begin(split));
        };
        std::vector<int> owners(static_cast<std::size_t>(splits), -1);
        std::vector<Partial> partials;
        int whole = 0;
        for (int cta = 0; cta < ctas; ++cta) {
          const int begin = partition.begin(cta), end = partition.begin(cta + 1),
                    cta_in_tile = cta - tile_index * ctas_per_tile;
          if (ctas_per_tile ? cta_in_tile < 0 || cta_in_tile >= ctas_per_tile
                            : begin >= end || base >= end || base + w.work_tile_cost() <= begin)
            continue;
          const int first =
              ctas_per_tile ? w.first_split_of_cta(cta_in_tile, ctas_per_tile) : w.first_split_from(begin - base);
          const int last = ctas_per_tile ? w.first_split_of_cta(cta_in_tile + 1, ctas_per_tile)
                                         : std::min(splits, w.first_split_from(end - base));
          for (int split = first; split < last; ++split) {
            ASSERT_EQ(owners[static_cast<std::size_t>(split)], -1);
            owners[static_cast<std::size_t>(split)] = cta;
            ASSERT_EQ(owner(split), cta);  // the owner that combine computes
          }
          if (first >= last) continue;
          const Reduced range = reduce(first, last, splits);
          if (!range.whole.empty()) {
            ++whole;
            ASSERT_EQ(range.whole, expected[static_cast<std::size_t>(splits)]);
          }
          ASSERT_LE(range.partials.size(), static_cast<std::size_t>(first > 0 ? partials_inside : partials_start));
          int index = cta * partials_per_cta + (first > 0 ? 0 : partials_inside);
          for (const Partial& partial : range.partials) {
            ASSERT_EQ(uses[static_cast<std::size_t>(index++)]++, 0) << "two partials at one place";
            partials.push_back(partial);
          }
        }
        ASSERT_EQ(std::count(owners.begin(), owners.end(), -1), 0);
        // As combine decides: has one CTA written the result?
        ASSERT_EQ(whole, owner(0) == owner(splits - 1) ? 1 : 0);
        if (!whole) { ASSERT_EQ(tree(partials), expected[static_cast<std::size_t>(splits)]); }
      }
    }
    ASSERT_EQ(base, total);
  }
  EXPECT_GT(with_own_ctas, 30);
}

TEST(DecodeScheduler, CtasOfATileHaveEqualRanges) {
  Random random(6);
  for (int trial = 0; trial < 4000; ++trial) {
    const KvFormat format = trial % 2 ? KvFormat::int4_kivi : KvFormat::bf16;
    const int length = between(random, 1, trial % 3 ? 5000 : 1 << 24),
              ctas_per_tile = between(random, 1, trial % 4 ? 40 : 500);
    const RowWork w = row_work(format, mma_n, length, 0, 1, length, 1, 1, 0, 0);
    ASSERT_EQ(w.first_split_of_cta(0, ctas_per_tile), 0);
    ASSERT_EQ(w.first_split_of_cta(ctas_per_tile, ctas_per_tile), w.splits);
    for (int cta_in_tile = 0; cta_in_tile < ctas_per_tile; ++cta_in_tile) {
      const int first = w.first_split_of_cta(cta_in_tile, ctas_per_tile),
                last = w.first_split_of_cta(cta_in_tile + 1, ctas_per_tile);
      ASSERT_LE(first, last);
      ASSERT_LE(last - first, (w.splits + ctas_per_tile - 1) / ctas_per_tile + 1);
      for (int split = first; split < last; ++split)
        ASSERT_EQ(w.cta_of_split(split, ctas_per_tile), cta_in_tile) << length;
    }
  }
}

TEST(DecodeScheduler, FewUniformTilesHaveTheirOwnCtas) {
  EXPECT_EQ(ctas_per_tile_of(true, 32, ctas_per_tile_if_uniform(8, 264)), 33);
  EXPECT_EQ(ctas_per_tile_of(true, 33, ctas_per_tile_if_uniform(64, 264)), 4);
  EXPECT_EQ(ctas_per_tile_of(true, 33, ctas_per_tile_if_uniform(100, 264)), 0);  // 64 CTAs would have no work
  EXPECT_EQ(ctas_per_tile_of(true, 33, ctas_per_tile_if_uniform(200, 264)), 0);
  EXPECT_EQ(ctas_per_tile_of(false, 33, ctas_per_tile_if_uniform(64, 264)), 0);
  EXPECT_EQ(ctas_per_tile_of(true, 1 << 19, ctas_per_tile_if_uniform(64, 264)), 0);
  EXPECT_EQ(ctas_per_tile_of(true, 33, ctas_per_tile_if_uniform(std::int64_t{1} << 40, 264)), 0);
}

// The CTAs of a cluster have room for all KV splits that a cache row of so many tokens can have.
TEST(DecodePlan, ClustersHaveRoomForTheirSplits) {
  int clusters = 0;
  for (std::int64_t batch : {1, 2, 8, 16, 32})
    for (int kv_heads : {1, 3, 8})
      for (int per_sm : {2, 3})
        for (std::int64_t visible : {1, 500, 1024, 1920, 2048, 4096, 5000}) {
          const DecodePlan plan = plan_decode({batch, 1, kv_heads, 4, 128, mma_n, visible}, {132, per_sm, 8});
          const DecodePlan any = plan_decode({batch, 1, kv_heads, 4, 128, mma_n, 1 << 20}, {132, per_sm, 8});
          EXPECT_LE(plan.workspace_bytes, any.workspace_bytes);  // the workspace is asked for without the window
          EXPECT_EQ(any.cluster_size, 1);
          if (plan.cluster_size == 1) continue;
          ++clusters;
          EXPECT_EQ(plan.ctas, plan.cluster_size * batch * kv_heads);
          EXPECT_LE(8 * plan.ctas, 7 * 132 * per_sm);
          EXPECT_EQ(plan.ctas_per_sm, 1);
          EXPECT_EQ(plan.workspace_bytes, 0u);
          for (int length = 1; length <= visible; ++length)
            for (KvFormat format : {KvFormat::fp16, KvFormat::int4_kivi}) {
              const RowWork w = row_work(format, mma_n, visible, 0, 1, length, 1, 1, 0, 0);
              ASSERT_LE(w.splits, cluster_splits);
              ASSERT_LE(w.splits,
                        plan.cluster_size * cluster_partials);  // each CTA has its rows' partials of all splits
            }
        }
  EXPECT_GT(clusters, 20);
  EXPECT_EQ(plan_decode({1, 1, 8, 4, 128, mma_n, 1024}, {132, 2, 8}).cluster_size, 8);
  EXPECT_EQ(plan_decode({2, 1, 8, 4, 128, mma_n, 1024}, {132, 2, 8}).cluster_size, 4);  // as many as there are splits
  EXPECT_EQ(plan_decode({2, 1, 8, 4, 128, mma_n, 1025}, {132, 2, 8}).cluster_size, 8);
  EXPECT_EQ(plan_decode({1, 1, 8, 4, 128, mma_n, 256}, {132, 2, 8}).cluster_size, 8);
  EXPECT_EQ(plan_decode({4, 1, 8, 4, 128, mma_n, 512}, {132, 2, 8}).cluster_size, 2);
  EXPECT_EQ(plan_decode({8, 1, 8, 4, 128, mma_n, 1024}, {132, 2, 8}).cluster_size, 2);
  EXPECT_EQ(plan_decode({16, 1, 3, 4, 128, mma_n, 2048}, {132, 2, 8}).cluster_size, 4);
  EXPECT_EQ(plan_decode({16, 1, 3, 4, 128, mma_n, 2049}, {132, 2, 8}).cluster_size, 1);
  EXPECT_EQ(plan_decode({1, 1, 8, 4, 128, mma_n, 1024}, {132, 2, 1}).cluster_size, 1);  // a device without clusters
}

TEST(DecodePlan, GridAndWorkspaceAreBoundedByTheDevice) {
  for (std::int64_t batch : {0, 1, 8, 64, 4096})
    for (std::int64_t tokens : {1, 4, 32})
      for (int kv_heads : {1, 8})
        for (int q_per_kv : {1, 4, 7, 16})
          for (int head_dim : {64, 128})
            for (int block_m : {8, 16})
              for (int sms : {46, 132})
                for (int per_sm : {2, 3}) {
                  const DecodePlan plan =
                      plan_decode({batch, tokens, kv_heads, q_per_kv, head_dim, block_m, 1 << 20}, {sms, per_sm, 8});
                  EXPECT_GE(plan.m_blocks * block_m, tokens * q_per_kv);
                  EXPECT_LT((plan.m_blocks - 1) * block_m, tokens * q_per_kv);
                  // As many CTAs as fit, each with at least one KV split.
                  EXPECT_EQ(plan.ctas,
                            std::min<std::int64_t>(sms * per_sm, batch * kv_heads * plan.m_blocks * max_splits));
                  EXPECT_EQ(plan.ctas % plan.ctas_per_sm, 0);
                  const std::size_t partials =
                      static_cast<std::size_t>(plan.ctas) * partials_per_cta * static_cast<std::size_t>(block_m);
                  EXPECT_GE(plan.partial_o, (static_cast<std::size_t>(batch) + 2) * 4);
                  EXPECT_GE(plan.partial_ml - plan.partial_o, partials * static_cast<std::size_t>(head_dim) * 4);
                  EXPECT_GE(plan.reduction_o - plan.partial_ml, partials * 8);
                  const std::size_t reduction =
                      static_cast<std::size_t>(plan.ctas * reduction_levels * block_m * head_dim) * 4;
                  EXPECT_GE(plan.workspace_bytes - plan.reduction_o, reduction);
                  EXPECT_EQ(plan.partial_o % 16 + plan.partial_ml % 16 + plan.reduction_o % 16, 0u);
                  EXPECT_LE(plan.workspace_bytes, static_cast<std::size_t>(batch) * 4 +
                                                      partials * static_cast<std::size_t>(head_dim + 2) * 4 +
                                                      reduction + 3 * 256);
                }
}

TEST(DecodePlan, ALongRowAloneFillsTheDevice) {
  EXPECT_EQ(plan_decode({1, 1, 8, 4, 128, mma_n, 1 << 20}, {132, 2, 8}).ctas, 264);
}

TEST(DecodePlan, APlanFitsItsCallAndIsReadBackFromItsText) {
  for (std::int64_t batch : {0, 1, 3, 64})
    for (std::int64_t tokens : {1, 32})
      for (int kv_heads : {1, 8})
        for (int head_dim : {64, 128})
          for (int block_m : {8, 16})
            for (std::int64_t visible : {64, 4096, 1 << 20})
              for (int clusters : {1, 8}) {
                const DecodeShape shape{batch, tokens, kv_heads, 4, head_dim, block_m, visible};
                const DecodeDevice device{132, 2, clusters};
                const DecodePlan plan = plan_decode(shape, device);
                ASSERT_EQ(check_plan(shape, device, plan), "") << text(plan);
                const DecodePlan again = plan_decode("op", shape, device, text(plan).c_str());
                ASSERT_EQ(text(again), text(plan));
                ASSERT_EQ(check_plan(shape, device, again), "");
                ASSERT_EQ(forced_block_m("op", text(plan).c_str()), block_m);
                ASSERT_STRNE(plan.why, "");
              }
}

// Another value of each field of a plan that fits is refused by the field's name.
TEST(DecodePlan, EveryWrongFieldIsNamed) {
  DecodeShape shape{1, 1, 8, 4, 128, mma_n, 8192};
  DecodeDevice device{132, 2, 8};
  const auto refused = [&](const char* field, auto DecodePlan::* member, auto value) {
    DecodePlan plan = plan_decode(shape, device);
    ASSERT_EQ(check_plan(shape, device, plan), "");
    plan.*member = static_cast<std::remove_reference_t<decltype(plan.*member)>>(value);
    EXPECT_TRUE(check_plan(shape, device, plan).starts_with(std::string(field) + " must"))
        << field << ": " << check_plan(shape, device, plan);
  };
  EXPECT_EQ(text(plan_decode(shape, device)), "split_kv block_m=8 ctas=264 ctas_per_sm=2 cluster_size=1");
  for (int round : {0, 1}) {
    refused("block_m", &DecodePlan::block_m, 16);
    for (int value : {-1, 0, 265}) refused("ctas", &DecodePlan::ctas, value);
    for (int value : {0, -1, 3}) refused("ctas_per_sm", &DecodePlan::ctas_per_sm, value);
    for (int value : {0, 3, 16}) refused("cluster_size", &DecodePlan::cluster_size, value);
    refused("ctas_per_tile", &DecodePlan::ctas_per_tile, 5);
    refused("m_blocks", &DecodePlan::m_blocks, 5);
    refused("partial_o", &DecodePlan::partial_o, 5);
    refused("partial_ml", &DecodePlan::partial_ml, 5);
    refused("reduction_o", &DecodePlan::reduction_o, 5);
    refused("workspace_bytes", &DecodePlan::workspace_bytes, 5);
    if (round == 0) {
      refused("ctas_per_sm", &DecodePlan::ctas, 263);         // odd
      refused("cluster_size", &DecodePlan::cluster_size, 8);  // of too many tokens
      shape.visible = 4096;
      EXPECT_EQ(text(plan_decode(shape, device)), "split_kv block_m=8 ctas=64 ctas_per_sm=1 cluster_size=8");
    }
  }
  refused("ctas", &DecodePlan::ctas, 63);  // of clusters
  refused("ctas_per_sm", &DecodePlan::ctas_per_sm, 2);
  device.max_cluster = 4;
  refused("cluster_size", &DecodePlan::cluster_size, 8);
  EXPECT_EQ(support::error_of(
                [&] { plan_decode("op", shape, device, "split_kv block_m=8 ctas=0 ctas_per_sm=1 cluster_size=1"); }),
            "value: op: plan \"split_kv block_m=8 ctas=0 ctas_per_sm=1 cluster_size=1\" does not fit this call: ctas "
            "must be 1 to 264, got 0");
}

TEST(DecodePlan, WorkedExamples) {  // of the comments of plan.cpp
  const auto plan = [](std::int64_t batch, std::int64_t visible) {
    return text(plan_decode({batch, 1, 8, 4, 128, mma_n, visible}, {132, 2, 8}));
  };
  EXPECT_EQ(plan(1, 1024), "split_kv block_m=8 ctas=64 ctas_per_sm=1 cluster_size=8");
  EXPECT_EQ(plan(1, 8192), "split_kv block_m=8 ctas=264 ctas_per_sm=2 cluster_size=1");
  EXPECT_EQ(plan(64, 1024), "split_kv block_m=8 ctas=264 ctas_per_sm=2 cluster_size=1");
}

// What rt.explain says of a variant in a build without GPU kernels is what is compiled in one with them.
TEST(DecodePlan, VariantsAreWhatIsExpected) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (int format = 0; format < kv_format_count; ++format)
      for (int head_dim : {32, 64, 80, 96, 128, 192, 256, 512})
        for (int block_m : {1, 8, 16, 32}) {
          const DecodeKey key{dtype, static_cast<KvFormat>(format), head_dim, block_m};
          const DecodeFacts facts = decode_facts(key), expected = expected_decode_facts(key);
          EXPECT_EQ(facts.ctas_per_sm, expected.ctas_per_sm) << text(key) << " m" << block_m;
          EXPECT_EQ(facts.clusters, expected.clusters) << text(key) << " m" << block_m;
        }
}

}  // namespace
}  // namespace rooftile::gpu
