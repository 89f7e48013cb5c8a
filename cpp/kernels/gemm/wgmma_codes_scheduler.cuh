// SPDX-License-Identifier: Apache-2.0
// The tile scheduler of wgmma_codes.cuh, and stream-K's fix-up sums.
#pragma once

#include "kernels/gemm/params.h"
#include "kernels/gemm/wgmma_codes_traits.cuh"
#include "tile/semaphore.cuh"
#include "tile/warps.cuh"

namespace rooftile::gpu {

// The work tile of a CTA: 128 rows of W x Traits::tokens tokens x a range of K. The CTAs of a cluster
// have the same tokens.
struct W4WgmmaWorkTile {
  unsigned split, n_block, m_block;
  int first, steps;  // `steps` steps of 128 k, from step `first` on
};

// The tile scheduler of one cluster.
// Data-parallel or split-K: work tiles are strided over the clusters. Neighbouring clusters take different tokens, in
// groups of m_group m-blocks, whose x stays in L2 while the group meets all rows of W.
// Stream-K: for each m-block, the steps of all rows of W are one sequence, cut into `ranges` work ranges of equal
// length, to within one step. A work range may end inside a tile's K. The scheduler takes tiles from the end of the
// range to its beginning: first the tile whose K goes on in the next range, whose sums the CTA writes as fix-up sums;
// last the tile that the range before began, whose fix-up sums initialise the accumulator. So every output is summed in
// the order of K, wherever work ranges end.
template <class Traits>
class W4TileScheduler {
 public:
  __device__ __forceinline__ W4TileScheduler(const WgmmaParams& params, int cta_rank)
      : params_(params), cta_rank_(cta_rank), ranges_(Traits::stream_k ? params.ranges : 0) {
    const CodesParams& p = params;
    const unsigned cluster = blockIdx.x >> p.cluster_shift;
    if (stream_k()) {
      const unsigned range = divide(cluster, p.by_m_blocks);
      m_block_ = cluster - range * p.m_blocks;
      next_ = params.range_begin(range);
      end_ = params.range_begin(range + 1);
    } else {
      next_ = cluster;
      end_ = (p.n_blocks >> p.cluster_shift) * p.m_blocks * p.splits;
    }
  }
  __device__ __forceinline__ bool has_next() const { return next_ < end_; }
  __device__ __forceinline__ W4WgmmaWorkTile next() {
    const CodesParams& p = params_;
    W4WgmmaWorkTile at;
    if (stream_k()) {
      const unsigned cluster_tile = divide(end_ - 1, params_.by_steps), begin = max(cluster_tile * p.steps, next_);
      at.split = 0;
      at.n_block = (cluster_tile << p.cluster_shift) + cta_rank_;
      at.m_block = m_block_;
      at.first = static_cast<int>(begin - cluster_tile * p.steps);
      at.steps = static_cast<int>(end_ - begin);
      end_ = begin;
      return at;
    }
    at.split = divide(next_, params_.by_tiles);
    const unsigned index = next_ - at.split * params_.by_tiles.value;
    next_ += gridDim.x >> p.cluster_shift;
    unsigned cluster_tile = divide(index, p.by_m_blocks);
    at.m_block = index - cluster_tile * p.m_blocks;
    if (p.m_blocks > params_.m_group) {
      const unsigned width = params_.m_group, of_group = (p.n_blocks >> p.cluster_shift) * width,
                     group = index / of_group, in_group = index - group * of_group;
      const unsigned own_width = min(width, p.m_blocks - group * width);
      cluster_tile = in_group / own_width;
      at.m_block = group * width + in_group - cluster_tile * own_width;
    }
    at.n_block = (cluster_tile << p.cluster_shift) + cta_rank_;
    at.first = static_cast<int>(at.split) * p.split_steps;
    at.steps = min(p.split_steps, p.steps - at.first);
    return at;
  }
  // Stream-K: the tile's K goes on in the next range, or began in the range before.
  __device__ __forceinline__ bool writes_fixup(const W4WgmmaWorkTile& at) const {
    return stream_k() && at.first + at.steps < params_.steps;
  }
  __device__ __forceinline__ bool reads_fixup(const W4WgmmaWorkTile& at) const { return stream_k() && at.first > 0; }
  // The CTA of the range before, which writes this CTA's fix-up sums.
  __device__ __forceinline__ unsigned fixup_cta() const {
    return blockIdx.x - (params_.m_blocks << params_.cluster_shift);
  }

 private:
  __device__ __forceinline__ bool stream_k() const { return Traits::stream_k && ranges_ > 0; }

  const WgmmaParams& params_;
  int cta_rank_;
  int ranges_;                         // work ranges of stream-K; 0: no stream-K
  unsigned next_, end_, m_block_ = 0;  // [next, end): work tiles; stream-K: steps, taken from the end
};

// This thread's fix-up sums of CTA `cta`: (BLK_N / 8) vectors of 4, of the CTA's (consumer threads, BLK_N / 8).
template <class Traits>
__device__ __forceinline__ auto w4_fixup_sums(const WgmmaParams& params, unsigned cta) {
  using namespace cute;
  constexpr int threads = size(typename Traits::TiledMma{});
  constexpr Layout layout = Layout<Shape<Int<threads>, Int<Traits::tokens / 8>>>{};
  float4* const sums = recast_ptr<float4>(params.fixup_sums) + std::int64_t{cta} * size(layout);
  return make_tensor(make_gmem_ptr(sums), layout)(threadIdx.x, _);
}
// rAcc ((2, 2, BLK_N / 8), 1, 1): starts from the sums that CTA `cta` has written.
template <class Traits, class Acc>
__device__ __forceinline__ void w4_read_fixup(const WgmmaParams& params, unsigned cta, Acc& rAcc) {
  using namespace cute;
  if (threadIdx.x % 32 == 0) tile::wait_semaphore(params.semaphores + cta, params.semaphore_value);
  __syncwarp();
  Tensor gSums = w4_fixup_sums<Traits>(params, cta);  // (BLK_N / 8)
  Tensor rSums = recast<float4>(rAcc);                // ((1, 1, BLK_N / 8), 1, 1)
  CUTE_UNROLL
  for (int i = 0; i < size(gSums); ++i) rSums(i) = __ldcg(&gSums(i));
}
// Writes rAcc for the next work range. All consumer warps.
template <class Traits, class Acc>
__device__ __forceinline__ void w4_write_fixup(const WgmmaParams& params, const Acc& rAcc) {
  using namespace cute;
  Tensor gSums = w4_fixup_sums<Traits>(params, blockIdx.x);  // (BLK_N / 8)
  Tensor rSums = recast<const float4>(rAcc);                 // ((1, 1, BLK_N / 8), 1, 1)
  CUTE_UNROLL
  for (int i = 0; i < size(gSums); ++i) __stcg(&gSums(i), rSums(i));
  tile::sync_tile_warps<Traits::warps>(0);  // all consumers have written their sums
  if (threadIdx.x == 0) tile::release_semaphore(params.semaphores + blockIdx.x, params.semaphore_value);
}

}  // namespace rooftile::gpu
