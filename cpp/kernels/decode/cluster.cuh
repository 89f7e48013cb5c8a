// SPDX-License-Identifier: Apache-2.0
// The end of a task that a cluster of blocks has computed: every block kept the states of its leaves in its shared
// memory; now the blocks take the columns in turn and merge them by tree.cuh. No second launch.
// Latency is the roof: a barrier of the cluster, then (m, l) and values at once from the other blocks' shared memory.
#pragma once

#include "kernels/decode/fold.cuh"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/tree.cuh"
#include "tile/grid.cuh"

namespace rooftile::gpu {

// Where the state of a task's leaf begins in the cluster's shared memory; behind the last leaf, its.
struct KeptLeaves {
  const float *o[cluster_leaves], *m[cluster_leaves], *l[cluster_leaves];
};
// Of leaf `at`. Memory: the block's FoldMemory, filled by Fold::keep. Known before there are any states.
template <class Memory>
__device__ __forceinline__ void find_leaf(KeptLeaves& kept, Memory& own, int at, int owner, int slot) {
  const Memory* memory = tile::in_block(&own, owner);
  kept.o[at] = memory->o[slot][0];
  kept.m[at] = memory->m[slot][0];
  kept.l[at] = memory->l[slot][0];
}

// All threads. keeps: the block has kept leaves. free: shared memory that no warp uses any more, a part of each warp.
template <class T, int D, int Threads>
__device__ __forceinline__ void merge_cluster(const DecodeParams& p, const Task& task, const RowWork& w, int rank, bool keeps, const KeptLeaves& kept, TreeMemory* free) {
  static_assert(D <= Threads, "a thread a value");
  using Leaves = Tree<cluster_leaves>;
  constexpr int column_threads = Threads / columns, N = piece_values<D>, apart = N * column_threads;
  const int thread = threadIdx.x, used = min(columns, p.q_per_kv * p.tokens - task.pass * columns);
  TreeMemory& memory = free[thread / 32];
  const int d = min(thread, D - 1), at = (d / apart * N + d % N) * Threads + d % apart / N;   // as the threads of segment() share column 0
  ColumnResult<T> result(p, task, w, rank);
  tile::sync_cluster();   // every block has kept its leaves
  for (int column = rank; column < used; column += p.cluster) {
    if (column != rank) result = ColumnResult<T>(p, task, w, column);
    // Nothing is skipped, so that all loads are on the way together: what is behind the last leaf is read and not used.
    Leaves leaves([&](int leaf) {
      const float m = kept.m[leaf][column], l = kept.l[leaf][column];
      return leaf < w.leaves ? make_float2(m, l) : make_float2(-INFINITY, 0.0f);
    });
    float o[cluster_leaves];
#pragma unroll
    for (int leaf = 0; leaf < cluster_leaves; ++leaf) o[leaf] = kept.o[leaf][at + column * column_threads];
#pragma unroll
    for (int leaf = 0; leaf < cluster_leaves; ++leaf) o[leaf] = leaf < w.leaves ? o[leaf] : 0.0f;
    __syncwarp();   // the last column's factors have been read
    if (!leaves.weigh(memory)) break;
    const float value[1] = {Leaves::value(memory, o)};
    if (thread < D) {
      result.finish(leaves.m(), leaves.l());
      result.write(thread, value);
      if (thread == 0) result.write_lse();
    }
  }
  if (!keeps) return;   // nobody reads from here
  tile::arrive_at_cluster();
  tile::wait_for_cluster();
}

}  // namespace rooftile::gpu
