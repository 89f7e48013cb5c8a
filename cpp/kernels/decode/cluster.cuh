// SPDX-License-Identifier: Apache-2.0
// The end of a task that a cluster of blocks has computed: the blocks have the task's columns in turn, each block
// writes the states of its leaves to the blocks that have the columns, and these merge them by tree.cuh. No second
// launch.
// Latency is the roof: one barrier of the cluster; what is read behind it lies in the block's own shared memory.
#pragma once

#include "kernels/decode/queries.cuh"
#include "kernels/decode/tree.cuh"
#include "tile/grid.cuh"

namespace rooftile::gpu {

// The states of a block's columns, of every leaf of the task.
template <int D>
struct ClusterStates {
  alignas(16) float o[cluster_slots * columns][D];
  float2 ml[cluster_slots * columns];  // l below 0: a page was none
};
// Which block of a cluster has a column, and where it has the state of a leaf.
__device__ __forceinline__ int block_of_column(const DecodeParams& p, int column) { return column & (p.cluster - 1); }
__device__ __forceinline__ int cluster_slot(const DecodeParams& p, int leaf, int column) {
  const int shift = first_bit(p.cluster);
  return (leaf * columns >> shift) + (column >> shift);
}

// All threads, once the block's states are on their way. free: shared memory that no warp uses any more, a part of each
// warp.
template <class T, int D, int Threads>
__device__ __forceinline__ void merge_cluster(const DecodeParams& p, const Task& task, const RowWork& w, int rank,
                                              const ClusterStates<D>& states, TreeMemory* free) {
  static_assert(D <= Threads, "a thread a value");
  using Leaves = Tree<cluster_leaves>;
  const int thread = threadIdx.x, d = min(thread, D - 1),
            used = min(columns, p.q_per_kv * p.tokens - task.pass * columns);
  TreeMemory& memory = free[thread / 32];
  ColumnResult<T> result(p, task, w, rank);
  tile::sync_cluster();  // all states have come
  for (int column = rank; column < used; column += p.cluster) {
    if (column != rank) result = ColumnResult<T>(p, task, w, column);
    // Nothing is skipped, so that all loads are on the way together: what is behind the last leaf is its state, and not
    // used.
    const int first = cluster_slot(p, 0, column), apart = cluster_slot(p, 1, 0);
    const auto slot = [&](int leaf) { return first + min(leaf, w.leaves - 1) * apart; };
    Leaves leaves([&](int leaf) {
      const float2 ml = states.ml[slot(leaf)];
      return leaf < w.leaves ? ml : make_float2(-INFINITY, 0.0f);
    });
    float o[cluster_leaves];
#pragma unroll
    for (int leaf = 0; leaf < cluster_leaves; ++leaf) o[leaf] = states.o[slot(leaf)][d];
#pragma unroll
    for (int leaf = 0; leaf < cluster_leaves; ++leaf) o[leaf] = leaf < w.leaves ? o[leaf] : 0.0f;
    __syncwarp();  // the last column's factors have been read
    if (!leaves.weigh(memory)) break;
    const float value[1] = {Leaves::value(memory, o)};
    if (thread < D) {
      result.finish(leaves.m(), leaves.l());
      result.write(thread, value);
      if (thread == 0) result.write_lse();
    }
  }
}

}  // namespace rooftile::gpu
