// SPDX-License-Identifier: Apache-2.0
#include "kernels/linear/plan.h"

#include <algorithm>

namespace rooftile::gpu {
namespace {

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

constexpr int max_splits = 16;

// The number of splits of K with the least estimated time. The constants are rough facts of a large GPU: KB per
// microsecond of one SM alone (70) and of each SM when all read (35), and the microseconds of the reduction kernel.
int splits_of(const LinearProblem& p, const LinearPlan& plan, std::int64_t steps) {
  const double cta = 2.0 * linear_rows * plan.row_tiles * static_cast<double>(p.k) / 1024;
  const double all = 2.0 * static_cast<double>(p.n) * static_cast<double>(p.k) / 1024;
  const std::int64_t sms = std::max(p.sms, 1);
  const double floor = all / (35.0 * static_cast<double>(sms));
  int best = 1;
  double least = 0;
  for (int splits = 1; splits <= max_splits; ++splits) {
    const std::int64_t split_steps = divide_up(steps, splits);
    if (splits > 1 && split_steps < linear_stages << plan.slices_log2) break;  // a split must fill the ring once
    if (splits > 1 && divide_up(steps, split_steps) != splits) continue;
    double us = std::max(floor, cta / splits / 70.0);
    if (splits > 1) us += 2.0 + 0.1 * splits;
    if (splits > 1 && us >= least) continue;
    least = us;
    best = splits;
  }
  return best;
}

void plan_stream(const LinearProblem& p, LinearPlan& plan) {
  const std::int64_t row_tiles = divide_up(p.n, linear_rows), sms = std::max(p.sms, 1),
                     steps = divide_up(p.k, linear_step_k);
  plan.config = p.m > 8 ? 1 : 0;
  // The fewest row tiles a CTA that give every SM one CTA, or two, so that all SMs read until the end. Warps that
  // remain slice K.
  const std::int64_t each = divide_up(row_tiles, sms), pair = divide_up(row_tiles, 2 * sms);
  plan.row_tiles = static_cast<int>(
      std::max<std::int64_t>(1, std::min<std::int64_t>(each <= linear_warps ? each : pair, linear_warps)));
  while (plan.row_tiles << (plan.slices_log2 + 1) <= linear_warps && steps >= std::int64_t{2} << (plan.slices_log2 + 1))
    ++plan.slices_log2;
  plan.n_blocks = divide_up(row_tiles, plan.row_tiles);
  plan.m_blocks = divide_up(p.m, linear_stream_tokens);
  plan.splits = p.m <= linear_stream_tokens ? splits_of(p, plan, steps) : 1;
  plan.split_steps = static_cast<int>(divide_up(steps, plan.splits));
  const int warps = plan.row_tiles << plan.slices_log2;
  plan.shared_bytes = static_cast<std::size_t>(warps * linear_stages * linear_step_bytes);
  if (plan.splits > 1)
    plan.workspace_bytes = sizeof(float) * static_cast<std::size_t>(plan.splits * p.m * row_tiles * linear_rows);
  plan.why = plan.splits > 1 ? "few rows of W: K is split to fill the device" : "whole rows of W, streamed";
}

// CTAs of equal size, one for each SM; two, three ... for each where one CTA would need more than 128 rows.
void plan_tma(const LinearProblem& p, LinearPlan& plan) {
  const std::int64_t steps = divide_up(p.k, linear_tma_step_k), sms = std::max(p.sms, 1);
  const auto rows = [&](int cluster, std::int64_t each) {
    return divide_up(divide_up(std::max<std::int64_t>(p.n, 1) * cluster, sms * each), 16) * 16;
  };
  plan.path = LinearPath::tma;
  while (linear_tma_block_m[plan.config] < std::min<std::int64_t>(p.m, linear_tma_max_tokens)) ++plan.config;
  plan.cluster = rows(2, 1) <= linear_tma_max_rows && steps >= 8 ? 2 : 1;
  std::int64_t each = 1;
  while (rows(plan.cluster, each) > linear_tma_max_rows) ++each;
  plan.tma_rows = static_cast<int>(rows(plan.cluster, each));
  plan.n_blocks = divide_up(p.n, plan.tma_rows);
  plan.m_blocks = divide_up(p.m, linear_tma_max_tokens);
  plan.split_steps = static_cast<int>(divide_up(steps, plan.cluster));
  // wgmma reads 64 rows at a time: where tma_rows is no multiple of 64 it reads past the last stage, and the results
  // are not used.
  const int behind = linear_tma_tile_bytes((64 - plan.tma_rows % 64) % 64);
  const int stage_bytes =
      linear_tma_tiles_per_step * linear_tma_tile_bytes(plan.tma_rows + linear_tma_block_m[plan.config]) + 16;
  constexpr int half = 113 * 1024;  // of an SM's shared memory
  plan.stages = (half - behind) / stage_bytes;
  // One more stage keeps a second CTA off the SM, and so keeps the next kernel's CTAs from starting in pairs on the SMs
  // that are free first. Short kernels gain more from an early start.
  if (plan.n_blocks * plan.cluster * plan.m_blocks <= sms && (plan.split_steps > 16 || plan.stages < 4)) ++plan.stages;
  plan.shared_bytes = static_cast<std::size_t>(plan.stages * stage_bytes + behind);
  plan.why = "up to 64 tokens at a time on wgmma";
}

// The tile config whose busiest SM finishes first. cycles: of a step of 64 k on an H200, roughly; L2 bounds the small
// tile, tensor cores bound the large one.
int collective_config(const LinearProblem& p) {
  constexpr int cycles[] = {400, 1100};
  const auto time = [&](int config) {
    const LinearTile tile = linear_collective_tiles[config];
    const std::int64_t tiles = divide_up(p.n, 2 * tile.rows) * 2 * divide_up(p.m, tile.tokens);  // clusters of two
    return divide_up(tiles, std::max(p.sms, 1)) * cycles[config];
  };
  return time(1) < time(0) ? 1 : 0;
}

}  // namespace

LinearPlan plan_linear(const LinearProblem& p) {
  LinearPlan plan;
  if (p.wgmma && p.aligned_operands && (!p.aligned_all || p.m <= linear_tma_max_tokens)) {
    plan_tma(p, plan);
    return plan;
  }
  if (!p.aligned_all || p.m <= linear_stream_tokens) {
    plan_stream(p, plan);
    return plan;
  }
  plan.path = p.wgmma ? LinearPath::collective : LinearPath::multistage;
  if (p.wgmma) plan.config = collective_config(p);
  plan.why = p.wgmma ? "tiles of tokens on wgmma" : "tiles of tokens on mma.sync";
  return plan;
}

}  // namespace rooftile::gpu
