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

// Nanoseconds of an H200 for one step of 64 k of a tile of collective.cuh, where `busy` (0 to 1) of the SMs have a CTA.
// The slowest of three rates, each measured where it is the limit:
//   tensor cores  128 x 256 takes 700 ns (K 14336, N 4096, M 1024: 128 tiles, 160 us)
//   an SM's port  126 bytes a ns arrive, a peer's multicast too (64 x 128 on 64 SMs: 196 ns; K 14336, N 4096, M 128)
//   L2            62 bytes a ns for each SM, a multicast counted once (64 x 128 on 128 SMs: 255 ns; the same, M 256)
double step_ns(LinearTile tile, double busy) {
  constexpr double row_bytes = 2 * linear_collective_step_k;
  const double rows = tile.rows, tokens = tile.tokens;
  const double loaded = tile.pair_shares_rows ? rows / 2 + tokens : rows + tokens / 2;
  return std::max(
      {700 * rows * tokens / (128 * 256), (rows + tokens) * row_bytes / 126, loaded * row_bytes / 62 * busy});
}

// Estimated nanoseconds of a product after its start: waves of tiles, each with its steps and, unless ping-pong hides
// it, an epilogue (600 ns of 128 x 256); no less than W's bytes take from memory, 4100 a ns, and in proportion more
// where a last wave of few CTAs asks for too little at a time. Split-K adds a kernel (2500 ns), and 8 bytes an output
// and split, written and read at 4000 a ns.
//
// K 4096, N 14336, M 1024 on 132 SMs, 64 steps:
//   128 x 256: 112 x 4 tiles, 3.39 waves -> 4 x (64 x 700 + 600) = 182 us
//   192 x 128:  75 x 8 tiles, 4.55 waves -> 5 x (64 x 525 + 450) = 170 us
//   224 x 128:  64 x 8 tiles, 3.88 waves -> 4 x (64 x 613 + 525) = 159 us: chosen, 97 % of the SMs have a tile
// K 14336, N 4096, M 128, 224 steps, 64 x 128: 64 tiles leave half of the SMs idle
//   one split:  224 x 195                 = 44 us
//   two splits: 112 x 256, 2.5 and 2.1 us = 33 us: chosen
double collective_ns(const LinearProblem& p, std::int64_t m, LinearTile tile, int splits) {
  const auto count = [](std::int64_t a) { return static_cast<double>(a); };
  const std::int64_t steps = divide_up(p.k / splits, linear_collective_step_k), sms = std::max(p.sms, 1),
                     ctas = linear_collective_ctas(tile, p.n, m) * splits, waves = divide_up(ctas, sms);
  const double epilogue = tile.ping_pong ? 0 : 600.0 * tile.rows * tile.tokens / (128 * 256);
  const double busy = count(ctas) / count(waves * sms);
  const double tiles = count(waves) * (count(steps) * step_ns(tile, busy) + epilogue);
  const double memory = 2 * count(p.n) * count(p.k) / 4100 / (waves > 1 ? busy : 1);
  const double partial_bytes = 8.0 * splits * count(m) * count(p.n);
  return std::max(tiles, memory) + (splits > 1 ? 2500 + partial_bytes / 4000 : 0);
}

void plan_collective(const LinearProblem& p, LinearPlan& plan) {
  plan.path = LinearPath::collective;
  const bool may_split = p.m <= linear_split_tokens;
  const std::int64_t m = may_split ? divide_up(p.m, 128) * 128 : p.m;  // one plan for all of a bucket
  double least = 0;
  for (int splits = 1; splits <= (may_split ? max_splits : 1); ++splits) {
    // TMA's strides are multiples of 16 bytes; a split fills the ring at least once
    if (splits > 1 && (p.k % (8 * splits) != 0 || p.k / splits < 8 * linear_collective_step_k)) continue;
    for (int config = 0; const LinearTile tile : linear_collective_tiles) {
      const int index = config++;
      if (splits > 1 && (!linear_may_split(tile) || linear_collective_ctas(tile, p.n, m) * splits > p.sms)) continue;
      const double ns = collective_ns(p, m, tile, splits);
      if (least > 0 && ns >= 0.98 * least) continue;  // estimates this near are level: the first, a simpler plan, stays
      least = ns;
      plan.config = index;
      plan.splits = splits;
    }
  }
  if (plan.splits > 1) {
    const std::int64_t padded_n = divide_up(p.n, linear_rows) * linear_rows;
    plan.workspace_bytes = sizeof(float) * static_cast<std::size_t>(plan.splits * p.m * padded_n);
  }
  plan.why = plan.splits > 1 ? "tiles of tokens on wgmma, split-K to fill the device" : "tiles of tokens on wgmma";
}

}  // namespace

std::int64_t linear_collective_ctas(LinearTile tile, std::int64_t n, std::int64_t m) {
  const std::int64_t row_tiles = divide_up(n, tile.rows), token_tiles = divide_up(m, tile.tokens);
  return tile.pair_shares_rows ? row_tiles * divide_up(token_tiles, 2) * 2 : divide_up(row_tiles, 2) * 2 * token_tiles;
}

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
  if (p.wgmma) {
    plan_collective(p, plan);
    return plan;
  }
  plan.path = LinearPath::multistage;
  plan.why = "tiles of tokens on mma.sync";
  return plan;
}

}  // namespace rooftile::gpu
