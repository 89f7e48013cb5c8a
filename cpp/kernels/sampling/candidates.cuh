// SPDX-License-Identifier: Apache-2.0
// The draw from few tokens, all that top_k, min_p or top_p leave of most texts: the CTAs of a cluster list their own,
// one CTA sorts them, a thread a token.
#pragma once

#include "core/sampling.h"
#include "kernels/sampling/cluster_sums.cuh"
#include "kernels/sampling/row_slice.cuh"

namespace rooftile::gpu {

class Candidates {
 public:
  static constexpr int most = sample_threads;
  static constexpr int bin_shift = 23, bins = 1 << (31 - bin_shift);  // a bin is an eighth of a unit of distance
  struct Storage {
    std::uint64_t listed[most];             // of this CTA, in any order: the key above the token
    std::uint64_t all[most], sorted[most];  // of the cluster; the likeliest first
    std::uint64_t mass[most];               // of sorted tokens that may be drawn, else 0
    std::uint32_t count;                    // of listed
    std::uint32_t threads[bins];            // threads of this CTA by the upper bits of their smallest key
    std::uint32_t last;                     // what last_key_of() finds
  };
  using Sums = ClusterSums<sample_threads>;

  // Called by all threads; a barrier has to follow.
  __device__ Candidates(Storage& smem) : smem_(smem) {
    if (threadIdx.x < bins) smem_.threads[threadIdx.x] = 0;
    if (threadIdx.x == 0) smem_.count = 0;
  }

  // A key up to which at least `count` tokens lie: the threads' smallest keys, each counted once, reach `count` in the
  // bin that ends there. Called by all threads of the cluster; at least `count` of them have tokens.
  template <class Keys>
  __device__ std::uint32_t last_key_of(std::uint32_t count, const Keys& keys, Sums& sums, int cluster) {
    if (keys.size() > 0) atomicAdd(&smem_.threads[keys.smallest() >> bin_shift], 1u);
    sums.barrier();  // all CTAs -> all CTAs: threads
    std::uint32_t own = 0;
    if (threadIdx.x < bins)
#pragma unroll
      for (int rank = 0; rank < Sums::max_ctas; ++rank)
        if (rank < cluster) own += *tile::map_shared_rank(&smem_.threads[threadIdx.x], rank);
    const std::uint64_t before = sums.prefix(own).before;
    if (before < count && count <= before + own) smem_.last = ((threadIdx.x + 1) << bin_shift) - 1;
    __syncthreads();  // one thread -> all threads: last
    return smem_.last;
  }

  // Lists the tokens with keys up to `last` of the whole cluster. Whether the draw is from these: there are at most
  // `most`, and where top_p is of all tokens, its part is among them. Called by all threads of the cluster.
  template <class Keys>
  __device__ bool list(const SampleParams& p, const Keys& keys, std::uint32_t last, Sums& sums) {
    const bool of_all = p.top_k == 0 && p.top_p < 1;
    const std::uint32_t limit = p.min_p_first ? p.min_p_key : last_key;
    std::uint64_t all = 0, listed = 0;  // masses of this thread's tokens up to `limit`, up to `last` as well
    keys.template for_each<2>([&](int token, std::uint32_t key) {
      const std::uint64_t mass = of_all && key <= limit ? sampling_mass(key) : 0;
      all += mass;
      if (key > last) return;
      listed += mass;
      const std::uint32_t at = atomicAdd(&smem_.count, 1u);
      if (at < most) smem_.listed[at] = std::uint64_t{key} << 32 | static_cast<std::uint32_t>(token);
    });
    int all_value = 0, listed_value = 0;
    if (of_all) {
      all_value = sums.publish(sums.prefix(all).total);
      listed_value = sums.publish(sums.prefix(listed).total);
    }
    sums.barrier();  // all CTAs -> all CTAs: listed, count, published sums
    const int thread = static_cast<int>(threadIdx.x);
    int total = 0, rank = -1, at = 0;  // what this thread reads: token `at` of CTA `rank`
    const std::uint32_t counts = sums.of_cta(&smem_.count);
#pragma unroll
    for (int other = 0; other < Sums::max_ctas; ++other) {
      const int count = static_cast<int>(__shfl_sync(0xffffffffu, counts, other));
      if (thread >= total && thread < total + count) rank = other, at = thread - total;
      total += min(count, 2 * most);  // no overflow of the sum
    }
    count_ = total;
    if (rank >= 0 && at < most) own_ = tile::map_shared_rank(&smem_.listed[at], rank);
    if (!of_all) return total <= most;
    part_ = part_of_mass(Sums::sum_of_ctas(sums.of_cta(all_value)), p.top_p);
    return total <= most && part_ <= Sums::sum_of_ctas(sums.of_cta(listed_value));
  }

  // The token that the draw falls on, in the thread that finds it, else -1. Called by all threads of one CTA.
  __device__ int draw(const SampleParams& p, Sums& sums, const std::uint64_t& bits) {
    const int thread = static_cast<int>(threadIdx.x);
    const bool has_token = thread < count_;
    const std::uint64_t own = has_token ? *own_ : 0;
    if (has_token) smem_.all[thread] = own;
    __syncthreads();  // all threads -> all threads: all
    if (has_token) {
      int smaller = 0;
#pragma unroll 4
      for (int i = 0; i < count_; ++i) smaller += smem_.all[i] < own;
      smem_.sorted[smaller] = own;
    }
    __syncthreads();  // all threads -> all threads: sorted
    const std::uint64_t mine = has_token ? smem_.sorted[thread] : 0;
    const std::uint32_t key = static_cast<std::uint32_t>(mine >> 32), token = static_cast<std::uint32_t>(mine);
    std::uint32_t last = p.top_k > 0 ? static_cast<std::uint32_t>(smem_.sorted[p.top_k - 1] >> 32) : last_key;
    if (p.min_p_first) last = min(last, p.min_p_key);
    std::uint64_t mass = has_token && key <= last ? sampling_mass(key) : 0;
    if (p.top_p < 1) {
      const Sums::Prefix prefix = sums.prefix(mass);
      if (prefix.before >= (p.top_k > 0 ? part_of_mass(prefix.total, p.top_p) : part_)) mass = 0;
    }
    if (key > p.min_p_key) mass = 0;
    smem_.mass[thread] = mass;
    const std::uint64_t place =
        place_of(bits, sums.prefix(mass).total);  // the barrier in prefix() makes smem_.mass visible
    if (mass == 0) return -1;
    std::uint64_t begin = 0;  // of this token among those that are left, in the vocabulary's order
#pragma unroll 4
    for (int i = 0; i < count_; ++i)
      if (static_cast<std::uint32_t>(smem_.sorted[i]) < token) begin += smem_.mass[i];
    return place >= begin && place < begin + mass ? static_cast<int>(token) : -1;
  }

 private:
  Storage& smem_;
  int count_ = 0;
  std::uint64_t part_ = 0;  // of top_p, in mass
  const std::uint64_t* own_ = nullptr;
};

}  // namespace rooftile::gpu
