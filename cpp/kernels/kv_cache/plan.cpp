// SPDX-License-Identifier: Apache-2.0
#include "kernels/kv_cache/plan.h"

#include <algorithm>
#include <bit>

#include "kernels/kv_cache/params.h"

namespace rooftile::gpu {

std::int64_t append_work_tiles(const AppendProblem& p) {
  const std::int64_t groups = (p.tokens + 2 * (kv_group - 1)) / kv_group;  // that the tokens of a row can touch
  return p.kv_heads * 2 * (p.kivi ? groups : p.tokens) + p.tokens * ((p.q_heads + 1) / 2);
}

// 132 SMs, clusters of 8. One row of 8 KV heads, 32 query heads, one token, int8: 16 work tiles of K and V and 16 of
// pairs of query heads, a warp each: 4 CTAs, one cluster, which writes the length itself. 4096 tokens: 131072 work
// tiles are 16384 CTAs; 8 an SM fill the device, 1056, rounded down to 1024, and a second kernel writes the lengths.
AppendPlan plan_append(const AppendProblem& p, const AppendDevice& device) {
  const std::int64_t cluster = device.largest_cluster, sms = device.sms;
  // A sliced group gets warps for two rounds of its slices, provided that all CTAs run at once and leave room for the
  // next kernel's.
  const bool sliced = p.kivi && p.tokens <= kv_group;
  const std::int64_t slices =
      sliced ? p.kv_heads * (append_slices(false, p.head_dim) + append_slices(true, p.head_dim)) : 0;
  const auto ctas_for = [](std::int64_t tiles) { return (tiles + append_warps - 1) / append_warps; };
  const std::int64_t all =
      std::max(ctas_for(append_work_tiles(p)), std::min({ctas_for((slices + 1) / 2), sms * 4 / p.batch, cluster}));
  const std::int64_t fill = (sms * 8 + p.batch - 1) / p.batch;
  const auto ctas = static_cast<std::uint64_t>(std::min({all, fill, all <= 2 * cluster ? cluster : fill}));
  AppendPlan plan;  // rounded up to a power of two within a cluster, else down
  plan.log2_entry_ctas = std::bit_width(ctas <= static_cast<std::uint64_t>(cluster) ? ctas - 1 : ctas / 2);
  plan.one_cluster = 1 << plan.log2_entry_ctas <= cluster;
  return plan;
}

}  // namespace rooftile::gpu
