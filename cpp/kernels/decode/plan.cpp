// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/plan.h"

#include <algorithm>

#include "kernels/decode/schedule.h"

namespace rooftile::gpu {

std::string text(const DecodeKey& key) {
  return std::string(name(key.dtype)) + " " + name(key.format) + " d" + std::to_string(key.head_dim);
}

DecodePlan plan_decode(const DecodeShape& shape, const DecodeRoom& room) {
  const auto& [batch, tokens, kv_heads, q_per_kv, head_dim, columns, visible] = shape;
  DecodePlan plan;
  plan.passes = static_cast<int>((tokens * q_per_kv + columns - 1) / columns);
  const std::int64_t tasks = batch * kv_heads * plan.passes, resident = std::int64_t{room.sms} * room.blocks_per_sm;
  // Groups of multiprocessors differ in size and clusters do not cross them: an eighth of the device may be left over.
  while (2 * plan.cluster <= room.largest_cluster && 16 * tasks * plan.cluster <= 7 * resident) plan.cluster *= 2;
  if (visible > cluster_tokens(plan.cluster)) plan.cluster = 1;
  plan.layers = plan.cluster == 1 && tasks * max_leaves >= resident ? room.blocks_per_sm : 1;
  plan.blocks = static_cast<int>(plan.cluster > 1 ? tasks * plan.cluster : std::min(resident, tasks * max_leaves));
  plan.ranks = ranks_if_even(tasks, plan.blocks);
  if (plan.cluster > 1) return plan;  // its states meet in shared memory
  const auto up = [](std::size_t bytes) { return (bytes + 255) / 256 * 256; };
  const std::size_t nodes = static_cast<std::size_t>(plan.blocks) * slots_per_block * static_cast<std::size_t>(columns);
  plan.node_o = up((static_cast<std::size_t>(shape.batch) + 2) * sizeof(std::int32_t));
  plan.node_ml = plan.node_o + up(nodes * static_cast<std::size_t>(head_dim) * sizeof(float));
  plan.fold = plan.node_ml + up(nodes * 2 * sizeof(float));
  plan.workspace_bytes = plan.fold + static_cast<std::size_t>(plan.blocks) * fold_levels *
                                         static_cast<std::size_t>(columns * head_dim) * sizeof(float);
  return plan;
}

}  // namespace rooftile::gpu
