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

inline constexpr int work_unit_tokens = 32;  // a tile of codes
inline constexpr int max_splits = 64;
inline constexpr int reduction_levels = 7;  // 0 to 6
inline constexpr int cluster_splits = 16;   // of a task that a cluster computes
inline constexpr int cluster_partials = 4;  // times 8: states of (leaf, column) that a block of it has room for
// Up to how many tokens a row may have for a cluster of so many blocks.
ROOFTILE_HD constexpr int cluster_tokens(int ctas) { return 512 * ctas; }
inline constexpr int mma_n = 8;  // query heads (times new tokens) of one pass: the N of one mma
// Nodes a block may have to store: of a run that ends or crosses a task it did not start (canonical, both ends ragged),
// and of a run that starts a task it does not end (ragged on the right only).
inline constexpr int partials_inside = 10, partials_start = 6, partials_per_cta = partials_inside + partials_start;

// a / b, neither negative; most often by 1.
ROOFTILE_HD constexpr int divide(int a, int b) {
  return b == 1 ? a : static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
}
ROOFTILE_HD constexpr int ceil_div(int a, int b) {
  return b == 1
             ? a
             : static_cast<int>((static_cast<unsigned>(a) + static_cast<unsigned>(b) - 1) / static_cast<unsigned>(b));
}

// Units of one leaf, from how many tokens the row shows; a multiple of 4, a tile for each of four warps. Few leaves, as
// each ends with a merge that costs as much as 64 tokens and, of 4-bit codes, as twice as many; but enough of them for
// one row of eight KV heads to fill a device.
ROOFTILE_HD constexpr int kv_split_units(KvFormat format, int tokens) {
  constexpr int step_tokens = 4 * work_unit_tokens;
  if (tokens <= 16 * step_tokens) return 4;
  if (tokens <= 32 * step_tokens) return 8;
  if (tokens <= 64 * step_tokens) return code_bits(format) == 4 ? 16 : 8;
  if (tokens <= 128 * step_tokens) return 16;
  constexpr unsigned most = max_splits * step_tokens;
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
ROOFTILE_HD inline int ceil_div_pow2(int a, int b) {
  return (b & (b - 1)) == 0 ? (a + b - 1) >> log2_of(b) : ceil_div(a, b);
}

// What one batch entry has to do.
struct RowWork {
  int row = 0;                // of the cache
  int length = 0, count = 0;  // tokens stored; queries that are real, the last of them at position length - 1
  int begin = 0, end = 0;     // tokens [begin, end) are read from pages; begin is a multiple of 32
  int split_units = 1;        // of a leaf
  int splits = 0;
  int split_cost = 1;  // units of time of a leaf: `units`, or more in a batch of rows of different lengths
  bool raw = false;    // the last leaf has raw tokens too
  KvFault fault = KvFault::none;

  // For a batch of rows of different lengths.
  ROOFTILE_HD void add_overheads(KvFormat format) { split_cost = split_units + (is_element_format(format) ? 1 : 2); }
  ROOFTILE_HD int work_tile_units() const {
    const int units = ceil_div(end - begin, work_unit_tokens) + splits * (split_cost - split_units);
    if (split_cost == split_units) return units + (raw ? 1 : 0);
    return splits == 0 ? 0 : units + (raw ? 2 : 0) + 4;  // the raw tokens, and the wait for a first tile
  }
  ROOFTILE_HD int split_begin(int split) const { return split * split_cost; }
  // The first leaf that starts at `unit` or later.
  ROOFTILE_HD int first_split_from(int unit) const {
    if (unit <= 0) return 0;
    const int split = ceil_div(unit, split_cost);
    return split < splits ? split : splits;
  }
  // A task of `ranks` blocks: a leaf belongs to the one in whose share of the tokens its middle lies. That one, and the
  // first leaf of a block; in parts of 1 / (2 ranks) of a unit.
  ROOFTILE_HD int cta_of_split(int split, int ctas) const {
    const int cta = divide((2 * split + 1) * split_units * ctas, 2 * work_tile_units());
    return cta < ctas ? cta : ctas - 1;
  }
  ROOFTILE_HD int first_split_of_cta(int cta, int ctas) const {
    if (cta >= ctas) return splits;
    const int range = 2 * work_tile_units() * cta, split = split_units * ctas;
    const int first = range <= split ? 0 : ceil_div_pow2(range - split, 2 * split);
    return first < splits ? first : splits;
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
  w.split_cost = w.split_units = kv_split_units(format, w.end - w.begin);
  w.splits = ceil_div_pow2(ceil_div(w.end - w.begin, work_unit_tokens), w.split_units);
  if (w.splits == 0 && w.raw) w.splits = 1;
  return w;
}

// The units of all tasks over the blocks. even: all tasks are as long; a long share is then a round number of units, at
// most a sixteenth more than it must be.
struct WorkPartition {
  int total, units_per_cta;
  ROOFTILE_HD WorkPartition(int total, int ctas, bool uniform) : total(total), units_per_cta(ceil_div(total, ctas)) {
    int alignment = 1;
    while (uniform && units_per_cta >> 5 >= alignment) alignment *= 2;
    units_per_cta = (units_per_cta + alignment - 1) & -alignment;
  }
  ROOFTILE_HD int begin(int cta) const { return cta * units_per_cta < total ? cta * units_per_cta : total; }
  ROOFTILE_HD int owner(int unit) const { return divide(unit, units_per_cta); }
};

// Where all tasks are as long and few, each has so many blocks to itself, if that leaves few without work; else 0.
inline int ctas_per_tile_if_uniform(std::int64_t work_tiles, int ctas) {
  if (work_tiles == 0 || 2 * work_tiles > ctas) return 0;
  const int all = static_cast<int>(work_tiles), ctas_per_tile = ctas / all;
  return 8 * all * ctas_per_tile >= 7 * ctas ? ctas_per_tile : 0;
}
ROOFTILE_HD constexpr int ctas_per_tile_of(bool uniform, int work_tile_units, int if_uniform) {
  return uniform && work_tile_units < 1 << 19 ? if_uniform : 0;  // rank_of_leaf counts in 32 bits
}

// Level of the node that starts the canonical decomposition of leaves [at, end), at < end: as large as `at` is round
// and as the run is long.
ROOFTILE_HD inline int partial_level(int at, int end) {
  const int long_enough = log2_of(end - at), alignment = at == 0 ? reduction_levels - 1 : log2_of(at & -at);
  return long_enough < alignment ? long_enough : alignment;
}

}  // namespace rooftile::gpu
