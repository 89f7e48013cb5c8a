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

struct ClusterMemory {
  TreeMemory tree;
  const float *o[cluster_leaves], *m[cluster_leaves], *l[cluster_leaves];   // where a leaf's state begins; behind the last leaf, its
};

// Memory: the block's FoldMemory, filled by Fold::keep. free: shared memory that no warp uses any more. All threads.
template <class T, int D, int Threads, class Memory>
__device__ __forceinline__ void merge_cluster(const DecodeParams& p, const Task& task, const RowWork& w, int rank, Memory& own,
                                              ClusterMemory& free) {
  static_assert(D <= Threads, "a thread a value");
  constexpr int column_threads = Threads / columns, N = piece_values<D>, apart = N * column_threads;
  const int thread = threadIdx.x, used = min(columns, p.q_per_kv * p.tokens - task.pass * columns);
  const bool keeps = w.leaf_of_rank(rank, p.cluster) < w.leaf_of_rank(rank + 1, p.cluster);
  if (thread < cluster_leaves) {
    const int leaf = min(thread, w.leaves - 1), owner = w.rank_of_leaf(leaf, p.cluster), slot = leaf - w.leaf_of_rank(owner, p.cluster);
    const Memory* memory = tile::in_block(&own, owner);
    free.tree.level[thread] = 0;
    free.o[thread] = memory->o[slot][0];
    free.m[thread] = memory->m[slot];
    free.l[thread] = memory->l[slot];
  }
  tile::sync_cluster();   // every block has kept its leaves; the addresses are there
  const int d = min(thread, D - 1), at = (d / apart * N + d % N) * Threads + d % apart / N;   // as the threads of segment() share column 0
  for (int column = rank; column < used; column += p.cluster) {
    using Leaves = Tree<cluster_leaves, Threads>;
    // Nothing is skipped, so that all loads are on the way together: what is behind the last leaf is read and not used.
    Leaves leaves([&](int leaf) {
      const float m = free.m[leaf][column], l = free.l[leaf][column];
      return leaf < w.leaves ? make_float2(m, l) : make_float2(-INFINITY, 0.0f);
    });
    float o[cluster_leaves];
#pragma unroll
    for (int leaf = 0; leaf < cluster_leaves; ++leaf) o[leaf] = free.o[leaf][at + column * column_threads];
#pragma unroll
    for (int leaf = 0; leaf < cluster_leaves; ++leaf) o[leaf] = leaf < w.leaves ? o[leaf] : 0.0f;
    if (column != rank) __syncthreads();   // the last column's weights have been read
    if (!leaves.weigh(free.tree)) break;
    const float value[1] = {Leaves::value(free.tree, o)};
    if (thread < D) write_result<T, 1>(p, task, w, column, thread, 0, thread == 0, Leaves::m(free.tree), Leaves::l(free.tree), value);
  }
  if (!keeps) return;   // nobody reads from here
  tile::arrive_at_cluster();
  tile::wait_for_cluster();
}

}  // namespace rooftile::gpu
