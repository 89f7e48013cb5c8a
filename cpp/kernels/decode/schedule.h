// SPDX-License-Identifier: Apache-2.0
// How a row is cut, and who computes which piece. Pure arithmetic, the same on host and device.
//
// Leaves. A row's visible tokens are cut into at most 64 leaves of equal size, from the row alone. The raw tokens of a
// kivi row belong to its last leaf, or are its only one. A leaf's result is a softmax state (m, l, o).
//
// The fold. States are merged along one binary tree over the leaves: node (level, i) covers leaves
// [i << level, (i + 1) << level) and is the merge of its two halves. Leaves that no full node covers are merged from
// the right. So the bits of a row do not depend on how many thread blocks computed it, and a block with a long run of
// leaves stores few nodes: those that no longer run would have merged (the canonical decomposition of its run).
//
// Who. Work is counted in units, the time that 32 tokens take. A task is one (batch entry, KV head, pass of 8 query
// columns); tasks lie one after another, batch entries outermost. Every block owns the leaves that start in its share
// of the units, and all shares but the last are equal. Where all tasks are as long, a task has as many units as tokens
// / 32, so that shares are whole tasks or whole nodes of the tree; where they differ it has more, for what the ends of
// its leaves, its raw tokens and its start take: a share of many short rows would else take longest.
//
// Few tasks of the same length have each a whole number of blocks to themselves, and no block has parts of two. In a
// small batch of short rows these blocks are a cluster, which merges their states itself.
//
// Units are counted in 32 bits (dispatch.cpp refuses what would not fit): this arithmetic is the fixed cost of a short
// call, and so are divisions, some 25 instructions that wait for each other.
#pragma once

#include <cstdint>

#include "core/divisor.h"
#include "core/hd.h"
#include "core/kv_layout.h"

namespace rooftile::gpu {

inline constexpr int unit_tokens = 32;  // a tile of codes
inline constexpr int max_leaves = 64;
inline constexpr int fold_levels = 7;      // 0 to 6
inline constexpr int cluster_leaves = 16;  // of a task that a cluster computes
inline constexpr int cluster_slots = 4;    // times 8: states of (leaf, column) that a block of it has room for
// Up to how many tokens a row may have for a cluster of so many blocks.
ROOFTILE_HD constexpr int cluster_tokens(int blocks) { return 512 * blocks; }
inline constexpr int columns = 8;  // query heads (times new tokens) of one pass: the N of one mma
// Nodes a block may have to store: of a run that ends or crosses a task it did not start (canonical, both ends ragged),
// and of a run that starts a task it does not end (ragged on the right only).
inline constexpr int slots_inside = 10, slots_start = 6, slots_per_block = slots_inside + slots_start;

// a / b, neither negative; most often by 1.
ROOFTILE_HD constexpr int divide(int a, int b) {
  return b == 1 ? a : static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
}
ROOFTILE_HD constexpr int divide_up(int a, int b) {
  return b == 1
             ? a
             : static_cast<int>((static_cast<unsigned>(a) + static_cast<unsigned>(b) - 1) / static_cast<unsigned>(b));
}

// Units of one leaf, from how many tokens the row shows; a multiple of 4, a tile for each of four warps. Few leaves, as
// each ends with a merge that costs as much as 64 tokens and, of 4-bit codes, as twice as many; but enough of them for
// one row of eight KV heads to fill a device.
ROOFTILE_HD constexpr int leaf_units(KvFormat format, int tokens) {
  constexpr int tiles = 4 * unit_tokens;
  if (tokens <= 16 * tiles) return 4;
  if (tokens <= 32 * tiles) return 8;
  if (tokens <= 64 * tiles) return code_bits(format) == 4 ? 16 : 8;
  if (tokens <= 128 * tiles) return 16;
  constexpr unsigned most = max_leaves * tiles;
  const unsigned least = (static_cast<unsigned>(tokens) + most - 1) / most;
  return 4 * static_cast<int>(least > 8 ? least : 8);
}

ROOFTILE_HD inline int log2_of(int x) {  // x > 0, rounded down
#ifdef __CUDA_ARCH__
  return 31 - __clz(x);
#else
  return std::bit_width(static_cast<unsigned>(x)) - 1;
#endif
}
// a / b, rounded up, where b most often is a power of two.
ROOFTILE_HD inline int divide_up_round(int a, int b) {
  return (b & (b - 1)) == 0 ? (a + b - 1) >> log2_of(b) : divide_up(a, b);
}

// What one batch entry has to do.
struct RowWork {
  int row = 0;                // of the cache
  int length = 0, count = 0;  // tokens stored; queries that are real, the last of them at position length - 1
  int begin = 0, end = 0;     // tokens [begin, end) are read from pages; begin is a multiple of 32
  int units = 1;              // of a leaf
  int leaves = 0;
  int leaf_cost = 1;  // units of time of a leaf: `units`, or more in a batch of rows of different lengths
  bool raw = false;   // the last leaf has raw tokens too
  KvFault fault = KvFault::none;

  // For a batch of rows of different lengths.
  ROOFTILE_HD void weigh(KvFormat format) { leaf_cost = units + (is_element_format(format) ? 1 : 2); }
  ROOFTILE_HD int task_units() const {
    const int tokens = divide_up(end - begin, unit_tokens) + leaves * (leaf_cost - units);
    if (leaf_cost == units) return tokens + (raw ? 1 : 0);
    return leaves == 0 ? 0 : tokens + (raw ? 2 : 0) + 4;  // the raw tokens, and the wait for a first tile
  }
  ROOFTILE_HD int leaf_begin(int leaf) const { return leaf * leaf_cost; }
  // The first leaf that starts at `unit` or later.
  ROOFTILE_HD int leaf_from(int unit) const {
    if (unit <= 0) return 0;
    const int leaf = divide_up(unit, leaf_cost);
    return leaf < leaves ? leaf : leaves;
  }
  // A task of `ranks` blocks: a leaf belongs to the one in whose share of the tokens its middle lies. That one, and the
  // first leaf of a block; in parts of 1 / (2 ranks) of a unit.
  ROOFTILE_HD int rank_of_leaf(int leaf, int ranks) const {
    const int rank = divide((2 * leaf + 1) * units * ranks, 2 * task_units());
    return rank < ranks ? rank : ranks - 1;
  }
  ROOFTILE_HD int leaf_of_rank(int rank, int ranks) const {
    if (rank >= ranks) return leaves;
    const int share = 2 * task_units() * rank, leaf = units * ranks;
    const int first = share <= leaf ? 0 : divide_up_round(share - leaf, 2 * leaf);
    return first < leaves ? first : leaves;
  }
};

// length, count, raw_from as read; every one of them may be wrong.
ROOFTILE_HD inline RowWork row_work(KvFormat format, int capacity, int row, int max_rows, int length, int count,
                                    int tokens, int raw_from, int window) {
  RowWork w;
  w.row = row;
  w.length = length;
  w.count = count;
  if (row < 0 || row >= max_rows) w.fault = KvFault::row;
  else if (length < 0 || length > capacity) w.fault = KvFault::length;
  else if (count < 0 || count > tokens) w.fault = KvFault::count;
  if (w.fault != KvFault::none || length == 0 || count == 0) return w;
  const int first = length > count ? length - count : 0;  // position of the first query that can see anything
  w.begin = window > 0 && first >= window ? (first + 1 - window) & ~31 : 0;
  w.end = length;
  if (is_kivi(format)) {
    static_assert(kv_group == 32);
    if ((first & ~31) < raw_from) {
      w.begin = w.end = 0;
      w.fault = KvFault::raw;
      return w;
    }
    w.end = (length - 1) & ~31;
    w.raw = true;
  }
  if (w.end < w.begin) w.end = w.begin;
  w.leaf_cost = w.units = leaf_units(format, w.end - w.begin);
  w.leaves = divide_up_round(divide_up(w.end - w.begin, unit_tokens), w.units);
  if (w.leaves == 0 && w.raw) w.leaves = 1;
  return w;
}

// The units of all tasks over the blocks. even: all tasks are as long; a long share is then a round number of units, at
// most a sixteenth more than it must be.
struct Split {
  int total, each;
  ROOFTILE_HD Split(int total, int blocks, bool even) : total(total), each(divide_up(total, blocks)) {
    int round = 1;
    while (even && each >> 5 >= round) round *= 2;
    each = (each + round - 1) & -round;
  }
  ROOFTILE_HD int begin(int block) const { return block * each < total ? block * each : total; }
  ROOFTILE_HD int owner(int unit) const { return divide(unit, each); }
};

// Where all tasks are as long and few, each has so many blocks to itself, if that leaves few without work; else 0.
inline int ranks_if_even(std::int64_t tasks, int blocks) {
  if (tasks == 0 || 2 * tasks > blocks) return 0;
  const int all = static_cast<int>(tasks), ranks = blocks / all;
  return 8 * all * ranks >= 7 * blocks ? ranks : 0;
}
ROOFTILE_HD constexpr int ranks_of(bool even, int task_units, int if_even) {
  return even && task_units < 1 << 19 ? if_even : 0;  // rank_of_leaf counts in 32 bits
}

// Level of the node that starts the canonical decomposition of leaves [at, end), at < end: as large as `at` is round
// and as the run is long.
ROOFTILE_HD inline int node_level(int at, int end) {
  const int long_enough = log2_of(end - at), round = at == 0 ? fold_levels - 1 : log2_of(at & -at);
  return long_enough < round ? long_enough : round;
}

}  // namespace rooftile::gpu
