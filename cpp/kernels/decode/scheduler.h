// SPDX-License-Identifier: Apache-2.0
// How a cache row is split along its tokens, and which CTA computes which part. Pure arithmetic, the same on host and
// device.
//
// KV splits. A cache row's visible tokens are cut into at most 64 KV splits of equal size. The size follows from the
// row's own token count, its format and block_m, never from its neighbours. The raw tokens of a kivi row belong to its
// last split, or are its only one. The result of a split is a partial: (m, l, o) = (row maximum, sum of weights,
// weighted sum of V).
//
// Reduction. Partials are merged along one binary tree over the splits: the partial at (level, i) covers splits [i <<
// level, (i + 1) << level) and is the merge of its two halves. Splits that no full subtree covers are merged from the
// right. So the bits of a row do not depend on how many CTAs computed it. A CTA that owns a range of splits stores the
// fewest partials that the tree allows: the canonical decomposition of the range into full subtrees.
//
// Work distribution. A work tile is one (batch entry, KV head, m-block), an m-block being block_m packed query rows
// (query heads of the KV head x new tokens). Work tiles lie one after another, batch entries outermost. Their
// cost is counted in KV tiles, the time that 32 tokens take. Every CTA of the persistent grid has a range of it
// (stream-K) and owns the splits that start in its range; ranges have equal lengths, the last ones less or none. Where
// all work tiles have the same length, a work tile costs tokens / 32 and one for raw tokens, and ranges are rounded up
// to a multiple of a power of two, so that many begin where a work tile or a subtree does. Where lengths differ, the
// ends of splits, the start of a work tile and a second KV tile for raw tokens count too: otherwise a range of many
// short rows would take longest.
//
// Few work tiles of the same length get a whole number of CTAs each, and no CTA works on two tiles. In a small batch of
// short rows these CTAs form a cluster, which reduces its partials itself.
//
// Cost is counted in 32 bits (dispatch.cpp refuses larger calls). Every call pays for this arithmetic, a short call
// most: a division by a variable is a chain of some 25 instructions.
#pragma once

#include <cstdint>

#include "core/divisor.h"
#include "core/hd.h"
#include "core/kv_layout.h"

namespace rooftile::gpu {

inline constexpr int kv_tile_tokens = 32;  // tokens of a KV tile of codes. Cost is counted in these in every format
inline constexpr int max_splits = 64;
inline constexpr int reduction_levels = 7;  // levels 0 to 6
inline constexpr int cluster_splits = 16;   // KV splits of a work tile that a cluster computes, at most
// The most tokens that a cache row may have for a cluster of `ctas` CTAs.
ROOFTILE_HD constexpr int cluster_tokens(int ctas) { return 512 * ctas; }
// Partials for each packed row, times mma_n rows, in the shared memory of a CTA of a cluster. Its rows are mma_n / ctas
// of the work tile's, with a partial of each of at most cluster_tokens(ctas) / 256 splits.
inline constexpr int cluster_partials = 2;
static_assert(cluster_tokens(1) / 256 == cluster_partials && cluster_tokens(8) / 256 == cluster_splits);
inline constexpr int mma_n = 8;  // N of mma.m16n8k16: packed query rows of one MMA
// Partials that a CTA stores, at most. Inside: of a range that begins inside a work tile (canonical, both ends ragged).
// Start: of a range that begins at the start of a work tile and ends inside (only the right end is ragged).
inline constexpr int partials_inside = 10, partials_start = 6, partials_per_cta = partials_inside + partials_start;

// a / b, neither negative. Skips the division for b = 1, the usual case.
ROOFTILE_HD constexpr int divide(int a, int b) {
  return b == 1 ? a : static_cast<int>(static_cast<unsigned>(a) / static_cast<unsigned>(b));
}
ROOFTILE_HD constexpr int ceil_div(int a, int b) {
  return b == 1
             ? a
             : static_cast<int>((static_cast<unsigned>(a) + static_cast<unsigned>(b) - 1) / static_cast<unsigned>(b));
}

// KV tiles of one KV split of a row with `tokens` visible tokens: a multiple of 4, one KV tile for each of four
// warps. Splits are few, because the merge at the end of each costs as much as 64 tokens (with 4-bit codes 128). They
// are enough for one cache row with eight KV heads to fill a device. block_m: packed rows of a work tile; with 16 a
// batch has half as many work tiles, or fewer, and no clusters: splits of 512 tokens would leave CTAs without one.
// The steps between the sizes are of an H200: up to 3072 tokens (with 16 packed rows 4096) splits of 256, which fill it
// best at batch 64; from there on twice as long for codes of 4 bits, whose tiles take half the time.
// 8 packed rows: 2000 tokens are 8 splits of 256, 4096 tokens 16 of 256 or in 4-bit codes 8 of 512, 20000 tokens 20 of
// 1024, 131072 tokens 64 of 2048.
ROOFTILE_HD constexpr int kv_split_tiles(KvFormat format, int block_m, int tokens) {
  constexpr int step_tokens = 4 * kv_tile_tokens;
  if (tokens <= (block_m == mma_n ? 24 : 32) * step_tokens) return 8;
  if (tokens <= 64 * step_tokens) return has_nibbles(format) ? 16 : 8;
  if (tokens <= 128 * step_tokens) return 16;
  constexpr unsigned most = max_splits * step_tokens;
  const unsigned least = (static_cast<unsigned>(tokens) + most - 1) / most;
  return 4 * static_cast<int>(least > 8 ? least : 8);
}

ROOFTILE_HD inline int log2_of(int x) {  // floor, x > 0
#ifdef __CUDA_ARCH__
  return 31 - __clz(x);
#else
  return std::bit_width(static_cast<unsigned>(x)) - 1;
#endif
}
// a / b rounded up. A power of two, the usual b, takes a shift.
ROOFTILE_HD inline int ceil_div_pow2(int a, int b) {
  return (b & (b - 1)) == 0 ? (a + b - 1) >> log2_of(b) : ceil_div(a, b);
}

// The work of one batch entry.
struct RowWork {
  int row = 0;                // of the cache
  int length = 0, count = 0;  // tokens stored; real queries: the last one is at position length - 1
  int begin = 0, end = 0;     // tokens [begin, end) are read from pages; begin is a multiple of 32
  int split_tiles = 1;        // tokens of a KV split / 32
  int splits = 0;
  int split_cost = 1;  // of a split: split_tiles, plus overhead where row lengths differ
  bool raw = false;    // the last split also has the raw tokens
  KvFault fault = KvFault::none;

  // For a batch of rows of different lengths: counts the end of a split as 1 KV tile (16-bit rows) or 2 (codes).
  ROOFTILE_HD void add_overheads(KvFormat format) { split_cost = split_tiles + (is_element_format(format) ? 1 : 2); }
  ROOFTILE_HD int work_tile_cost() const {
    const int cost = ceil_div(end - begin, kv_tile_tokens) + splits * (split_cost - split_tiles);
    if (split_cost == split_tiles) return cost + (raw ? 1 : 0);
    return splits == 0 ? 0 : cost + (raw ? 2 : 0) + 4;  // raw tokens: 2; the wait for the first tile: 4
  }
  ROOFTILE_HD int split_begin(int split) const { return split * split_cost; }
  // The first split that starts at `at` or later.
  ROOFTILE_HD int first_split_from(int at) const {
    if (at <= 0) return 0;
    const int split = ceil_div(at, split_cost);
    return split < splits ? split : splits;
  }
  // A work tile with `ctas` CTAs to itself: a split belongs to the CTA whose token range holds the split's midpoint.
  // cta_of_split: that CTA. first_split_of_cta: the first split of a CTA. Both compute in 1 / (2 ctas) of a KV tile.
  ROOFTILE_HD int cta_of_split(int split, int ctas) const {
    const int cta = divide((2 * split + 1) * split_tiles * ctas, 2 * work_tile_cost());
    return cta < ctas ? cta : ctas - 1;
  }
  ROOFTILE_HD int first_split_of_cta(int cta, int ctas) const {
    if (cta >= ctas) return splits;
    const int range = 2 * work_tile_cost() * cta, split = split_tiles * ctas;
    const int first = range <= split ? 0 : ceil_div_pow2(range - split, 2 * split);
    return first < splits ? first : splits;
  }
};

// block_m: packed rows of a work tile. length, count, raw_from: as read from device memory; any of them may be invalid.
ROOFTILE_HD inline RowWork row_work(KvFormat format, int block_m, int capacity, int row, int max_rows, int length,
                                    int count, int tokens, int raw_from, int window) {
  RowWork w;
  w.row = row;
  w.length = length;
  w.count = count;
  if (row < 0 || row >= max_rows) w.fault = KvFault::row;
  else if (length < 0 || length > capacity) w.fault = KvFault::length;
  else if (count < 0 || count > tokens) w.fault = KvFault::count;
  if (w.fault != KvFault::none || length == 0 || count == 0) return w;
  const int first = length > count ? length - count : 0;  // position of the first query that sees a token
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
  w.split_cost = w.split_tiles = kv_split_tiles(format, block_m, w.end - w.begin);
  w.splits = ceil_div_pow2(ceil_div(w.end - w.begin, kv_tile_tokens), w.split_tiles);
  if (w.splits == 0 && w.raw) w.splits = 1;
  return w;
}

// Stream-K partition of the cost of all work tiles over the CTAs. uniform: all work tiles have the same length;
// cost_per_cta is then rounded up to a multiple of a power of two, by at most a sixteenth.
struct WorkPartition {
  int total, cost_per_cta;  // of all work tiles, of one CTA
  ROOFTILE_HD WorkPartition(int total, int ctas, bool uniform) : total(total), cost_per_cta(ceil_div(total, ctas)) {
    int alignment = 1;
    while (uniform && cost_per_cta >> 5 >= alignment) alignment *= 2;
    cost_per_cta = (cost_per_cta + alignment - 1) & -alignment;
  }
  ROOFTILE_HD int begin(int cta) const { return cta * cost_per_cta < total ? cta * cost_per_cta : total; }
  ROOFTILE_HD int owner(int at) const { return divide(at, cost_per_cta); }
};

// CTAs that each work tile gets to itself where all tiles have the same length: as many as there are for each tile, if
// at least 7 / 8 of the grid then has work; else 0.
inline int ctas_per_tile_if_uniform(std::int64_t work_tiles, int ctas) {
  if (work_tiles == 0 || 2 * work_tiles > ctas) return 0;
  const int all = static_cast<int>(work_tiles), ctas_per_tile = ctas / all;
  return 8 * all * ctas_per_tile >= 7 * ctas ? ctas_per_tile : 0;
}
ROOFTILE_HD constexpr int ctas_per_tile_of(bool uniform, int work_tile_cost, int if_uniform) {
  return uniform && work_tile_cost < 1 << 19 ? if_uniform : 0;  // cta_of_split computes in 32 bits
}

// Level of the first subtree in the canonical decomposition of splits [at, end), at < end: limited by the alignment of
// `at` and by the length of the range.
ROOFTILE_HD inline int partial_level(int at, int end) {
  const int long_enough = log2_of(end - at), alignment = at == 0 ? reduction_levels - 1 : log2_of(at & -at);
  return long_enough < alignment ? long_enough : alignment;
}

}  // namespace rooftile::gpu
