// SPDX-License-Identifier: Apache-2.0
// The work range of a CTA (scheduler.h). Every warp computes it from the lengths of the cache rows.
#pragma once

#include "kernels/decode/params.h"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/scheduler.h"
#include "tile/copy.cuh"

namespace rooftile::gpu {

__device__ __forceinline__ int load_l1(const std::int32_t* from) { return *from; }

// The work of one CTA: a range of the cost of all work tiles, of which the CTA owns the splits that start inside, or a
// part of one work tile. `tile` counts the work tiles of a batch entry.
struct WorkRange {
  int begin, end;  // in KV tiles of cost; for a part of one work tile only begin < end counts: the tile has work
  int tile_base;   // where the first work tile begins
  int entry;
  bool uniform;                            // all work tiles have the same length
  RowWork work;                            // of batch entry `entry`
  int range_index = 0;                     // where the CTA stores its partials
  int cta_in_tile = 0, ctas_per_tile = 0;  // CTAs that have the work tile to themselves; 0: a stream-K range
  int tile = 0, first = 0, last = 0;       // the first work tile, and the CTA's KV splits [first, last) of it

  // The CTA's splits of its only work tile. Called by a whole warp.
  __device__ __forceinline__ void find_own_splits(int lane) {
    const int bound = work.first_split_of_cta(cta_in_tile + lane % 2, ctas_per_tile);
    first = __shfl_sync(0xffffffffu, bound, 0);
    last = __shfl_sync(0xffffffffu, bound, 1);
  }
};

// Neighbouring work ranges run on one SM: if only every second range has work, no two ranges with work share an SM.
__device__ __forceinline__ int work_range_index() { return static_cast<int>(blockIdx.x * gridDim.y + blockIdx.y); }

// Prefetches into L2 what find_work_range will read, while the previous kernel still runs. The previous kernel may
// still change the values, so nothing is read here.
__device__ __forceinline__ void prefetch_lengths(const DecodeParams& p) {
  const int b = threadIdx.x;
  if (b >= p.batch) return;
  if (p.counts) tile::prefetch_l2(p.counts + b);
  if (p.rows) return tile::prefetch_l2(p.rows + b);  // the cache rows are unknown until p.rows is read
  if (b >= p.cache.max_rows) return;
  tile::prefetch_l2(p.cache.lengths + b);
  if (p.cache.raw_from) tile::prefetch_l2(p.cache.raw_from + b);
}

// A part of one work tile, number tile_index of the batch. work_of(b) returns the work of batch entry b.
template <class WorkOf>
__device__ __forceinline__ WorkRange one_work_tile(const DecodeParams& p, int tile_index, int cta_in_tile,
                                                   int ctas_per_tile, int range_index, const WorkOf& work_of) {
  const int b = divide(tile_index, p.by_tiles_per_entry), tile = tile_index - b * p.tiles_per_entry;
  if (b >= p.batch) return {};
  const RowWork w = work_of(b);
  const int cost = w.work_tile_cost();
  return {tile * cost, tile * cost + (cost > 0), 0, b, true, w, range_index, cta_in_tile, ctas_per_tile, tile};
}
__device__ __forceinline__ RowWork broadcast(const RowWork& w, int lane) {
  const auto from = [lane](int x) { return __shfl_sync(0xffffffffu, x, lane); };
  return {from(w.row),      from(w.length),
          from(w.count),    from(w.begin),
          from(w.end),      from(w.split_tiles),
          from(w.splits),   from(w.split_cost),
          from(w.raw) != 0, static_cast<KvFault>(from(static_cast<int>(w.fault)))};
}

__device__ __forceinline__ int warp_scan(int x, int lane) {  // inclusive
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(0xffffffffu, x, step);
    if (lane >= step) x += left;
  }
  return x;
}

// Finds this CTA's work range. Every warp counts the cost of all batch entries, 32 entries at a time. CTA 0 also
// writes their prefix sums for combine, and reports faults.
template <KvFormat format>
__device__ inline WorkRange find_work_range(const DecodeParams& p) {
  const int lane = threadIdx.x % 32, range_index = work_range_index();
  const bool reports = range_index == 0 && threadIdx.x < 32;
  RowWork own;             // of batch entry `lane`; in the last loop of `first + lane`
  int work_tile_cost = 0;  // of the first batch entry
  bool uniform = true;
  // Faults, and whether all work tiles have the same length.
#pragma unroll 1
  for (int first = 0; first < p.batch; first += 32) {
    const int b = first + lane;
    RowWork w;
    if (b < p.batch) w = row_work_of(p, format, b, load_l1);
    if (reports && w.fault != KvFault::none)
      *p.cache.fault = kv_fault_word(w.fault, w.fault == KvFault::row ? b : w.row);
    const int cost = w.work_tile_cost();
    if (first == 0) {
      own = w;
      work_tile_cost = __shfl_sync(0xffffffffu, cost, 0);
    }
    uniform &= b >= p.batch || cost == work_tile_cost;
  }
  uniform = __all_sync(0xffffffffu, uniform);
  // Few work tiles of the same length: a part of one work tile.
  if (const int ctas_per_tile = ctas_per_tile_of(uniform, work_tile_cost, p.ctas_per_tile)) {
    for (int i = lane; reports && i < p.batch + 2; i += 32)
      p.work_prefix[i] = i == p.batch + 1 ? uniform : i * work_tile_cost * p.tiles_per_entry;
    const int tile_index = divide(range_index, p.by_ctas_per_tile);
    WorkRange r =
        one_work_tile(p, tile_index, range_index - tile_index * ctas_per_tile, ctas_per_tile, range_index,
                      [&](int b) { return p.batch <= 32 ? broadcast(own, b) : row_work_of(p, format, b, load_l1); });
    if (r.begin < r.end) r.find_own_splits(lane);
    return r;
  }
  // Stream-K: the cost of all work tiles.
  int total = p.batch * work_tile_cost * p.tiles_per_entry;
  if (!uniform) {
    total = 0;
#pragma unroll 1
    for (int first = 0; first < p.batch; first += 32)
      if (const int b = first + lane; b < p.batch) {
        RowWork w = row_work_of(p, format, b, load_l1);
        w.add_overheads(format);
        total += w.work_tile_cost();
        if (first == 0) own = w;
      }
    total = __reduce_add_sync(0xffffffffu, total) * p.tiles_per_entry;
  }
  const WorkPartition partition(total, p.ctas, uniform);
  WorkRange r{partition.begin(range_index), partition.begin(range_index + 1), 0, -1, uniform, {}, range_index};
  if (r.begin >= r.end && !reports) return r;
  // The batch entry in which the range begins, and the prefix sums.
  int before = 0;
#pragma unroll 1
  for (int first = 0; first < p.batch && (r.entry < 0 || reports); first += 32) {
    if (first > 0) {
      own = {};
      if (first + lane < p.batch) own = row_work_of(p, format, first + lane, load_l1);
      if (!uniform && first + lane < p.batch) own.add_overheads(format);
    }
    const int cost = own.work_tile_cost() * p.tiles_per_entry, end = before + warp_scan(cost, lane);
    if (reports && first + lane < p.batch) p.work_prefix[first + lane] = end - cost;
    const unsigned containing = __ballot_sync(0xffffffffu, end - cost <= r.begin && r.begin < end);
    if (containing) {
      const int source_lane = first_bit(containing);
      r.entry = first + source_lane;
      r.tile_base = __shfl_sync(0xffffffffu, end - cost, source_lane);
      r.work = broadcast(own, source_lane);
    }
    before = __shfl_sync(0xffffffffu, end, 31);
  }
  if (reports && lane == 0) {
    p.work_prefix[p.batch] = partition.total;
    p.work_prefix[p.batch + 1] = uniform;
  }
  if (r.begin >= r.end) return r;
  // The work tile and the splits with which the range begins.
  const int cost = r.work.work_tile_cost();
  r.tile = divide(r.begin - r.tile_base, cost);
  r.tile_base += r.tile * cost;
  r.first = r.work.first_split_from(r.begin - r.tile_base);
  r.last = r.work.first_split_from(r.end - r.tile_base);
  return r;
}

// Thread 0 copies the range to shared memory and clears bad_tile_range. Returns false if the range is empty. The
// barrier orders both writes before any warp reads the range or reports an invalid page.
__device__ __forceinline__ bool store_range(const WorkRange& found, WorkRange& range, int& bad_tile_range) {
  if (found.begin >= found.end) return false;
  if (threadIdx.x == 0) {
    range = found;
    bad_tile_range = 0;
  }
  __syncthreads();
  return true;
}

// Calls visit(tile, work, first, last) for every work tile that the CTA has a part of: KV splits [first, last). A CTA
// with a part of one tile (ctas_per_tile > 0) may have no splits. N: n-tiles of an m-block.
template <KvFormat format, int N, class Visit>
__device__ __forceinline__ void for_each_tile_range(const DecodeParams& p, const WorkRange& range, const Visit& visit) {
  int b = range.entry, tile = range.tile, tile_base = range.tile_base, first = range.first, last = range.last;
  RowWork w = range.work;
  while (true) {
    const int kv_head = divide(tile, p.by_m_blocks);
    if (first < last || range.ctas_per_tile)
      visit(WorkTile{b, kv_head, (tile - kv_head * p.m_blocks) * N}, w, first, last);
    if (range.ctas_per_tile) return;
    tile_base += w.work_tile_cost();
    if (tile_base >= range.end) return;
    if (++tile == p.tiles_per_entry) {
      tile = 0;
      do {  // batch entries that see no token cost nothing
        w = row_work_of(p, format, ++b, load_l1);
        if (!range.uniform) w.add_overheads(format);
      } while (w.splits == 0);
    }
    first = 0;
    last = w.first_split_from(range.end - tile_base);
  }
}

}  // namespace rooftile::gpu
