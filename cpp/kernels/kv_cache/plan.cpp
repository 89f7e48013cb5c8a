// SPDX-License-Identifier: Apache-2.0
#include "kernels/kv_cache/plan.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "core/kernel_name.h"
#include "core/plan_text.h"
#include "kernels/kv_cache/params.h"

namespace rooftile::gpu {
namespace {

constexpr PlanChoice<AppendPlan> choices[] = {{"entry_ctas", &AppendPlan::entry_ctas},
                                              {"cluster_size", &AppendPlan::cluster_size}};
constexpr PlanPath<AppendPlan> paths[] = {{"append", choices}};

constexpr int max_ctas_per_sm = 8;  // of all entries; more would wait for others to end

bool choices_fit(PlanCheck& check, const AppendProblem& p, const AppendDevice& device, const AppendPlan& plan) {
  const std::int64_t grid = std::numeric_limits<std::int32_t>::max() / std::max<std::int64_t>(p.batch, 1),
                     most = std::min(std::max(device.sms * max_ctas_per_sm, device.largest_cluster), grid);
  return check.range("entry_ctas", plan.entry_ctas, 1, most) &&
         check.need(std::has_single_bit(static_cast<unsigned>(plan.entry_ctas)),
                    "entry_ctas must be a power of two, got ", plan.entry_ctas) &&
         check.need(plan.cluster_size == 1 || plan.is_one_launch(),
                    "cluster_size must be 1 or entry_ctas = ", plan.entry_ctas, ", got ", plan.cluster_size) &&
         check.range("cluster_size", plan.cluster_size, 1, device.largest_cluster);
}

}  // namespace

std::int64_t append_work_tiles(const AppendProblem& p) {
  const std::int64_t groups = (p.tokens + 2 * (kv_group - 1)) / kv_group;  // that the tokens of a row can touch
  return p.kv_heads * 2 * (p.kivi ? groups : p.tokens) + p.tokens * ((p.q_heads + 1) / 2);
}

// 132 SMs, clusters of 8. One row of 8 KV heads, 32 query heads, one token, int8: 16 work tiles of K and V and 16 of
// pairs of query heads, a warp each: 4 CTAs, one cluster, which writes the length itself. 4096 tokens: 131072 work
// tiles are 16384 CTAs; 8 an SM fill the device, 1056, rounded down to 1024, and a second kernel writes the lengths.
AppendPlan plan_append(const AppendProblem& p, const AppendDevice& device) {
  if (p.batch == 0 || p.tokens == 0) return {.why = "nothing to append"};
  const std::int64_t cluster = device.largest_cluster, sms = device.sms;
  // A sliced group gets warps for two rounds of its slices, provided that all CTAs run at once and leave room for the
  // next kernel's.
  const bool sliced = p.kivi && p.tokens <= kv_group;
  const std::int64_t slices =
      sliced ? p.kv_heads * (append_slices(false, p.head_dim) + append_slices(true, p.head_dim)) : 0;
  const auto ctas_for = [](std::int64_t tiles) { return (tiles + append_warps - 1) / append_warps; };
  const std::int64_t all =
      std::max(ctas_for(append_work_tiles(p)), std::min({ctas_for((slices + 1) / 2), sms * 4 / p.batch, cluster}));
  const std::int64_t fill = (sms * max_ctas_per_sm + p.batch - 1) / p.batch;
  const auto ctas = static_cast<std::uint64_t>(std::min({all, fill, all <= 2 * cluster ? cluster : fill}));
  AppendPlan plan;  // rounded up to a power of two within a cluster, else down
  plan.entry_ctas =
      static_cast<int>(ctas <= static_cast<std::uint64_t>(cluster) ? std::bit_ceil(ctas) : std::bit_floor(ctas));
  if (plan.entry_ctas <= cluster) plan.cluster_size = plan.entry_ctas;
  plan.why = plan.cluster_size > 1 ? "few work tiles an entry: the CTAs of one are a cluster, which writes its length"
             : plan.entry_ctas == 1
                 ? "one CTA an entry: little work in each, or entries that fill the device; one launch"
                 : "more CTAs an entry than a cluster has: a second kernel writes the lengths";
  return plan;
}

AppendPlan plan_append(const char* op, const AppendProblem& p, const AppendDevice& device, const char* forced) {
  constexpr std::int64_t most = std::numeric_limits<int>::max() / 4;  // sums of work-tile indices fit 32 bits
  ROOFTILE_CHECK_KIND(not_supported, append_work_tiles(p) <= most && p.batch <= most, op, ": k has ", p.tokens,
                      " tokens for each of ", p.batch,
                      " rows; on a GPU rows, and within one tokens times heads, are at "
                      "most ",
                      most, " a call");
  if (!forced) return plan_append(p, device);
  AppendPlan plan;
  read_plan<AppendPlan>(op, forced, paths, plan);
  require_fit(op, forced, [&](PlanCheck& check) { return choices_fit(check, p, device, plan); });
  plan.why = "forced by plan=";
  return plan;
}

std::string text(const AppendPlan& plan) { return plan_text(paths[0], plan); }

KernelName kernel_of(const char* op, DType dtype, KvFormat format) {
  return kernel_name("cuda_", op, "_", name(dtype), "_", name(format));
}

}  // namespace rooftile::gpu
