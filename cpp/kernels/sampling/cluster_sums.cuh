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
  static constexpr int warps = Threads / 32, max_values = 5;
  struct Storage {
    std::uint64_t of_warp[2][warps];   // double-buffered: a slow warp may still read the use before
    std::uint64_t of_cta[max_values];  // a value of this CTA for the cluster; each is written once a launch
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
    x = of_cta(value);
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x = larger(x, __shfl_xor_sync(all_lanes, x, mask));
    return x;
  }

  // All threads -> all threads of the cluster: writes to shared memory.
  __device__ static void barrier() {
    if constexpr (tile::has_clusters) tile::sync_cluster();
    else __syncthreads();
  }

  // Makes a value of this CTA known to the cluster after its next barrier. Returns its index for of_cta().
  __device__ int publish(std::uint64_t x) {
    if (threadIdx.x == 0) smem_.of_cta[values_] = x;
    return values_++;
  }
  // What CTA (lane % 8) of the cluster has at `own`; 0 past the last CTA. A warp has all of them after one access.
  static constexpr int max_ctas = 8;
  template <class X>
  __device__ X of_cta(X* own) const {
    const int rank = lane() % max_ctas;
    return rank < cluster_ ? *tile::map_shared_rank(own, rank) : X{};
  }
  __device__ std::uint64_t of_cta(int value) const { return of_cta(&smem_.of_cta[value]); }
  // The sum over the CTAs of such a value.
  __device__ static std::uint64_t sum_of_ctas(std::uint64_t x) {
#pragma unroll
    for (int mask = max_ctas / 2; mask > 0; mask /= 2) x += __shfl_xor_sync(all_lanes, x, mask);
    return x;
  }
  // The sum over the CTAs of lower rank.
  __device__ static std::uint64_t sum_before(std::uint64_t x, int rank) {
    return sum_of_ctas(lane() % max_ctas < rank ? x : 0);
  }

 private:
  static constexpr unsigned all_lanes = 0xffffffffu;
  __device__ static int lane() { return threadIdx.x % 32; }
  __device__ static int warp() { return threadIdx.x / 32; }
  __device__ static std::uint64_t larger(std::uint64_t a, std::uint64_t b) { return a > b ? a : b; }

  Storage& smem_;
  int cluster_, use_ = 0, values_ = 0;
};

}  // namespace rooftile::gpu
