// SPDX-License-Identifier: Apache-2.0
// The key at which the weights of a row's tokens, from the smallest key on, reach a target: top_k's last key (weights
// of 1) and top_p's (masses). Three levels of key bits, each a histogram in shared memory: the CTAs of the cluster add
// theirs up. All sums are integers, so the order of the atomics changes no bit.
#pragma once

#include "core/sampling.h"
#include "kernels/sampling/cluster_sums.cuh"
#include "kernels/sampling/row_slice.cuh"

namespace rooftile::gpu {

struct FoundKey {
  std::uint32_t key;
  std::uint64_t before, target;  // weights of smaller keys; what was searched for
};

class KeySearch {
 public:
  static constexpr int most_ctas = 8;  // of a cluster
  static constexpr int bins = 1 << most_key_bits;
  static_assert(bins == 2 * sample_threads, "two bins a thread");
  struct Storage {
    alignas(16) std::uint64_t sums[2][bins];  // two levels in turns
    std::uint32_t bin;
    std::uint64_t before;
  };
  using Sums = ClusterSums<sample_threads>;

  // Called by all threads; a barrier has to follow before the first find().
  __device__ KeySearch(Storage& smem, int cluster) : smem_(smem), cluster_(cluster) { clear(0); }

  // for_each_key(f) calls f(key) for this thread's tokens; weight(key) is at least 0; target(sum) is 1 to the sum of
  // all weights. Called by all threads of the cluster.
  template <class ForEachKey, class Weight, class Target>
  __device__ __forceinline__ FoundKey find(Sums& sums, ForEachKey&& for_each_key, Weight&& weight, Target&& target) {
    FoundKey found = {0, 0, 0};
#pragma unroll 1
    for (int level = 0; level < key_levels; ++level) {
      const int shift = key_bits(level).shift, bits = key_bits(level).bits;
      std::uint64_t (&own)[bins] = smem_.sums[use_];
      for_each_key([&](std::uint32_t key) {
        if (level > 0 && key >> (shift + bits) != found.key) return;
        const std::uint64_t w = weight(key);
        if (w > 0) add(&own[key >> shift & ((1u << bits) - 1)], w);
      });
      sums.barrier();                   // all CTAs -> all CTAs: the histograms of this level are complete
      std::uint64_t low = 0, high = 0;  // the sums of this thread's two bins
#pragma unroll
      for (int rank = 0; rank < most_ctas; ++rank) {
        if (rank >= cluster_) break;
        const std::uint64_t* other = tile::map_shared_rank(&own[2 * threadIdx.x], rank);
        low += other[0];
        high += other[1];
      }
      clear(use_ ^= 1);  // no CTA reads the last level's any more: all have come to this level's barrier
      const Sums::Prefix prefix = sums.prefix(low + high);
      if (level == 0) found.target = target(prefix.total);
      const std::uint64_t before = found.before + prefix.before;
      if (before < found.target && found.target <= before + low + high) {
        const bool in_high = before + low < found.target;
        smem_.bin = 2 * threadIdx.x + in_high;
        smem_.before = in_high ? before + low : before;
      }
      __syncthreads();  // one thread -> all threads: bin and before; the cleared histogram
      found = {found.key << bits | smem_.bin, smem_.before, found.target};
    }
    return found;
  }

 private:
  __device__ void clear(int use) {
    for (int i = threadIdx.x; i < bins; i += sample_threads) smem_.sums[use][i] = 0;
  }
  __device__ static void add(std::uint64_t* to, std::uint64_t x) {
    atomicAdd(reinterpret_cast<unsigned long long*>(to), static_cast<unsigned long long>(x));
  }

  Storage& smem_;
  int cluster_, use_ = 0;
};

}  // namespace rooftile::gpu
