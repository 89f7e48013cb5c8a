// SPDX-License-Identifier: Apache-2.0
// How a row is cut, and who computes which piece. Pure arithmetic, the same on host and device.
//
// Leaves. A row's visible tokens are cut into at most 64 leaves of equal size, from the row alone. The raw tokens of a
// kivi row are one leaf more. A leaf's result is a softmax state (m, l, o).
//
// The fold. States are merged along one binary tree over the leaves: node (level, i) covers leaves
// [i << level, (i + 1) << level) and is the merge of its two halves. Leaves that no full node covers are merged from the
// right. So the bits of a row do not depend on how many thread blocks computed it, and a block with a long run of leaves
// stores few nodes: those that no longer run would have merged (the canonical decomposition of its run).
//
// Who. Work is counted in units of 128 tokens. A task is one (batch entry, KV head, pass of 8 query columns); tasks lie
// one after another, batch entries outermost, each leaf taking as many units as it has. Block b of n owns the leaves that
// start in units [total * b / n, total * (b + 1) / n).
#pragma once

#include <cstdint>

#include "core/hd.h"
#include "core/kv_layout.h"

namespace rooftile::gpu {

inline constexpr int unit_tokens = 128;   // four warps, a tile of 32 tokens each
inline constexpr int max_leaves = 64;     // without the raw one
inline constexpr int fold_levels = 7;     // 65 leaves: levels 0 to 6
inline constexpr int columns = 8;         // query heads (times new tokens) of one pass: the N of one mma
// Nodes a block may have to store: of a run that ends or crosses a task it did not start (canonical, both ends ragged),
// and of a run that starts a task it does not end (ragged on the right only).
inline constexpr int slots_inside = 12, slots_start = 7, slots_per_block = slots_inside + slots_start;

// Units of one leaf, from how many tokens the row shows.
ROOFTILE_HD constexpr int leaf_units(std::int64_t tokens) {
  const std::int64_t most = std::int64_t{max_leaves} * unit_tokens;
  return tokens <= most ? 1 : static_cast<int>((tokens + most - 1) / most);
}

// What one batch entry has to do.
struct RowWork {
  int row = 0;                  // of the cache
  int length = 0, count = 0;    // tokens stored; queries that are real, the last of them at position length - 1
  int begin = 0, end = 0;       // tokens [begin, end) are read from pages; begin is a multiple of 32
  int units = 1;                // of a leaf
  int leaves = 0;               // of pages, and one more if `raw`
  bool raw = false;
  KvFault fault = KvFault::none;

  ROOFTILE_HD int all_leaves() const { return leaves + (raw ? 1 : 0); }
  ROOFTILE_HD std::int64_t task_units() const { return std::int64_t{leaves} * units + (raw ? 1 : 0); }
  ROOFTILE_HD std::int64_t leaf_begin(int leaf) const { return std::int64_t{leaf} * units; }   // in units
  // The first leaf that starts at `unit` or later.
  ROOFTILE_HD int leaf_from(std::int64_t unit) const {
    if (unit <= 0) return 0;
    const std::int64_t paged = std::int64_t{leaves} * units;
    if (unit > paged) return all_leaves();
    return static_cast<int>((unit + units - 1) / units);   // == leaves: the raw one
  }
};

// length, count, raw_from as read; every one of them may be wrong.
ROOFTILE_HD inline RowWork row_work(KvFormat format, std::int64_t capacity, int row, int max_rows, int length, int count,
                                    int tokens, int raw_from, std::int64_t window) {
  RowWork w;
  w.row = row;
  w.length = length;
  w.count = count;
  if (row < 0 || row >= max_rows) w.fault = KvFault::row;
  else if (length < 0 || length > capacity) w.fault = KvFault::length;
  else if (count < 0 || count > tokens) w.fault = KvFault::count;
  if (w.fault != KvFault::none || length == 0 || count == 0) return w;
  const int first = length > count ? length - count : 0;   // position of the first query that can see anything
  std::int64_t begin = window > 0 && first + 1 > window ? first + 1 - window : 0;
  w.begin = static_cast<int>(begin / 32 * 32);
  w.end = length;
  if (is_kivi(format)) {
    w.end = static_cast<int>(kivi_code_end(length - 1));
    w.raw = true;
    if (kivi_code_end(first) < raw_from) w.fault = KvFault::raw;
    if (w.fault != KvFault::none) {
      w.raw = false;
      return w;
    }
  }
  if (w.end <= w.begin) return w;
  w.units = leaf_units(w.end - w.begin);
  w.leaves = static_cast<int>((w.end - w.begin + std::int64_t{w.units} * unit_tokens - 1) / (std::int64_t{w.units} * unit_tokens));
  return w;
}

// The units of all tasks over the blocks, as evenly as whole units allow.
struct Split {
  std::int64_t each;
  std::uint32_t rest, blocks;

  ROOFTILE_HD Split(std::int64_t total, int blocks)
      : each(total / blocks), rest(static_cast<std::uint32_t>(total % blocks)), blocks(static_cast<std::uint32_t>(blocks)) {}
  // First unit of a block. (rest * block fits: both are less than the few thousand blocks a device holds.)
  ROOFTILE_HD std::int64_t begin(int block) const { return each * block + rest * static_cast<std::uint32_t>(block) / blocks; }
  // The block that owns `unit`: the last one whose first unit is not behind it.
  ROOFTILE_HD int owner(std::int64_t unit) const {
    int low = 0, high = static_cast<int>(blocks) - 1;
    while (low < high) {
      const int middle = (low + high + 1) / 2;
      if (begin(middle) <= unit) low = middle;
      else high = middle - 1;
    }
    return low;
  }
};

// Level of the node that starts the canonical decomposition of leaves [at, end).
ROOFTILE_HD inline int node_level(int at, int end) {
  int level = 0;
  while (level + 1 < fold_levels && at % (2 << level) == 0 && at + (2 << level) <= end) ++level;
  return level;
}

}  // namespace rooftile::gpu
