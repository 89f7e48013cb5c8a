// SPDX-License-Identifier: Apache-2.0
// What a block of the grid has to do, found from the lengths by every warp for itself (schedule.h).
#pragma once

#include "kernels/decode/params.h"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/schedule.h"

namespace rooftile::gpu {

__device__ __forceinline__ int read(const std::int32_t* from) { return *from; }

// What a block has to do: units, from the batch entry that holds the first, or its part of one task.
struct BlockRange {
  int begin, end;           // units; of one task its first
  int entry_base;           // first unit of that entry
  int entry;
  bool even;                // all tasks are as long
  RowWork work;             // of that entry
  int share = 0;            // where its nodes go
  int rank = 0, ranks = 0;  // of the blocks that have the task to themselves; 0: it has units
  int task = 0, first = 0, last = 0;   // then: the task of the entry, and the block's leaves of it
};

// Neighbouring shares go to one multiprocessor: where only every second has work, no two of these meet.
__device__ __forceinline__ int share_of_block() { return static_cast<int>(blockIdx.x * gridDim.y + blockIdx.y); }
// A part of one task, the batch's number `index`. work_of(b) is what entry b has to do.
template <class WorkOf>
__device__ __forceinline__ BlockRange one_task(const DecodeParams& p, int index, int rank, int ranks, int share, const WorkOf& work_of) {
  const int tasks = p.cache.kv_heads * p.passes, b = p.batch == 1 ? 0 : divide(index, tasks), in_row = index - b * tasks;
  if (b >= p.batch) return {};
  const RowWork w = work_of(b);
  const int units = w.task_units();
  return {in_row * units, in_row * units + (units > 0), 0, b, true, w, share, rank, ranks, in_row};
}
__device__ __forceinline__ RowWork broadcast(const RowWork& w, int lane) {
  const auto from = [lane](int x) { return __shfl_sync(0xffffffffu, x, lane); };
  return {from(w.row), from(w.length), from(w.count), from(w.begin), from(w.end), from(w.units), from(w.leaves), from(w.leaf_cost), from(w.raw) != 0,
          static_cast<KvFault>(from(static_cast<int>(w.fault)))};
}

__device__ __forceinline__ int warp_scan(int x, int lane) {   // inclusive
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(0xffffffffu, x, step);
    if (lane >= step) x += left;
  }
  return x;
}

// Every warp counts the units of all entries for itself, 32 entries at a time. Block 0 also leaves their prefix sums for
// the combine, and reports faults.
template <KvFormat format>
__device__ inline BlockRange find_range(const DecodeParams& p) {
  const int lane = threadIdx.x % 32, tasks = p.cache.kv_heads * p.passes, share = share_of_block();
  const bool reports = share == 0 && threadIdx.x < 32;
  const auto work_of = [&](int b) {
    const RowWork w = b < p.batch ? row_work_of(p, format, b, read) : RowWork{};
    if (reports && w.fault != KvFault::none) *p.cache.fault = static_cast<int>(w.fault) + 16 * (w.fault == KvFault::row ? b : w.row);
    return w;
  };
  const auto units_of = [tasks](const RowWork& w) { return w.task_units() * tasks; };
  RowWork own = work_of(lane);
  const int first_task = __shfl_sync(0xffffffffu, own.task_units(), 0);
  int sum = units_of(own);
  bool even = lane >= p.batch || own.task_units() == first_task;
  for (int b = lane + 32; b < p.batch; b += 32) {
    const RowWork w = work_of(b);
    sum += units_of(w);
    even &= w.task_units() == first_task;
  }
  even = __all_sync(0xffffffffu, even);
  if (const int ranks = ranks_of(even, first_task, p.ranks)) {
    for (int i = lane; reports && i < p.batch + 2; i += 32) p.row_begin[i] = i == p.batch + 1 ? even : i * first_task * tasks;
    const int index = divide(share, ranks);
    BlockRange r = one_task(p, index, share - index * ranks, ranks, share,
                            [&](int b) { return p.batch <= 32 ? broadcast(own, b) : row_work_of(p, format, b, read); });
    const int bound = r.begin < r.end ? r.work.leaf_of_rank(r.rank + lane % 2, ranks) : 0;
    r.first = __shfl_sync(0xffffffffu, bound, 0);
    r.last = __shfl_sync(0xffffffffu, bound, 1);
    return r;
  }
  const auto weighed = [&](RowWork w) {
    if (!even) w.weigh(format);
    return w;
  };
  own = weighed(own);
  if (!even) {
    sum = units_of(own);
    for (int b = lane + 32; b < p.batch; b += 32) sum += units_of(weighed(row_work_of(p, format, b, read)));
  }
  const Split split(__reduce_add_sync(0xffffffffu, sum), p.blocks, even);
  BlockRange r{split.begin(share), split.begin(share + 1), 0, -1, even, {}, share};
  if (r.begin >= r.end && !reports) return r;
  int before = 0;
  for (int first = 0; first < p.batch && (r.entry < 0 || reports); first += 32) {
    if (first > 0) own = first + lane < p.batch ? weighed(row_work_of(p, format, first + lane, read)) : RowWork{};
    const int units = units_of(own), end = before + warp_scan(units, lane);
    if (reports && first + lane < p.batch) p.row_begin[first + lane] = end - units;
    const unsigned holds = __ballot_sync(0xffffffffu, end - units <= r.begin && r.begin < end);
    if (holds) {
      const int owner = first_bit(holds);
      r.entry = first + owner;
      r.entry_base = __shfl_sync(0xffffffffu, end - units, owner);
      r.work = broadcast(own, owner);
    }
    before = __shfl_sync(0xffffffffu, end, 31);
  }
  if (reports && lane == 0) {
    p.row_begin[p.batch] = split.total;
    p.row_begin[p.batch + 1] = even;
  }
  return r;
}

// Puts what every warp has found where the block keeps it, and no segment has met a page that is none. False: nothing to do. All
// threads see it then; before any warp finds such a page.
__device__ __forceinline__ bool keep_range(const BlockRange& found, BlockRange& range, int& bad_segment) {
  if (found.begin >= found.end) return false;
  if (threadIdx.x == 0) {
    range = found;
    bad_segment = 0;
  }
  __syncthreads();
  return true;
}

// Calls visit(task, work, first, last) for the block's leaves [first, last) of every task that it has a part of; of its only task
// there may be none. Task.pass counts tasks of the KV head.
template <KvFormat format, class Visit>
__device__ __forceinline__ void each_segment(const DecodeParams& p, const BlockRange& range, const Visit& visit) {
  const int tasks = p.cache.kv_heads * p.passes;
  int base = range.entry_base;
  for (int b = range.entry; b < p.batch && base < range.end; ++b) {
    RowWork w = range.work;
    if (b != range.entry) {
      w = row_work_of(p, format, b, read);
      if (!range.even) w.weigh(format);
    }
    const int units = w.task_units();
    if (units == 0) continue;
    for (int task = range.ranks ? range.task : range.begin > base ? divide(range.begin - base, units) : 0; task < tasks; ++task) {
      const int task_base = base + task * units;
      if (task_base >= range.end) return;
      const int first = range.ranks ? range.first : w.leaf_from(range.begin - task_base);
      const int last = range.ranks ? range.last : min(w.leaves, w.leaf_from(range.end - task_base));
      const int kv_head = divide(task, p.passes);
      if (first < last || range.ranks) visit(Task{b, kv_head, task - kv_head * p.passes}, w, first, last);
    }
    base += units * tasks;
  }
}

}  // namespace rooftile::gpu
