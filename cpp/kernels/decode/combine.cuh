// SPDX-License-Identifier: Apache-2.0
// Merges the nodes that split_kv left of tasks that several blocks shared, and answers rows that see nothing.
//   node_o [blocks, slots, columns, D], node_ml [blocks, slots, columns, 2] -> out, lse
// One block a column of a task, a thread a value. It finds the task's nodes by the arithmetic of schedule.h, a thread a
// leaf, and merges them by tree.cuh.
// Bytes: 4 (D + 2) a node, at most 64 nodes. Latency is the roof: the lengths, then the nodes.
// Sync: where the nodes lie follows from the lengths, which were there before split_kv began (it lets this kernel start
// only after its own wait), so that is found while split_kv runs; its nodes are read behind wait_for_previous_kernel.
// Above 32 batch entries the units before an entry are split_kv's to count, and everything comes behind the wait.
#pragma once

#include "kernels/decode/queries.cuh"
#include "kernels/decode/range.cuh"
#include "kernels/decode/tree.cuh"
#include "tile/grid.cuh"

namespace rooftile::gpu {

template <int D>
struct CombineMemory {
  TreeMemory tree[D / 32];  // a warp each
  int node[max_leaves];     // that starts at a leaf, -1: none does
};

// The column's result over at most N leaves. False: a page was none, and split_kv has said so.
template <int D, int N>
__device__ __forceinline__ bool merge_nodes(const DecodeParams& p, CombineMemory<D>& memory, float& m, float& l,
                                            float& value) {
  using Nodes = Tree<N>;
  TreeMemory& tree = memory.tree[threadIdx.x / 32];
  Nodes nodes([&](int leaf) {
    const int node = memory.node[leaf];
    return node < 0 ? make_float2(-INFINITY, 0.0f)
                    : *reinterpret_cast<const float2*>(p.node_ml + std::int64_t{node} * 2);
  });
  float o[N];
#pragma unroll
  for (int leaf = 0; leaf < N; ++leaf)
    o[leaf] = memory.node[leaf] < 0 ? 0.0f : p.node_o[std::int64_t{memory.node[leaf]} * D + threadIdx.x];
  if (!nodes.weigh(tree)) return false;
  m = nodes.m();
  l = nodes.l();
  value = Nodes::value(tree, o);
  return true;
}

// Before the wait a line of the L1 may be older than the launch.
__device__ __forceinline__ int read_from_l2(const std::int32_t* from) { return __ldcg(from); }

// What batch entry b has to do, how many units come before its own, and of all.
struct EntryWork {
  RowWork work;
  int before = 0, total = 0;
  bool even = false;  // all tasks are as long
};
// Counted by every warp for itself; at most 32 entries.
__device__ __forceinline__ EntryWork count_units(const DecodeParams& p, int b) {
  const int lane = threadIdx.x % 32;
  RowWork w;
  if (lane < p.batch) w = row_work_of(p, p.cache.format, lane, read_from_l2);
  const int first_task = __shfl_sync(0xffffffffu, w.task_units(), 0);
  EntryWork entry;
  entry.even = __all_sync(0xffffffffu, lane >= p.batch || w.task_units() == first_task);
  if (entry.even) {
    entry.before = b * p.tasks * first_task;
    entry.total = p.batch * p.tasks * first_task;
  } else {
    w.weigh(p.cache.format);
    const int units = w.task_units() * p.tasks;
    entry.before = __reduce_add_sync(0xffffffffu, lane < b ? units : 0);
    entry.total = __reduce_add_sync(0xffffffffu, units);
  }
  entry.work = broadcast(w, b);
  return entry;
}

template <class T, int D>
__global__ __launch_bounds__(D) void combine(const __grid_constant__ DecodeParams p) {
  tile::let_next_kernel_start();  // block 0 waits below, so the next one's wait covers split_kv too
  __shared__ CombineMemory<D> memory;
  const int thread = threadIdx.x, index = static_cast<int>(blockIdx.x), of_all = divide(index, p.by_columns_used),
            column = index - of_all * p.columns_used;
  const int b = divide(of_all, p.by_tasks), task_in_row = of_all - b * p.tasks;
  const int kv_head = divide(task_in_row, p.by_passes);
  const Task task{b, kv_head, (task_in_row - kv_head * p.passes) * (p.columns / columns)};

  const bool counts = p.batch <= 32;
  EntryWork entry;
  if (counts) {
    entry = count_units(p, b);
  } else {
    entry.work = row_work_of(p, p.cache.format, b, read_from_l2);
    tile::wait_for_previous_kernel();
    entry.before = p.row_begin[b];
    entry.total = p.row_begin[p.batch];
    entry.even = p.row_begin[p.batch + 1] != 0;
    if (!entry.even) entry.work.weigh(p.cache.format);
  }
  const RowWork& w = entry.work;
  const int leaves = w.leaves, ranks = ranks_of(entry.even, w.task_units(), p.ranks);
  ColumnResult<T> result(p, task, w, column);
  const auto write = [&](float m, float l, float value) {
    const float o[1] = {value};
    result.finish(m, l);
    result.write(thread, o);
    if (thread == 0) result.write_lse();
  };
  // The run of leaves, some block's, that the thread's leaf lies in.
  const int leaf = min(thread, leaves - 1);
  int share = 0, at = 0, end = leaves;
  if (leaves > 0 && ranks) {
    const int rank = w.rank_of_leaf(leaf, ranks);
    share = of_all * ranks + rank;
    at = w.leaf_of_rank(rank, ranks);
    end = w.leaf_of_rank(rank + 1, ranks);
  } else if (leaves > 0) {
    const Split split(entry.total, p.blocks, entry.even);
    const int base = entry.before + task_in_row * w.task_units();
    share = split.owner(base + w.leaf_begin(leaf));
    at = w.leaf_from(split.begin(share) - base);
    end = w.leaf_from(split.begin(share + 1) - base);
  }
  if (at == 0 && end == leaves) {  // one block had it all, or there is nothing
    if (leaves == 0 && w.fault == KvFault::none) write(-INFINITY, 0.0f, 0.0f);
    if (counts && blockIdx.x == 0) tile::wait_for_previous_kernel();
    return;
  }
  if (thread < max_leaves) {
    int slot = share * slots_per_block + (at > 0 ? 0 : slots_inside);
    for (; at < leaf; ++slot) at += 1 << node_level(at, end);
    memory.node[thread] = thread < leaves && at == leaf ? slot * p.columns + column : -1;
  }
  __syncthreads();  // the places of the nodes are known
  if (counts) tile::wait_for_previous_kernel();

  float m, l, value;
  constexpr int few = 16, some = 32;  // leaves of most rows that are short enough for this kernel's time to count
  const bool right = leaves <= few    ? merge_nodes<D, few>(p, memory, m, l, value)
                     : leaves <= some ? merge_nodes<D, some>(p, memory, m, l, value)
                                      : merge_nodes<D, max_leaves>(p, memory, m, l, value);
  if (right) write(m, l, value);
}

}  // namespace rooftile::gpu
