// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/plan.h"

#include <algorithm>

#include "kernels/decode/scheduler.h"

namespace rooftile::gpu {

std::string text(const DecodeKey& key) {
  return std::string(name(key.dtype)) + " " + name(key.format) + " d" + std::to_string(key.head_dim);
}

DecodePlan plan_decode(const DecodeShape& shape, const DecodeDevice& device) {
  const auto& [batch, tokens, kv_heads, q_per_kv, head_dim, block_m, visible] = shape;
  DecodePlan plan;
  plan.m_blocks = static_cast<int>((tokens * q_per_kv + block_m - 1) / block_m);
  const std::int64_t work_tiles = batch * kv_heads * plan.m_blocks,
                     resident_ctas = std::int64_t{device.sms} * device.ctas_per_sm;
  // GPCs differ in size and a cluster does not span two of them: leave an eighth of the device unused.
  while (2 * plan.cluster_size <= device.max_cluster && 16 * work_tiles * plan.cluster_size <= 7 * resident_ctas)
    plan.cluster_size *= 2;
  if (visible > cluster_tokens(plan.cluster_size)) plan.cluster_size = 1;
  plan.ctas_per_sm = plan.cluster_size == 1 && work_tiles * max_splits >= resident_ctas ? device.ctas_per_sm : 1;
  plan.ctas = static_cast<int>(plan.cluster_size > 1 ? work_tiles * plan.cluster_size
                                                     : std::min(resident_ctas, work_tiles * max_splits));
  plan.ctas_per_tile = ctas_per_tile_if_uniform(work_tiles, plan.ctas);
  if (plan.cluster_size > 1) return plan;  // a cluster exchanges partials through shared memory
  const auto align = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  const std::size_t partials =
      static_cast<std::size_t>(plan.ctas) * partials_per_cta * static_cast<std::size_t>(block_m);
  plan.partial_o = align((static_cast<std::size_t>(shape.batch) + 2) * sizeof(std::int32_t));
  plan.partial_ml = plan.partial_o + align(partials * static_cast<std::size_t>(head_dim) * sizeof(float));
  plan.reduction_o = plan.partial_ml + align(partials * 2 * sizeof(float));
  plan.workspace_bytes = plan.reduction_o + static_cast<std::size_t>(plan.ctas) * reduction_levels *
                                                static_cast<std::size_t>(block_m * head_dim) * sizeof(float);
  return plan;
}

}  // namespace rooftile::gpu
