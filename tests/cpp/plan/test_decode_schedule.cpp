// SPDX-License-Identifier: Apache-2.0
// The arithmetic that cuts decode attention into pieces: every piece has one owner, nodes fit the slots set aside for
// them, and a row is merged by the same expression however many blocks shared it. States are texts here, so an
// expression is compared, not a rounding.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "kernels/decode/plan.h"
#include "kernels/decode/schedule.h"

namespace rooftile::gpu {
namespace {

using Random = std::mt19937;
int between(Random& random, int low, int high) { return std::uniform_int_distribution<int>(low, high)(random); }

std::string merged(const std::string& a, const std::string& b) { return "(" + a + b + ")"; }

struct Node {
  int at, level;
  std::string state;
};

// Leaves [first, last) of a task of `leaves`, folded in order by one block: its nodes, or the result of a whole task.
struct Folded {
  std::vector<Node> nodes;
  std::string whole;
};
Folded fold(int first, int last, int leaves) {
  Folded run;
  std::array<std::optional<Node>, fold_levels> waiting;
  for (int leaf = first; leaf < last; ++leaf) {
    Node node{leaf, 0, std::string("<").append(std::to_string(leaf)) + ">"};
    while (node.level + 1 < fold_levels && (node.at >> node.level) % 2 == 1 &&
           waiting[static_cast<std::size_t>(node.level)]) {
      std::optional<Node>& left = waiting[static_cast<std::size_t>(node.level)];
      node = {left->at, node.level + 1, merged(left->state, node.state)};
      left.reset();
    }
    if (node.level + 1 < fold_levels && (node.at >> node.level) % 2 == 1)
      run.nodes.push_back(node);  // its left half is elsewhere
    else waiting[static_cast<std::size_t>(node.level)] = node;
  }
  if (first > 0 || last < leaves) {
    for (int level = fold_levels - 1; level >= 0; --level)
      if (waiting[static_cast<std::size_t>(level)]) run.nodes.push_back(*waiting[static_cast<std::size_t>(level)]);
    return run;
  }
  for (const std::optional<Node>& node : waiting)
    if (node) run.whole = run.whole.empty() ? node->state : merged(node->state, run.whole);
  return run;
}

// The tree over 64 leaves, where missing leaves are empty states, from nodes that cover it.
std::string tree(const std::vector<Node>& nodes) {
  std::array<std::string, max_leaves> state;
  std::array<int, max_leaves> came;
  came.fill(-1);
  for (const Node& node : nodes) {
    state[static_cast<std::size_t>(node.at)] = node.state;
    came[static_cast<std::size_t>(node.at)] = node.level;
  }
  const auto merge = [&](std::string& a, const std::string& b) { a = a.empty() ? b : b.empty() ? a : merged(a, b); };
  for (int level = 1; level < fold_levels; ++level)
    for (int start = 0; start < max_leaves; start += 1 << level)
      if (came[static_cast<std::size_t>(start)] < level)
        merge(state[static_cast<std::size_t>(start)], state[static_cast<std::size_t>(start + (1 << (level - 1)))]);
  return state[0];
}

TEST(DecodeSchedule, DividesRoundedUp) {
  for (int bits = 0; bits < 12; ++bits)
    for (const int b : {(1 << bits) - 1, 1 << bits, (1 << bits) + 1})
      for (int a = 0; b > 0 && a < 5 * b + 3; ++a) ASSERT_EQ(divide_up_round(a, b), (a + b - 1) / b) << a << " / " << b;
}

TEST(DecodeSchedule, RunsDecomposeExactlyAndFitTheirSlots) {
  for (int first = 0; first < max_leaves; ++first)
    for (int last = first + 1; last <= max_leaves; ++last) {
      int count = 0, at = first;
      while (at < last) {
        const int level = node_level(at, last);
        ASSERT_GE(level, 0);
        ASSERT_LT(level, fold_levels);
        ASSERT_EQ(at % (1 << level), 0);
        at += 1 << level;
        ++count;
      }
      ASSERT_EQ(at, last);
      ASSERT_LE(count, first > 0 ? slots_inside : slots_start) << first << ", " << last;
    }
}

TEST(DecodeSchedule, AFoldLeavesTheCanonicalNodesInOrder) {
  for (int first = 0; first < max_leaves; ++first)
    for (int last = first + 1; last <= max_leaves; ++last) {
      const Folded run = fold(first, last, last + 1);  // a run that does not end its task
      int at = first;
      for (const Node& node : run.nodes) {
        ASSERT_EQ(node.at, at);
        ASSERT_EQ(node.level, node_level(at, last));
        at += 1 << node.level;
      }
      ASSERT_EQ(at, last);
    }
}

TEST(DecodeSchedule, AnySplitOfARowIsTheExpressionOfOneBlock) {
  Random random(1);
  for (int leaves = 1; leaves <= max_leaves; ++leaves) {
    const std::string expected = fold(0, leaves, leaves).whole;
    EXPECT_EQ(std::count(expected.begin(), expected.end(), '<'), leaves);
    for (int trial = 0; trial < 60; ++trial) {
      std::vector<Node> nodes;
      for (int first = 0; first < leaves;) {
        const int last = std::min(leaves, first + between(random, 1, trial % 2 ? leaves : 5));
        const Folded run = fold(first, last, leaves);
        if (!run.whole.empty()) { ASSERT_EQ(run.whole, expected); }
        nodes.insert(nodes.end(), run.nodes.begin(), run.nodes.end());
        first = last;
      }
      if (!nodes.empty()) { ASSERT_EQ(tree(nodes), expected) << leaves << " leaves"; }
    }
  }
}

TEST(DecodeSchedule, LeavesAreFewAndLongOnlyInLongRows) {
  Random random(2);
  for (int trial = 0; trial < 20000; ++trial) {
    const KvFormat format = trial % 2 ? KvFormat::int4_kivi : KvFormat::int8;
    const int tokens = trial < 9000   ? trial + 1
                       : trial < 9200 ? (trial - 8999) * max_leaves * 128
                                      : between(random, 1, trial % 4 < 2 ? 1 << 20 : 0x7fffff80);
    const std::int64_t units = leaf_units(format, tokens), leaf = units * unit_tokens,
                       leaves = (tokens + leaf - 1) / leaf;
    ASSERT_GE(units, 4);
    ASSERT_EQ(units % 4, 0);  // a tile for each warp
    ASSERT_LE(leaves, max_leaves) << tokens;
    ASSERT_TRUE(units == 4 || leaves > 4) << tokens;
    ASSERT_TRUE(units > 4 || tokens <= 2048) << tokens;
    ASSERT_LE(units, leaf_units(format, tokens == 0x7fffff80 ? tokens : tokens + 1)) << tokens;
  }
}

TEST(DecodeSchedule, LeafFromFindsTheFirstLeafThatStartsThere) {
  for (int units : {1, 2, 7})
    for (int paged : {0, 1, 5, 35, 64 * 7})
      for (bool raw : {false, true}) {
        RowWork w;
        w.units = units;
        w.leaf_cost = units + 2;
        w.begin = 64;
        w.end = w.begin + paged * unit_tokens;
        w.leaves = paged == 0 && raw ? 1 : divide_up(paged, units);
        w.raw = raw;
        for (int unit = -3; unit <= w.task_units(); ++unit) {
          int expected = 0;
          while (expected < w.leaves && w.leaf_begin(expected) < unit) ++expected;
          ASSERT_EQ(w.leaf_from(unit), expected)
              << units << " units, " << w.leaves << " leaves, raw " << raw << ", from " << unit;
        }
      }
}

// What queries see of one row, token by token.
TEST(DecodeSchedule, ARowsWorkIsWhatItsQueriesSee) {
  Random random(3);
  for (int trial = 0; trial < 20000; ++trial) {
    const KvFormat format =
        std::array{KvFormat::fp16, KvFormat::int8, KvFormat::int4_kivi}[static_cast<std::size_t>(trial % 3)];
    const int tokens = between(random, 1, 32), count = between(random, 0, tokens),
              length = between(random, 0, trial % 2 ? 200 : 20000);
    const int window = trial % 5 < 2 ? between(random, 1, 300) : 0;
    const RowWork w = row_work(format, 20000, 3, 4, length, count, tokens, 0, window);
    SCOPED_TRACE(testing::Message() << name(format) << " length " << length << " count " << count << " window "
                                    << window);
    ASSERT_EQ(w.fault, KvFault::none);
    ASSERT_EQ(w.row, 3);
    if (length == 0 || count == 0) {
      ASSERT_EQ(w.task_units(), 0);
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
      const std::int64_t leaf = std::int64_t{w.units} * unit_tokens;
      ASSERT_EQ(w.units, leaf_units(format, w.end - w.begin));
      ASSERT_GE(w.leaves * leaf, w.end - w.begin);
      ASSERT_LT((w.leaves - 1) * leaf, w.end - w.begin);
    } else {
      ASSERT_TRUE(is_kivi(format)) << "a query of a row that holds tokens sees its own";
      ASSERT_EQ(w.leaves, 1);  // of raw tokens alone
    }
    ASSERT_LE(w.leaves, max_leaves);
    ASSERT_EQ(w.task_units(), (w.end - w.begin + 31) / 32 + (w.raw ? 1 : 0));
    ASSERT_GE(w.leaves, 1);
  }
}

TEST(DecodeSchedule, WhatCannotBeIsAFaultAndNoWork) {
  const auto fault = [](KvFormat f, int row, int length, int count, int raw_from) {
    const RowWork w = row_work(f, 1000, row, 4, length, count, 8, raw_from, 0);
    EXPECT_TRUE(w.fault == KvFault::none || w.task_units() == 0);
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
  // the group of the first query must still be there raw
  EXPECT_EQ(fault(KvFormat::int4_kivi, 0, 70, 1, 64), KvFault::none);
  EXPECT_EQ(fault(KvFormat::int4_kivi, 0, 70, 1, 65), KvFault::raw);
  EXPECT_EQ(fault(KvFormat::int4_kivi, 0, 70, 8, 64), KvFault::raw);  // it stands at 62
  EXPECT_EQ(fault(KvFormat::int4_kivi, 0, 5, 8, 0), KvFault::none);   // fewer tokens than queries
}

TEST(DecodeSchedule, SharesOfTheUnits) {
  Random random(4);
  for (int trial = 0; trial < 2000; ++trial) {
    const int total = between(random, 1, trial % 2 ? 500 : 1 << 30), blocks = between(random, 1, 300);
    const Split split(total, blocks, trial % 3 == 0);
    ASSERT_EQ(split.begin(0), 0);
    ASSERT_EQ(split.begin(blocks), total);
    const std::int64_t least = (total + blocks - 1) / blocks;
    ASSERT_GE(split.each, least);
    ASSERT_LE(split.each - least, trial % 3 == 0 ? least / 16 : 0) << "no share is much larger than it must be";
    for (int block = 0; block < blocks; ++block) {
      const int begin = split.begin(block), end = split.begin(block + 1);
      ASSERT_LE(begin, end);
      if (begin == end) continue;
      ASSERT_EQ(split.owner(begin), block);
      ASSERT_EQ(split.owner(end - 1), block);
    }
  }
}

// The walk of all blocks over a whole batch, with what the combine expects to find.
TEST(DecodeSchedule, EveryLeafHasOneOwnerAndEveryRowItsExpression) {
  Random random(5);
  std::vector<std::string> expected(max_leaves + 1);
  for (int leaves = 1; leaves <= max_leaves; ++leaves)
    expected[static_cast<std::size_t>(leaves)] = fold(0, leaves, leaves).whole;
  int ranked = 0;
  for (int trial = 0; trial < 600; ++trial) {
    const KvFormat format = trial % 2 ? KvFormat::int4_kivi : KvFormat::bf16;
    const int batch = between(random, 1, trial % 3 ? 6 : 40), tasks = between(random, 1, 12),
              blocks = between(random, 1, trial % 5 ? 40 : 396);
    const int longest = std::array{40, 3000, 60000}[static_cast<std::size_t>(trial % 3)];
    std::vector<RowWork> works;
    for (int b = 0; b < batch; ++b) {
      const int length = between(random, 0, 4) == 0 ? 0 : between(random, 0, longest);
      works.push_back(row_work(format, longest, b, batch, trial % 7 < 3 ? longest : length,
                               trial % 7 < 3 ? 3 : between(random, 0, 3), 3, 0, trial % 4 ? 0 : 500));
    }
    const bool even = std::all_of(works.begin(), works.end(),
                                  [&](const RowWork& w) { return w.task_units() == works[0].task_units(); });
    int total = 0;
    for (RowWork& w : works) {
      if (!even) w.weigh(format);
      total += w.task_units() * tasks;
    }
    if (total == 0) continue;
    const Split split(total, blocks, even);
    const int ranks = ranks_of(even, works[0].task_units(), ranks_if_even(std::int64_t{batch} * tasks, blocks));
    ranked += ranks > 0;
    std::vector<int> slots_used(static_cast<std::size_t>(blocks * slots_per_block));
    int base = 0, task_index = 0;
    for (const RowWork& w : works) {
      const int leaves = w.leaves;
      for (int task = 0; task < tasks && w.task_units() > 0; ++task, ++task_index, base += w.task_units()) {
        const auto owner = [&](int leaf) {
          return ranks ? task_index * ranks + w.rank_of_leaf(leaf, ranks) : split.owner(base + w.leaf_begin(leaf));
        };
        std::vector<int> owners(static_cast<std::size_t>(leaves), -1);
        std::vector<Node> nodes;
        int whole = 0;
        for (int block = 0; block < blocks; ++block) {
          const int begin = split.begin(block), end = split.begin(block + 1), rank = block - task_index * ranks;
          if (ranks ? rank < 0 || rank >= ranks : begin >= end || base >= end || base + w.task_units() <= begin)
            continue;
          const int first = ranks ? w.leaf_of_rank(rank, ranks) : w.leaf_from(begin - base);
          const int last = ranks ? w.leaf_of_rank(rank + 1, ranks) : std::min(leaves, w.leaf_from(end - base));
          for (int leaf = first; leaf < last; ++leaf) {
            ASSERT_EQ(owners[static_cast<std::size_t>(leaf)], -1);
            owners[static_cast<std::size_t>(leaf)] = block;
            ASSERT_EQ(owner(leaf), block);  // what the combine looks for
          }
          if (first >= last) continue;
          const Folded run = fold(first, last, leaves);
          if (!run.whole.empty()) {
            ++whole;
            ASSERT_EQ(run.whole, expected[static_cast<std::size_t>(leaves)]);
          }
          ASSERT_LE(run.nodes.size(), static_cast<std::size_t>(first > 0 ? slots_inside : slots_start));
          int slot = block * slots_per_block + (first > 0 ? 0 : slots_inside);
          for (const Node& node : run.nodes) {
            ASSERT_EQ(slots_used[static_cast<std::size_t>(slot++)]++, 0) << "a slot holds two nodes";
            nodes.push_back(node);
          }
        }
        ASSERT_EQ(std::count(owners.begin(), owners.end(), -1), 0);
        // the combine's question: did one block write the result?
        ASSERT_EQ(whole, owner(0) == owner(leaves - 1) ? 1 : 0);
        if (!whole) { ASSERT_EQ(tree(nodes), expected[static_cast<std::size_t>(leaves)]); }
      }
    }
    ASSERT_EQ(base, total);
  }
  EXPECT_GT(ranked, 30);
}

TEST(DecodeSchedule, RanksShareATaskEvenly) {
  Random random(6);
  for (int trial = 0; trial < 4000; ++trial) {
    const KvFormat format = trial % 2 ? KvFormat::int4_kivi : KvFormat::bf16;
    const int length = between(random, 1, trial % 3 ? 5000 : 1 << 24), ranks = between(random, 1, trial % 4 ? 40 : 500);
    const RowWork w = row_work(format, length, 0, 1, length, 1, 1, 0, 0);
    ASSERT_EQ(w.leaf_of_rank(0, ranks), 0);
    ASSERT_EQ(w.leaf_of_rank(ranks, ranks), w.leaves);
    for (int rank = 0; rank < ranks; ++rank) {
      const int first = w.leaf_of_rank(rank, ranks), last = w.leaf_of_rank(rank + 1, ranks);
      ASSERT_LE(first, last);
      ASSERT_LE(last - first, (w.leaves + ranks - 1) / ranks + 1);
      for (int leaf = first; leaf < last; ++leaf) ASSERT_EQ(w.rank_of_leaf(leaf, ranks), rank) << length;
    }
  }
}

TEST(DecodeSchedule, FewEvenTasksHaveTheirOwnBlocks) {
  EXPECT_EQ(ranks_of(true, 32, ranks_if_even(8, 264)), 33);
  EXPECT_EQ(ranks_of(true, 33, ranks_if_even(64, 264)), 4);
  EXPECT_EQ(ranks_of(true, 33, ranks_if_even(100, 264)), 0);  // 64 blocks would have nothing to do
  EXPECT_EQ(ranks_of(true, 33, ranks_if_even(200, 264)), 0);
  EXPECT_EQ(ranks_of(false, 33, ranks_if_even(64, 264)), 0);
  EXPECT_EQ(ranks_of(true, 1 << 19, ranks_if_even(64, 264)), 0);
  EXPECT_EQ(ranks_of(true, 33, ranks_if_even(std::int64_t{1} << 40, 264)), 0);
}

// A cluster's blocks can keep all leaves that a row of so many tokens can have.
TEST(DecodePlan, ClustersHaveRoomForTheirLeaves) {
  int clusters = 0;
  for (std::int64_t batch : {1, 2, 8, 16, 32})
    for (int kv_heads : {1, 3, 8})
      for (int per_sm : {2, 3})
        for (std::int64_t visible : {1, 500, 1024, 1920, 2048, 4096, 5000}) {
          const DecodePlan plan = plan_decode({batch, 1, kv_heads, 4, 128, columns, visible}, {132, per_sm, 8});
          const DecodePlan any = plan_decode({batch, 1, kv_heads, 4, 128, columns, 1 << 20}, {132, per_sm, 8});
          EXPECT_LE(plan.workspace_bytes, any.workspace_bytes);  // asked for without the window
          EXPECT_EQ(any.cluster, 1);
          if (plan.cluster == 1) continue;
          ++clusters;
          EXPECT_EQ(plan.blocks, plan.cluster * batch * kv_heads);
          EXPECT_LE(8 * plan.blocks, 7 * 132 * per_sm);
          EXPECT_EQ(plan.layers, 1);
          EXPECT_EQ(plan.workspace_bytes, 0u);
          for (int length = 1; length <= visible; ++length)
            for (KvFormat format : {KvFormat::fp16, KvFormat::int4_kivi}) {
              const RowWork w = row_work(format, visible, 0, 1, length, 1, 1, 0, 0);
              ASSERT_LE(w.leaves, cluster_leaves);
              ASSERT_LE(w.leaves, plan.cluster * cluster_slots);  // each block has its columns' states of all leaves
            }
        }
  EXPECT_GT(clusters, 20);
  EXPECT_EQ(plan_decode({1, 1, 8, 4, 128, columns, 1024}, {132, 2, 8}).cluster, 8);
  EXPECT_EQ(plan_decode({8, 1, 8, 4, 128, columns, 1024}, {132, 2, 8}).cluster, 2);
  EXPECT_EQ(plan_decode({16, 1, 3, 4, 128, columns, 2048}, {132, 2, 8}).cluster, 4);
  EXPECT_EQ(plan_decode({16, 1, 3, 4, 128, columns, 2049}, {132, 2, 8}).cluster, 1);
  EXPECT_EQ(plan_decode({1, 1, 8, 4, 128, columns, 1024}, {132, 2, 1}).cluster, 1);  // a device without clusters
}

TEST(DecodePlan, GridAndWorkspaceAreBoundedByTheDevice) {
  for (std::int64_t batch : {0, 1, 8, 64, 4096})
    for (std::int64_t tokens : {1, 4, 32})
      for (int kv_heads : {1, 8})
        for (int q_per_kv : {1, 4, 7, 16})
          for (int head_dim : {64, 128})
            for (int width : {8, 16})
              for (int sms : {46, 132})
                for (int per_sm : {2, 3}) {
                  const DecodePlan plan =
                      plan_decode({batch, tokens, kv_heads, q_per_kv, head_dim, width, 1 << 20}, {sms, per_sm, 8});
                  EXPECT_GE(plan.passes * width, tokens * q_per_kv);
                  EXPECT_LT((plan.passes - 1) * width, tokens * q_per_kv);
                  // every block that fits, but none without a leaf
                  EXPECT_EQ(plan.blocks,
                            std::min<std::int64_t>(sms * per_sm, batch * kv_heads * plan.passes * max_leaves));
                  EXPECT_EQ(plan.blocks % plan.layers, 0);
                  const std::size_t nodes =
                      static_cast<std::size_t>(plan.blocks) * slots_per_block * static_cast<std::size_t>(width);
                  EXPECT_GE(plan.node_o, (static_cast<std::size_t>(batch) + 2) * 4);
                  EXPECT_GE(plan.node_ml - plan.node_o, nodes * static_cast<std::size_t>(head_dim) * 4);
                  EXPECT_GE(plan.fold - plan.node_ml, nodes * 8);
                  const std::size_t fold = static_cast<std::size_t>(plan.blocks * fold_levels * width * head_dim) * 4;
                  EXPECT_GE(plan.workspace_bytes - plan.fold, fold);
                  EXPECT_EQ(plan.node_o % 16 + plan.node_ml % 16 + plan.fold % 16, 0u);
                  EXPECT_LE(plan.workspace_bytes, static_cast<std::size_t>(batch) * 4 +
                                                      nodes * static_cast<std::size_t>(head_dim + 2) * 4 + fold +
                                                      3 * 256);
                }
}

TEST(DecodePlan, ALongRowAloneFillsTheDevice) {
  EXPECT_EQ(plan_decode({1, 1, 8, 4, 128, columns, 1 << 20}, {132, 2, 8}).blocks, 264);
}

}  // namespace
}  // namespace rooftile::gpu
