// SPDX-License-Identifier: Apache-2.0
// The end of a work tile that a cluster of CTAs has computed. The tile's packed rows are distributed over the CTAs: row
// r belongs to CTA r % cluster_size. Each CTA writes its partials into the shared memory of the rows' CTAs, and these
// reduce them by TreeReduction. There is no second kernel.
// Bound by latency: one cluster barrier; the data read after the barrier is in the CTA's own shared memory.
#pragma once

#include "kernels/decode/epilogue.cuh"
#include "kernels/decode/tree_reduction.cuh"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {

// Partials of a CTA's packed rows, from all KV splits of the work tile.
template <int D>
struct ClusterPartials {
  alignas(16) float o[cluster_partials * mma_n][D];  // (partial, channel)
  float2 ml[cluster_partials * mma_n];               // (m, l) of a partial; l < 0: invalid page
};
// The CTA of a cluster that a packed row belongs to, and the index of (split, row) among that CTA's partials.
__device__ __forceinline__ int cta_of_row(const DecodeParams& p, int m_row) { return m_row & (p.cluster_size - 1); }
__device__ __forceinline__ int cluster_partial(const DecodeParams& p, int split, int m_row) {
  const int log2_size = first_bit(p.cluster_size);
  return (split * mma_n >> log2_size) + (m_row >> log2_size);
}

// Called by all threads after the CTA's partials have been written. trees: shared memory that no warp uses any more,
// one TreeStorage per warp.
template <class T, int D, int Threads>
__device__ __forceinline__ void reduce_cluster(const DecodeParams& p, const WorkTile& tile, const RowWork& w,
                                               int cta_rank, const ClusterPartials<D>& partials, TreeStorage* trees) {
  static_assert(D <= Threads, "a thread a value");
  using Reduction = TreeReduction<cluster_splits>;
  const int thread = threadIdx.x, d = min(thread, D - 1),
            rows_used = min(mma_n, p.q_per_kv * p.tokens - tile.first_n_tile * mma_n);
  TreeStorage& smem = trees[thread / 32];
  RowEpilogue<T> epilogue(p, tile, w, cta_rank);
  tile::sync_cluster();  // the partials of all CTAs have arrived
  for (int m_row = cta_rank; m_row < rows_used; m_row += p.cluster_size) {
    if (m_row != cta_rank) epilogue = RowEpilogue<T>(p, tile, w, m_row);
    // No load is skipped, so that all are in flight together: past the last split the last split is loaded again, and
    // not used.
    const int row_first = cluster_partial(p, 0, m_row), stride = cluster_partial(p, 1, 0);
    const auto index = [&](int split) { return row_first + min(split, w.splits - 1) * stride; };
    Reduction reduction([&](int split) {
      const float2 ml = partials.ml[index(split)];
      return split < w.splits ? ml : make_float2(-INFINITY, 0.0f);
    });
    float o[cluster_splits];  // (split): this thread's channel
#pragma unroll
    for (int split = 0; split < cluster_splits; ++split) o[split] = partials.o[index(split)][d];
#pragma unroll
    for (int split = 0; split < cluster_splits; ++split) o[split] = split < w.splits ? o[split] : 0.0f;
    __syncwarp();  // the previous row's factors have been read
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
