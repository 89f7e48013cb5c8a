// SPDX-License-Identifier: Apache-2.0
// Reductions and prefix sums of 64-bit integers over the threads of a CTA and of a cluster, a CTA where there are no
// clusters. Called by all threads.
#pragma once

#include <cstdint>

#include "tile/cta_sync.cuh"

namespace rooftile::gpu {

template <int Threads>
class ClusterSums {
 public:
  static constexpr int warps = Threads / 32, most_values = 4;
  struct Storage {
    std::uint64_t of_warp[2][warps];    // two uses in turns: a slow warp may still read the last one's
    std::uint64_t of_cta[most_values];  // a value of this CTA for the cluster; each is written once a launch
  };
  __device__ ClusterSums(Storage& smem, int cluster) : smem_(smem), cluster_(cluster) {}

  struct Prefix {
    std::uint64_t before, total;  // the sum of the threads before this one, of all threads of the CTA
  };
  // The sum of this lane and those before it.
  __device__ static std::uint64_t prefix_of_lanes(std::uint64_t x) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const std::uint64_t below = __shfl_up_sync(all_lanes, x, distance);
      if (lane() >= distance) x += below;
    }
    return x;
  }
  __device__ Prefix prefix(std::uint64_t x) {
    const std::uint64_t sum = prefix_of_lanes(x);
    std::uint64_t (&of_warp)[warps] = smem_.of_warp[use_ ^= 1];
    if (lane() == 31) of_warp[warp()] = sum;
    __syncthreads();  // all warps -> all warps: every warp's sum is in of_warp
    std::uint64_t before = 0, total = lane() < warps ? of_warp[lane()] : 0;
    if (lane() < warp()) before = total;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
      before += __shfl_xor_sync(all_lanes, before, mask);
      total += __shfl_xor_sync(all_lanes, total, mask);
    }
    return {before + sum - x, total};
  }

  // The largest value of all threads of the cluster.
  __device__ std::uint64_t largest(std::uint64_t x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x = larger(x, __shfl_xor_sync(all_lanes, x, mask));
    std::uint64_t (&of_warp)[warps] = smem_.of_warp[use_ ^= 1];
    if (lane() == 0) of_warp[warp()] = x;
    __syncthreads();  // all warps -> all warps: every warp's value is in of_warp
    x = lane() < warps ? of_warp[lane()] : 0;
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x = larger(x, __shfl_xor_sync(all_lanes, x, mask));
    const int value = publish(x);
    barrier();  // all CTAs -> all CTAs: every CTA's value is in of_cta
    x = of(value, lane() % cluster_);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x = larger(x, __shfl_xor_sync(all_lanes, x, mask));
    return x;
  }

  // All threads -> all threads of the cluster: writes to shared memory.
  __device__ static void barrier() {
    if constexpr (tile::has_clusters) tile::sync_cluster();
    else __syncthreads();
  }

  // Makes a value of this CTA known to the cluster after its next barrier. Returns its index for of().
  __device__ int publish(std::uint64_t x) {
    if (threadIdx.x == 0) smem_.of_cta[values_] = x;
    return values_++;
  }
  // The published value of CTA `rank`.
  __device__ std::uint64_t of(int value, int rank) { return *tile::map_shared_rank(&smem_.of_cta[value], rank); }

 private:
  static constexpr unsigned all_lanes = 0xffffffffu;
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static std::uint64_t larger(std::uint64_t a, std::uint64_t b) { return a > b ? a : b; }

  Storage& smem_;
  int cluster_, use_ = 0, values_ = 0;
};

}  // namespace rooftile::gpu
