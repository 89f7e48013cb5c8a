// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/plan.h"

#include <algorithm>

#include "core/kernel_name.h"
#include "core/plan_text.h"
#include "kernels/decode/scheduler.h"

namespace rooftile::gpu {
namespace {

constexpr PlanChoice<DecodePlan> choices[] = {{"block_m", &DecodePlan::block_m},
                                              {"ctas", &DecodePlan::ctas},
                                              {"ctas_per_sm", &DecodePlan::ctas_per_sm},
                                              {"cluster_size", &DecodePlan::cluster_size}};
constexpr PlanPath<DecodePlan> paths[] = {{"split_kv", choices}};

std::int64_t m_blocks_of(const DecodeShape& shape) {
  return (shape.tokens * shape.q_per_kv + shape.block_m - 1) / shape.block_m;
}
std::int64_t work_tiles_of(const DecodeShape& shape) { return shape.batch * shape.kv_heads * m_blocks_of(shape); }

// Sets the fields that follow from the call and the plan's choices.
void complete(const DecodeShape& shape, DecodePlan& plan) {
  plan.m_blocks = static_cast<int>(m_blocks_of(shape));
  plan.ctas_per_tile = ctas_per_tile_if_uniform(work_tiles_of(shape), plan.ctas);
  if (plan.cluster_size > 1) return;  // a cluster exchanges partials through shared memory
  const auto align = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  const std::size_t partials =
      static_cast<std::size_t>(plan.ctas) * partials_per_cta * static_cast<std::size_t>(shape.block_m);
  plan.partial_o = align((static_cast<std::size_t>(shape.batch) + 2) * sizeof(std::int32_t));
  plan.partial_ml = plan.partial_o + align(partials * static_cast<std::size_t>(shape.head_dim) * sizeof(float));
  plan.reduction_o = plan.partial_ml + align(partials * 2 * sizeof(float));
  plan.workspace_bytes = plan.reduction_o + static_cast<std::size_t>(plan.ctas) * reduction_levels *
                                                static_cast<std::size_t>(shape.block_m * shape.head_dim) *
                                                sizeof(float);
}

// Whether the choices of a plan fit the call.
bool choices_fit(PlanCheck& check, const DecodeShape& shape, const DecodeDevice& device, const DecodePlan& plan) {
  const std::int64_t work_tiles = work_tiles_of(shape), resident_ctas = std::int64_t{device.sms} * device.ctas_per_sm;
  if (!(check.need(plan.block_m == shape.block_m, "block_m must be ", shape.block_m, ", got ", plan.block_m) &&
        check.need(plan.cluster_size == 1 || plan.cluster_size == 2 || plan.cluster_size == 4 || plan.cluster_size == 8,
                   "cluster_size must be 1, 2, 4 or 8, got ", plan.cluster_size) &&
        check.range("cluster_size", plan.cluster_size, 1, device.max_cluster)))
    return false;
  if (plan.cluster_size > 1)
    return check.need(shape.visible <= cluster_tokens(plan.cluster_size), "cluster_size must be 1 for more than ",
                      cluster_tokens(plan.cluster_size), " visible tokens, got ", plan.cluster_size) &&
           check.need(plan.ctas == work_tiles * plan.cluster_size, "ctas must be the ", work_tiles,
                      " work tiles x cluster_size = ", work_tiles * plan.cluster_size, ", got ", plan.ctas) &&
           check.range("ctas_per_sm", plan.ctas_per_sm, 1, 1);
  return check.range("ctas", plan.ctas, work_tiles > 0 ? 1 : 0, std::min(resident_ctas, work_tiles * max_splits)) &&
         check.range("ctas_per_sm", plan.ctas_per_sm, 1, device.ctas_per_sm) &&
         check.need(plan.ctas % plan.ctas_per_sm == 0, "ctas_per_sm must divide the ", plan.ctas, " CTAs, got ",
                    plan.ctas_per_sm);
}

}  // namespace

std::string text(const DecodeKey& key) {
  return std::string(name(key.dtype)) + " " + name(key.format) + " d" + std::to_string(key.head_dim);
}

KernelName kernel_of(const DecodeKey& key) {
  const char *const dtype = name(key.dtype), *const format = name(key.format);
  if (key.block_m > mma_n)  // the CTA has one softmax state
    return kernel_name("cuda_", dtype, "_", format, "_d", key.head_dim, "_m", key.block_m);
  return kernel_name("cuda_", dtype, "_", format, "_d", key.head_dim);
}

DecodeFacts expected_decode_facts(const DecodeKey& key) {
  constexpr int head_dims[] = {64, 96, 128, 192, 256, 512};
  const bool steps = key.block_m == 2 * mma_n;  // the CTA has one softmax state
  const bool types = (key.dtype == DType::f16 && key.format != KvFormat::bf16) ||
                     (key.dtype == DType::bf16 && key.format != KvFormat::fp16);
  if (!types || key.format == KvFormat::fp32 || !(steps ? key.head_dim == 128 : key.block_m == mma_n) ||
      std::find(std::begin(head_dims), std::end(head_dims), key.head_dim) == std::end(head_dims))
    return {};
  return {.ctas_per_sm = key.format == KvFormat::int4 && key.head_dim == 64 ? 3 : 2,
          .clusters = !steps && key.head_dim <= 128};
}

std::string text(const DecodePlan& plan) { return plan_text(paths[0], plan); }

std::string check_plan(const DecodeShape& shape, const DecodeDevice& device, const DecodePlan& plan) {
  PlanCheck check;
  if (!choices_fit(check, shape, device, plan)) return check.wrong();
  DecodePlan right{
      .block_m = plan.block_m, .ctas = plan.ctas, .ctas_per_sm = plan.ctas_per_sm, .cluster_size = plan.cluster_size};
  complete(shape, right);
  const auto follows = [&](const char* field, auto DecodePlan::* member) {
    return check.follows(field, plan.*member, right.*member);
  };
  (void)(follows("ctas_per_tile", &DecodePlan::ctas_per_tile) && follows("m_blocks", &DecodePlan::m_blocks) &&
         follows("partial_o", &DecodePlan::partial_o) && follows("partial_ml", &DecodePlan::partial_ml) &&
         follows("reduction_o", &DecodePlan::reduction_o) && follows("workspace_bytes", &DecodePlan::workspace_bytes));
  return check.wrong();
}

// B = 1, T = 1, 8 KV heads, 4 query heads each, 132 SMs with 2 CTAs each: 8 work tiles. In 1024 tokens clusters of 8
// are 64 CTAs, and 16 * 8 * 4 = 512 <= 7 * 264 = 1848, so these are taken: cluster_tokens(8) = 4096 suffices. Only 4 of
// the 8 CTAs have a KV split, but all merge, and 4 * 64 <= 264. B = 2 takes clusters of 4: 4 * 128 > 264. In
// 8192 tokens there are none: 8 * 64 splits at most, more than the 264 resident CTAs, so 264 CTAs, 2 on each SM.
// B = 64: 512 work tiles, 16 * 512 > 1848: no clusters, 264 CTAs.
DecodePlan plan_decode(const DecodeShape& shape, const DecodeDevice& device) {
  DecodePlan plan;
  plan.block_m = shape.block_m;
  const std::int64_t work_tiles = work_tiles_of(shape), resident_ctas = std::int64_t{device.sms} * device.ctas_per_sm;
  // A cluster does not span two GPCs, and these differ in size: clusters leave an eighth of the device unused. They
  // grow beyond two CTAs while they have fewer CTAs than KV splits of 256 tokens, or while they then fill 25 %
  // of the device at most: a CTA without a split still merges.
  static_assert(kv_split_tiles(KvFormat::fp16, mma_n, cluster_tokens(8)) * kv_tile_tokens == 256);
  while (2 * plan.cluster_size <= device.max_cluster && 16 * work_tiles * plan.cluster_size <= 7 * resident_ctas &&
         (plan.cluster_size == 1 || 256 * plan.cluster_size < shape.visible ||
          8 * work_tiles * plan.cluster_size <= resident_ctas))
    plan.cluster_size *= 2;
  if (shape.visible > cluster_tokens(plan.cluster_size)) plan.cluster_size = 1;
  plan.ctas_per_sm = plan.cluster_size == 1 && work_tiles * max_splits >= resident_ctas ? device.ctas_per_sm : 1;
  plan.ctas = static_cast<int>(plan.cluster_size > 1 ? work_tiles * plan.cluster_size
                                                     : std::min(resident_ctas, work_tiles * max_splits));
  plan.why = plan.cluster_size > 1       ? "few work tiles of short rows: a cluster computes and reduces each"
             : plan.ctas < resident_ctas ? "fewer KV splits than the device runs at once: a CTA for each"
                                         : "persistent CTAs, as many as the device runs at once, share all KV splits";
  complete(shape, plan);
  return plan;
}

int forced_block_m(const char* op, const char* forced) {
  if (!forced) return 0;
  DecodePlan plan;
  read_plan<DecodePlan>(op, forced, paths, plan);
  ROOFTILE_CHECK(plan.block_m >= 1, op, ": plan ", quoted(forced),
                 " does not fit this call: block_m must be at least 1, got ", plan.block_m);
  return plan.block_m;
}

DecodePlan plan_decode(const char* op, const DecodeShape& shape, const DecodeDevice& device, const char* forced) {
  if (!forced) return plan_decode(shape, device);
  DecodePlan plan;
  read_plan<DecodePlan>(op, forced, paths, plan);
  require_fit(op, forced, [&](PlanCheck& check) { return choices_fit(check, shape, device, plan); });
  complete(shape, plan);
  plan.why = "forced by plan=";
  return plan;
}

}  // namespace rooftile::gpu
