// SPDX-License-Identifier: Apache-2.0
// What a block of the grid has to do, found from the lengths by every warp for itself (schedule.h).
#pragma once

#include "kernels/decode/params.h"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/schedule.h"
#include "tile/copy.cuh"

namespace rooftile::gpu {

__device__ __forceinline__ int read(const std::int32_t* from) { return *from; }

// What a block has to do: units, from the first leaf of its own on, or its part of one task. Tasks are counted within
// an entry.
struct BlockRange {
  int begin, end;  // units; of one task its first
  int task_base;   // first unit of the first task
  int entry;
  bool even;                          // all tasks are as long
  RowWork work;                       // of that entry
  int share = 0;                      // where its nodes go
  int rank = 0, ranks = 0;            // of the blocks that have the task to themselves; 0: it has units
  int task = 0, first = 0, last = 0;  // the first task, and the block's leaves of it

  // Of the only task, by a whole warp.
  __device__ __forceinline__ void own_leaves(int lane) {
    const int bound = work.leaf_of_rank(rank + lane % 2, ranks);
    first = __shfl_sync(0xffffffffu, bound, 0);
    last = __shfl_sync(0xffffffffu, bound, 1);
  }
};

// Neighbouring shares go to one multiprocessor: where only every second has work, no two of these meet.
__device__ __forceinline__ int share_of_block() { return static_cast<int>(blockIdx.x * gridDim.y + blockIdx.y); }

// What find_range will read comes into the L2 while the kernel before still runs. It may change until then; nothing is
// read here.
__device__ __forceinline__ void fetch_ahead(const DecodeParams& p) {
  const int b = threadIdx.x;
  if (b >= 32 || b >= p.batch) return;
  if (p.counts) tile::prefetch(p.counts + b);
  if (p.rows) return tile::prefetch(p.rows + b);  // which rows, is not known yet
  if (b >= p.cache.max_rows) return;
  tile::prefetch(p.cache.lengths + b);
  if (p.cache.raw_from) tile::prefetch(p.cache.raw_from + b);
}

// A part of one task, the batch's number `index`. work_of(b) is what entry b has to do.
template <class WorkOf>
__device__ __forceinline__ BlockRange one_task(const DecodeParams& p, int index, int rank, int ranks, int share,
                                               const WorkOf& work_of) {
  const int b = divide(index, p.by_tasks), in_row = index - b * p.tasks;
  if (b >= p.batch) return {};
  const RowWork w = work_of(b);
  const int units = w.task_units();
  return {in_row * units, in_row * units + (units > 0), 0, b, true, w, share, rank, ranks, in_row};
}
__device__ __forceinline__ RowWork broadcast(const RowWork& w, int lane) {
  const auto from = [lane](int x) { return __shfl_sync(0xffffffffu, x, lane); };
  return {from(w.row),      from(w.length),
          from(w.count),    from(w.begin),
          from(w.end),      from(w.units),
          from(w.leaves),   from(w.leaf_cost),
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

// Every warp counts the units of all entries for itself, 32 entries at a time. Block 0 also leaves their prefix sums
// for the combine, and reports faults.
template <KvFormat format>
__device__ inline BlockRange find_range(const DecodeParams& p) {
  const int lane = threadIdx.x % 32, share = share_of_block();
  const bool reports = share == 0 && threadIdx.x < 32;
  RowWork own;         // of entry `lane`
  int task_units = 0;  // of the first entry's tasks
  bool even = true;
#pragma unroll 1
  for (int first = 0; first < p.batch; first += 32) {
    const int b = first + lane;
    RowWork w;
    if (b < p.batch) w = row_work_of(p, format, b, read);
    if (reports && w.fault != KvFault::none)
      *p.cache.fault = static_cast<int>(w.fault) + 16 * (w.fault == KvFault::row ? b : w.row);
    const int units = w.task_units();
    if (first == 0) {
      own = w;
      task_units = __shfl_sync(0xffffffffu, units, 0);
    }
    even &= b >= p.batch || units == task_units;
  }
  even = __all_sync(0xffffffffu, even);
  if (const int ranks = ranks_of(even, task_units, p.ranks)) {
    for (int i = lane; reports && i < p.batch + 2; i += 32)
      p.row_begin[i] = i == p.batch + 1 ? even : i * task_units * p.tasks;
    const int index = divide(share, p.by_ranks);
    BlockRange r = one_task(p, index, share - index * ranks, ranks, share,
                            [&](int b) { return p.batch <= 32 ? broadcast(own, b) : row_work_of(p, format, b, read); });
    if (r.begin < r.end) r.own_leaves(lane);
    return r;
  }
  int total = p.batch * task_units * p.tasks;
  if (!even) {
    total = 0;
#pragma unroll 1
    for (int first = 0; first < p.batch; first += 32)
      if (const int b = first + lane; b < p.batch) {
        RowWork w = row_work_of(p, format, b, read);
        w.weigh(format);
        total += w.task_units();
        if (first == 0) own = w;
      }
    total = __reduce_add_sync(0xffffffffu, total) * p.tasks;
  }
  const Split split(total, p.blocks, even);
  BlockRange r{split.begin(share), split.begin(share + 1), 0, -1, even, {}, share};
  if (r.begin >= r.end && !reports) return r;
  int before = 0;
#pragma unroll 1
  for (int first = 0; first < p.batch && (r.entry < 0 || reports); first += 32) {
    if (first > 0) {
      own = {};
      if (first + lane < p.batch) own = row_work_of(p, format, first + lane, read);
      if (!even && first + lane < p.batch) own.weigh(format);
    }
    const int units = own.task_units() * p.tasks, end = before + warp_scan(units, lane);
    if (reports && first + lane < p.batch) p.row_begin[first + lane] = end - units;
    const unsigned holds = __ballot_sync(0xffffffffu, end - units <= r.begin && r.begin < end);
    if (holds) {
      const int owner = first_bit(holds);
      r.entry = first + owner;
      r.task_base = __shfl_sync(0xffffffffu, end - units, owner);
      r.work = broadcast(own, owner);
    }
    before = __shfl_sync(0xffffffffu, end, 31);
  }
  if (reports && lane == 0) {
    p.row_begin[p.batch] = split.total;
    p.row_begin[p.batch + 1] = even;
  }
  if (r.begin >= r.end) return r;
  const int units = r.work.task_units();
  r.task = divide(r.begin - r.task_base, units);
  r.task_base += r.task * units;
  r.first = r.work.leaf_from(r.begin - r.task_base);
  r.last = r.work.leaf_from(r.end - r.task_base);
  return r;
}

// Puts what every warp has found where the block keeps it, and no segment has met a page that is none. False: nothing
// to do. All threads see it then; before any warp finds such a page.
__device__ __forceinline__ bool keep_range(const BlockRange& found, BlockRange& range, int& bad_segment) {
  if (found.begin >= found.end) return false;
  if (threadIdx.x == 0) {
    range = found;
    bad_segment = 0;
  }
  __syncthreads();
  return true;
}

// Calls visit(task, work, first, last) for the block's leaves [first, last) of every task that it has a part of; of its
// only task there may be none. Task.pass counts tasks of the KV head.
template <KvFormat format, class Visit>
__device__ __forceinline__ void each_segment(const DecodeParams& p, const BlockRange& range, const Visit& visit) {
  int b = range.entry, task = range.task, base = range.task_base, first = range.first, last = range.last;
  RowWork w = range.work;
  while (true) {
    const int kv_head = divide(task, p.by_passes);
    if (first < last || range.ranks) visit(Task{b, kv_head, task - kv_head * p.passes}, w, first, last);
    if (range.ranks) return;
    base += w.task_units();
    if (base >= range.end) return;
    if (++task == p.tasks) {
      task = 0;
      do {  // entries that see nothing have no units
        w = row_work_of(p, format, ++b, read);
        if (!range.even) w.weigh(format);
      } while (w.leaves == 0);
    }
    first = 0;
    last = w.leaf_from(range.end - base);
  }
}

}  // namespace rooftile::gpu
