// SPDX-License-Identifier: Apache-2.0
// The end of a task that a cluster of blocks has computed: the blocks have the task's columns in turn, each block
// writes the states of its leaves to the blocks that have the columns, and these merge them by tree.cuh. No second
// launch.
// Latency is the roof: one barrier of the cluster; what is read behind it lies in the block's own shared memory.
#pragma once

#include "kernels/decode/queries.cuh"
#include "kernels/decode/tree_reduction.cuh"
#include "tile/grid.cuh"

namespace rooftile::gpu {

// The states of a block's columns, of every leaf of the task.
template <int D>
struct ClusterPartials {
  alignas(16) float o[cluster_partials * mma_n][D];
  float2 ml[cluster_partials * mma_n];  // l below 0: a page was none
};
// Which block of a cluster has a column, and where it has the state of a leaf.
__device__ __forceinline__ int cta_of_row(const DecodeParams& p, int m_row) { return m_row & (p.cluster_size - 1); }
__device__ __forceinline__ int cluster_partial(const DecodeParams& p, int split, int m_row) {
  const int log2_size = first_bit(p.cluster_size);
  return (split * mma_n >> log2_size) + (m_row >> log2_size);
}

// All threads, once the block's states are on their way. free: shared memory that no warp uses any more, a part of each
// warp.
template <class T, int D, int Threads>
__device__ __forceinline__ void reduce_cluster(const DecodeParams& p, const WorkTile& tile, const RowWork& w,
                                               int cta_rank, const ClusterPartials<D>& partials, TreeStorage* trees) {
  static_assert(D <= Threads, "a thread a value");
  using Reduction = TreeReduction<cluster_splits>;
  const int thread = threadIdx.x, d = min(thread, D - 1),
            rows_used = min(mma_n, p.q_per_kv * p.tokens - tile.m_block * mma_n);
  TreeStorage& smem = trees[thread / 32];
  RowEpilogue<T> epilogue(p, tile, w, cta_rank);
  tile::sync_cluster();  // all states have come
  for (int m_row = cta_rank; m_row < rows_used; m_row += p.cluster_size) {
    if (m_row != cta_rank) epilogue = RowEpilogue<T>(p, tile, w, m_row);
    // Nothing is skipped, so that all loads are on the way together: what is behind the last leaf is its state, and not
    // used.
    const int row_first = cluster_partial(p, 0, m_row), stride = cluster_partial(p, 1, 0);
    const auto index = [&](int split) { return row_first + min(split, w.splits - 1) * stride; };
    Reduction reduction([&](int split) {
      const float2 ml = partials.ml[index(split)];
      return split < w.splits ? ml : make_float2(-INFINITY, 0.0f);
    });
    float o[cluster_splits];
#pragma unroll
    for (int split = 0; split < cluster_splits; ++split) o[split] = partials.o[index(split)][d];
#pragma unroll
    for (int split = 0; split < cluster_splits; ++split) o[split] = split < w.splits ? o[split] : 0.0f;
    __syncwarp();  // the last column's factors have been read
    if (!reduction.compute_factors(smem)) break;
    const float value[1] = {Reduction::reduce(smem, o)};
    if (thread < D) {
      epilogue.finalize(reduction.m(), reduction.l());
      epilogue.store(thread, value);
      if (thread == 0) epilogue.store_lse();
    }
  }
}

}  // namespace rooftile::gpu
