// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/plan.h"

#include <algorithm>

#include "kernels/decode/schedule.h"

namespace rooftile::gpu {

std::string text(const DecodeKey& key) {
  return std::string(name(key.dtype)) + " " + name(key.format) + " d" + std::to_string(key.head_dim);
}

DecodePlan plan_decode(std::int64_t batch, std::int64_t tokens, int kv_heads, int q_per_kv, int head_dim, int sms, int blocks_per_sm) {
  DecodePlan plan;
  plan.passes = static_cast<int>((tokens * q_per_kv + columns - 1) / columns);
  const std::int64_t leaves = batch * kv_heads * plan.passes * (max_leaves + 1);   // at most
  plan.blocks = static_cast<int>(std::min<std::int64_t>(std::int64_t{sms} * blocks_per_sm, leaves));
  const auto up = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  const std::size_t nodes = static_cast<std::size_t>(plan.blocks) * slots_per_block * columns;
  plan.node_o = up((static_cast<std::size_t>(batch) + 2) * sizeof(std::int32_t));
  plan.node_ml = plan.node_o + up(nodes * static_cast<std::size_t>(head_dim) * sizeof(float));
  plan.fold = plan.node_ml + up(nodes * 2 * sizeof(float));
  plan.workspace_bytes = plan.fold + static_cast<std::size_t>(plan.blocks) * fold_levels * columns * static_cast<std::size_t>(head_dim) * sizeof(float);
  return plan;
}

}  // namespace rooftile::gpu
