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
  static constexpr int bins = 1 << max_key_bits;
  static_assert(bins == 2 * sample_threads, "two bins a thread");
  // A weight is added as three limbs of 14 bits, because shared memory has no 64-bit add. A CTA has at most 2^18
  // tokens: no limb's sum has more than 32 bits.
  static constexpr int limbs = 3, limb_bits = 14;
  static constexpr std::int64_t max_tokens_of_cta = std::int64_t{1} << (32 - limb_bits);
  static_assert(limbs * limb_bits > mass_bits, "a mass has mass_bits + 1 bits");
  struct Storage {
    alignas(16) std::uint32_t own[limbs][bins];  // of this CTA's tokens
    alignas(16) std::uint64_t sums[bins];        // of the cluster's: the bins that this CTA adds up, from 0 on
    std::uint32_t bin;
    std::uint64_t before;
  };
  using Sums = ClusterSums<sample_threads>;

  // Called by all threads; a barrier has to follow before the first find().
  __device__ KeySearch(Storage& smem, int cluster) : smem_(smem), cluster_(cluster) { clear(); }

  // for_each_key(f) calls f(key) for this thread's tokens; weight(key) is 0 to 2^mass_bits; target(sum) is 1 to the sum
  // of all weights. Called by all threads of the cluster.
  template <class ForEachKey, class Weight, class Target>
  __device__ __forceinline__ FoundKey find(Sums& sums, ForEachKey&& for_each_key, Weight&& weight, Target&& target) {
    FoundKey found = {0, 0, 0};
    const int bins_of_cta = bins / cluster_, thread = static_cast<int>(threadIdx.x);
#pragma unroll 1
    for (int level = 0; level < key_levels; ++level) {
      const int shift = key_bits(level).shift, bits = key_bits(level).bits;
      for_each_key([&](std::uint32_t key) {
        if (level == 0 || key >> (shift + bits) == found.key) add(key >> shift & ((1u << bits) - 1), weight(key));
      });
      sums.barrier();  // all CTAs -> all CTAs: own
      for (int bin = thread; bin < bins_of_cta; bin += sample_threads) {
        const int rank = static_cast<int>(tile::cluster_coord().rank);
        smem_.sums[bin] = sum_of_cluster(rank * bins_of_cta + bin);
      }
      sums.barrier();  // all CTAs -> all CTAs: sums; nobody reads `own` any more
      clear();
      const int first = 2 * thread;
      const std::uint64_t* const from = tile::map_shared_rank(&smem_.sums[first % bins_of_cta], first / bins_of_cta);
      const std::uint64_t low = from[0], high = from[1];
      const Sums::Prefix prefix = sums.prefix(low + high);
      if (level == 0) found.target = target(prefix.total);
      const std::uint64_t before = found.before + prefix.before;
      if (before < found.target && found.target <= before + low + high) {
        const bool in_high = before + low < found.target;
        smem_.bin = first + in_high;
        smem_.before = in_high ? before + low : before;
      }
      __syncthreads();  // one thread -> all threads: bin and before; all -> all: the cleared bins
      found = {found.key << bits | smem_.bin, smem_.before, found.target};
    }
    return found;
  }

 private:
  __device__ void clear() {
#pragma unroll
    for (int limb = 0; limb < limbs; ++limb)
      for (int i = threadIdx.x; i < bins; i += sample_threads) smem_.own[limb][i] = 0;
  }
  __device__ void add(std::uint32_t bin, std::uint64_t weight) {
#pragma unroll
    for (int limb = 0; limb < limbs; ++limb) {
      const std::uint32_t part =
          static_cast<std::uint32_t>(weight >> limb * limb_bits) & (limb == limbs - 1 ? ~0u : (1u << limb_bits) - 1);
      if (part > 0) atomicAdd(&smem_.own[limb][bin], part);
    }
  }
  __device__ std::uint64_t sum_of_cluster(int bin) const {
    std::uint64_t sum = 0;
#pragma unroll
    for (int rank = 0; rank < Sums::max_ctas; ++rank) {
      if (rank >= cluster_) break;
#pragma unroll
      for (int limb = 0; limb < limbs; ++limb)
        sum += std::uint64_t{*tile::map_shared_rank(&smem_.own[limb][bin], rank)} << limb * limb_bits;
    }
    return sum;
  }

  Storage& smem_;
  int cluster_;
};

}  // namespace rooftile::gpu
