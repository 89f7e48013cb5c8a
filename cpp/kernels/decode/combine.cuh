// SPDX-License-Identifier: Apache-2.0
// Merges the nodes that split_kv left of tasks that several blocks shared, and answers rows that see nothing.
//   node_o [blocks, slots, 8, D], node_ml [blocks, slots, 8, 2] -> out, lse
// One block a column of a task, a thread a value. It finds the task's nodes by the arithmetic of schedule.h, a thread a
// leaf, and fetches all their values at once into registers. One warp meanwhile works out the tree's (m, l) and the
// weights of every merge; then all threads run the same 63 multiply-adds. Leaves that are not there are empty states, and
// a node that came merged meets empty ones: both change no bit. So the tree is the fold's.
// Bytes: 4 (D + 2) a node, at most 65 nodes. Latency is the roof: the lengths, then the nodes.
// Sync: where the nodes lie follows from the lengths, which were there before split_kv began (it lets this kernel start only
// after its own wait), so that is found while split_kv runs; its nodes are read behind wait_for_previous_kernel. Above 32
// batch entries the units before an entry are split_kv's to count, and everything comes behind the wait.
#pragma once

#include "kernels/decode/fold.cuh"
#include "kernels/decode/queries.cuh"
#include "tile/grid.cuh"

namespace rooftile::gpu {

// What the threads of a block tell each other, a leaf each and a merge each.
struct CombineShared {
  float m[max_leaves + 1], l[max_leaves + 1];
  int node[max_leaves + 1], level[max_leaves + 1];   // of the node that starts at a leaf; -1: none does
  tile::MergeWeights weights[max_leaves];            // over N leaves, node (level, i) at N - (N >> (level - 1)) + i; then the last
};

// Levels `Level` and up of the tree over N values, in place: node (level, i) ends up at i << level.
template <int Level, int N>
__device__ __forceinline__ void merge_levels(float (&o)[N + 1], const tile::MergeWeights* weights) {
#pragma unroll
  for (int i = 0; i < N >> Level; ++i)
    o[i << Level] = tile::merge_values(o[i << Level], o[(i << Level) + (1 << (Level - 1))], weights[N - (N >> (Level - 1)) + i]);
  if constexpr (N >> Level > 1) merge_levels<Level + 1, N>(o, weights);
}

// The whole tree over at most N + 1 leaves; this thread's value of it. False: a page was none, and split_kv has said so.
template <int D, int N>
__device__ __forceinline__ bool fold_nodes(const DecodeParams& p, CombineShared& shared, float& m, float& l, float& value) {
  const int thread = threadIdx.x;
  constexpr int own = (N + D) / D;   // leaves of a thread
  float2 ml[own];
#pragma unroll
  for (int i = 0; i < own; ++i) {
    const int leaf = thread + i * D, node = leaf <= N ? shared.node[leaf] : -1;
    ml[i] = node < 0 ? make_float2(-INFINITY, 0.0f) : *reinterpret_cast<const float2*>(p.node_ml + std::int64_t{node} * 2);
  }
  float o[N + 1];
#pragma unroll
  for (int leaf = 0; leaf <= N; ++leaf) o[leaf] = shared.node[leaf] < 0 ? 0.0f : p.node_o[std::int64_t{shared.node[leaf]} * D + thread];
  bool bad = false;
#pragma unroll
  for (int i = 0; i < own; ++i)
    if (const int leaf = thread + i * D; leaf <= N) {
      shared.m[leaf] = ml[i].x;
      shared.l[leaf] = ml[i].y;
      bad |= ml[i].y < 0.0f;
    }
  if (__syncthreads_or(bad)) return false;   // all (m, l) are there
  if (thread < 32) {
    // After step `level` lane i holds node (level, i).
    float m_own = 0.0f, l_own = 0.0f;
    int first = 0;
#pragma unroll
    for (int level = 1; N >> level > 0; ++level) {
      const int nodes = N >> level, start = min(thread << level, N);
      const float m_a = level == 1 ? shared.m[min(2 * thread, N)] : __shfl_sync(0xffffffffu, m_own, 2 * thread % 32);
      const float l_a = level == 1 ? shared.l[min(2 * thread, N)] : __shfl_sync(0xffffffffu, l_own, 2 * thread % 32);
      const float m_b = level == 1 ? shared.m[min(2 * thread + 1, N)] : __shfl_sync(0xffffffffu, m_own, (2 * thread + 1) % 32);
      const float l_b = level == 1 ? shared.l[min(2 * thread + 1, N)] : __shfl_sync(0xffffffffu, l_own, (2 * thread + 1) % 32);
      if (thread < nodes) {
        tile::MergeWeights merge{shared.m[start], 1.0f, 0.0f};
        l_own = shared.l[start];
        if (shared.level[start] < level) {   // did not come merged
          merge = tile::merge_weights(m_a, m_b);
          l_own = tile::merge_values(l_a, l_b, merge);
        }
        m_own = merge.m;
        shared.weights[first + thread] = merge;
      }
      first += nodes;
    }
    if (thread == 0) {   // with the leaf behind the tree
      const tile::MergeWeights merge = tile::merge_weights(m_own, shared.m[N]);
      shared.weights[N - 1] = merge;
      shared.l[0] = tile::merge_values(l_own, shared.l[N], merge);
    }
  }
  __syncthreads();   // the weights are there
  merge_levels<1, N>(o, shared.weights);
  const tile::MergeWeights last = shared.weights[N - 1];
  m = last.m;
  l = shared.l[0];
  value = tile::merge_values(o[0], o[N], last);
  return true;
}

// Before the wait a line of the L1 may be older than the launch.
__device__ __forceinline__ int read_from_l2(const std::int32_t* from) { return __ldcg(from); }

// Units before batch entry b, and of all. Counted by every warp for itself; at most 32 entries.
struct UnitCount {
  int before, total;
  bool even;   // all tasks are as long
};
__device__ __forceinline__ UnitCount count_units(const DecodeParams& p, int b) {
  const int lane = threadIdx.x % 32;
  RowWork w;
  if (lane < p.batch) w = row_work_of(p, p.cache.format, lane, read_from_l2);
  const int first_task = __shfl_sync(0xffffffffu, w.task_units(), 0);
  const bool even = __all_sync(0xffffffffu, lane >= p.batch || w.task_units() == first_task);
  if (!even) w.weigh(p.cache.format);
  const int units = w.task_units() * p.cache.kv_heads * p.passes;
  return {__reduce_add_sync(0xffffffffu, lane < b ? units : 0), __reduce_add_sync(0xffffffffu, units), even};
}

template <class T, int D>
__global__ __launch_bounds__(D) void combine(const __grid_constant__ DecodeParams p) {
  static_assert(D >= max_leaves, "a thread a leaf");
  tile::let_next_kernel_start();   // block 0 waits below, so the next one's wait covers split_kv too
  __shared__ CombineShared shared;
  const int used = min(columns, p.q_per_kv * p.tokens), thread = threadIdx.x;
  const unsigned per_row = p.cache.kv_heads * p.passes * used, in_row = blockIdx.x % per_row;
  const int b = static_cast<int>(blockIdx.x / per_row), column = static_cast<int>(in_row % used), task_in_row = static_cast<int>(in_row / used);
  const Task task{b, task_in_row / p.passes, task_in_row % p.passes};

  RowWork w = row_work_of(p, p.cache.format, b, read_from_l2);
  const int leaves = w.all_leaves();
  const bool counts = p.batch <= 32;
  if (!counts) tile::wait_for_previous_kernel();
  const UnitCount units = counts ? count_units(p, b) : UnitCount{p.row_begin[b], p.row_begin[p.batch], p.row_begin[p.batch + 1] != 0};
  if (!units.even) w.weigh(p.cache.format);
  const Split split(units.total, p.blocks, units.even);
  const int base = units.before + task_in_row * w.task_units();
  const bool merges = leaves > 0 && split.owner(base) != split.owner(base + w.leaf_begin(leaves - 1));   // else one block had it all
  const auto write = [&](float m, float l, float value) {
    const float o[1] = {value};
    write_result<T, 1>(p, task, w, column, thread, 0, thread == 0, m, l, o);
  };
  if (!merges) {
    if (leaves == 0 && w.fault == KvFault::none) write(-INFINITY, 0.0f, 0.0f);
    if (counts && blockIdx.x == 0) tile::wait_for_previous_kernel();
    return;
  }
  for (int leaf = thread; leaf <= max_leaves; leaf += D) {
    int at = 0, slot = 0, level = -1;
    if (leaf < leaves) {
      const int block = split.owner(base + w.leaf_begin(leaf)), end = min(leaves, w.leaf_from(split.begin(block + 1) - base));
      at = w.leaf_from(split.begin(block) - base);
      slot = block * slots_per_block + (at > 0 ? 0 : slots_inside);
      level = node_level(at, end);
      for (; at < leaf; ++slot) {
        at += 1 << level;
        level = at < end ? node_level(at, end) : 0;
      }
      if (at != leaf) level = -1;
    }
    shared.level[leaf] = level;
    shared.node[leaf] = level < 0 ? -1 : slot * columns + column;
  }
  __syncthreads();   // the places of the nodes are known
  if (counts) tile::wait_for_previous_kernel();

  float m, l, value;
  constexpr int few = 16, some = 32;   // leaves of most rows that are short enough for this kernel's time to count
  const bool right = leaves <= few + 1    ? fold_nodes<D, few>(p, shared, m, l, value)
                     : leaves <= some + 1 ? fold_nodes<D, some>(p, shared, m, l, value)
                                          : fold_nodes<D, max_leaves>(p, shared, m, l, value);
  if (right) write(m, l, value);
}

}  // namespace rooftile::gpu
