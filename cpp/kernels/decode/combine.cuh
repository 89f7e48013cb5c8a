// SPDX-License-Identifier: Apache-2.0
// Merges the nodes that split_kv left of tasks that several blocks shared, and answers rows that see nothing.
//   node_o [blocks, slots, 8, D], node_ml [blocks, slots, 8, 2] -> out, lse
// One block a column of a task, a thread a value. It finds the task's nodes by the arithmetic of schedule.h, a thread a
// leaf, and fetches all their values at once into registers. One warp meanwhile works out the tree's (m, l) and the
// weights of every merge; then all threads run the same 63 multiply-adds. Leaves that are not there are empty states, and
// a node that came merged meets empty ones: both change no bit. So the tree is the fold's.
// Bytes: 4 (D + 2) a node, at most 65 nodes. Latency is the roof: three dependent fetches.
#pragma once

#include "kernels/decode/fold.cuh"
#include "kernels/decode/queries.cuh"
#include "tile/grid.cuh"

namespace rooftile::gpu {

// Levels `Level` to 6 of the tree over 64 values, in place: node (level, i) ends up at i << level.
template <int Level>
__device__ __forceinline__ void merge_levels(float (&o)[max_leaves + 1], const tile::MergeWeights* weights) {
#pragma unroll
  for (int i = 0; i < max_leaves >> Level; ++i)
    o[i << Level] = tile::merge_values(o[i << Level], o[(i << Level) + (1 << (Level - 1))], weights[max_leaves - (max_leaves >> (Level - 1)) + i]);
  if constexpr (Level + 1 < fold_levels) merge_levels<Level + 1>(o, weights);
}

template <class T, int D>
__global__ __launch_bounds__(D) void combine(const __grid_constant__ DecodeParams p) {
  static_assert(D >= max_leaves, "a thread a leaf");
  __shared__ float m_of[max_leaves + 1], l_of[max_leaves + 1];
  __shared__ int slot_of[max_leaves + 1], level_of[max_leaves + 1];   // of the node that starts at a leaf; level -1: none does
  __shared__ tile::MergeWeights weights[max_leaves];                  // node (level, i) at 64 - (64 >> (level - 1)) + i; then the last
  const int used = min(columns, p.q_per_kv * p.tokens), thread = threadIdx.x;
  const unsigned per_row = p.cache.kv_heads * p.passes * used, in_row = blockIdx.x % per_row;
  const int b = static_cast<int>(blockIdx.x / per_row), column = static_cast<int>(in_row % used), task_in_row = static_cast<int>(in_row / used);
  const Task task{b, task_in_row / p.passes, task_in_row % p.passes};
  tile::wait_for_previous_kernel();
  const RowWork w = row_work_of(p, b);
  if (w.fault != KvFault::none) return;
  const int leaves = w.all_leaves();
  const auto write = [&](float m, float l, float value) {
    const float o[1] = {value};
    write_result<T>(p, task, w, column, thread, thread == 0, m, l, o);
  };
  if (leaves == 0) return write(-INFINITY, 0.0f, 0.0f);
  const Split split(p.row_begin[p.batch], p.blocks);
  const int base = p.row_begin[b] + task_in_row * w.task_units();
  if (split.owner(base) == split.owner(base + w.leaf_begin(leaves - 1))) return;   // that block wrote the result

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
    float m = -INFINITY, l = 0.0f;
    if (level >= 0) {
      const float2 ml = *reinterpret_cast<const float2*>(p.node_ml + (std::int64_t{slot} * columns + column) * 2);
      m = ml.x;
      l = ml.y;
    }
    level_of[leaf] = level;
    slot_of[leaf] = slot;
    m_of[leaf] = m;
    l_of[leaf] = l;
  }
  __syncthreads();   // the nodes are known
  float o[max_leaves + 1];
#pragma unroll
  for (int leaf = 0; leaf <= max_leaves; ++leaf)
    o[leaf] = level_of[leaf] < 0 ? 0.0f : p.node_o[(std::int64_t{slot_of[leaf]} * columns + column) * D + thread];
  if (thread < 32) {
    // After step `level` lane i holds node (level, i).
    float m = 0.0f, l = 0.0f;
    int first = 0;
#pragma unroll
    for (int level = 1; level < fold_levels; ++level) {
      const int nodes = max_leaves >> level, start = thread << level;
      const float m_a = level == 1 ? m_of[2 * thread] : __shfl_sync(0xffffffffu, m, 2 * thread % 32);
      const float l_a = level == 1 ? l_of[2 * thread] : __shfl_sync(0xffffffffu, l, 2 * thread % 32);
      const float m_b = level == 1 ? m_of[2 * thread + 1] : __shfl_sync(0xffffffffu, m, (2 * thread + 1) % 32);
      const float l_b = level == 1 ? l_of[2 * thread + 1] : __shfl_sync(0xffffffffu, l, (2 * thread + 1) % 32);
      if (thread < nodes) {
        tile::MergeWeights merge{m_of[start], 1.0f, 0.0f};
        l = l_of[start];
        if (level_of[start] < level) {   // did not come merged
          merge = tile::merge_weights(m_a, m_b);
          l = tile::merge_values(l_a, l_b, merge);
        }
        m = merge.m;
        weights[first + thread] = merge;
      }
      first += nodes;
    }
    if (thread == 0) {   // with the 65th leaf
      const tile::MergeWeights merge = tile::merge_weights(m, m_of[max_leaves]);
      weights[max_leaves - 1] = merge;
      l_of[0] = tile::merge_values(l, l_of[max_leaves], merge);
    }
  }
  __syncthreads();   // the weights are there
  merge_levels<1>(o, weights);
  const tile::MergeWeights last = weights[max_leaves - 1];
  write(last.m, l_of[0], tile::merge_values(o[0], o[max_leaves], last));
}

}  // namespace rooftile::gpu
