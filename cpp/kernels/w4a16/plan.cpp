// SPDX-License-Identifier: Apache-2.0
#include "kernels/w4a16/plan.h"

#include <algorithm>
#include <bit>

#include "core/w4_layout.h"
#include "kernels/linear/plan.h"

namespace rooftile::gpu {
namespace {

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

constexpr int max_splits = 16;
constexpr std::int64_t max_m_group = 8;                // m-blocks whose x is read at the same time
constexpr int w4_cluster = 2, w4_cluster_tokens = 16;  // two K splits of up to so many tokens are a cluster

int config_for(std::int64_t tokens) {
  int config = 0;
  while (config < 3 && 8 * w4_stream_configs[config].n_tiles < tokens) ++config;
  return config;
}

struct SplitK {
  int splits, split_steps;
};

// stream.cuh: the number of K splits with the least estimated time. The constants are rough facts of a large GPU (KB
// per microsecond of one SM; the cost of a second kernel): they need to rank candidates, not to predict.
SplitK choose_split_k(const W4Problem& p, int config, std::int64_t n_blocks, std::int64_t m_blocks) {
  const std::int64_t steps = divide_up(w4_tiles_k(p.k), 2), resident_ctas = 2 * std::max(p.sms, 1);  // two CTAs per SM
  const double tokens = 8.0 * w4_stream_configs[config].n_tiles, rows = 16.0 * w4_warps;
  const bool clusters = p.clusters && config <= config_for(w4_cluster_tokens);
  SplitK best{1, static_cast<int>(steps)};
  double least = 0;
  for (std::int64_t splits_wanted = 1; splits_wanted <= std::min<std::int64_t>(max_splits, steps); ++splits_wanted) {
    const std::int64_t split_steps = divide_up(steps, splits_wanted), splits = divide_up(steps, split_steps);
    if (splits != splits_wanted || (splits_wanted > 1 && split_steps < 2)) continue;
    if (splits_wanted > 1 && n_blocks * m_blocks * splits > resident_ctas)
      continue;  // bounds the workspace: one tile a CTA
    const std::int64_t waves = divide_up(n_blocks * m_blocks * splits, resident_ctas);
    const double kilobytes = rows * static_cast<double>(split_steps) * (16 * p.bits + 2 * tokens) / 1024;
    double us = static_cast<double>(waves) * (kilobytes / 14 + 1.0);
    if (splits == w4_cluster && clusters) us += 0.5;
    else if (splits > 1) us += 1.0 + 2 * static_cast<double>(splits * n_blocks * m_blocks) * rows * tokens * 4 / 3.5e6;
    if (splits_wanted == 1 || us < least) {
      least = us;
      best = {static_cast<int>(splits), static_cast<int>(split_steps)};
    }
  }
  return best;
}

// wgmma.cuh: tile config, K splits and stream-K, from estimated cycles of an SM; rough facts of an H200. Only the
// number of m-blocks depends on m.
void plan_wgmma(const W4Problem& p, W4Plan& plan) {
  plan.wgmma = true;
  if (p.minima || plan.scale_k < w4_step_k)
    plan.operand = p.bf16_scales ? W4Operand::bf16_scales : W4Operand::f16_scales;
  while (plan.config < 2 && w4_wgmma_configs[plan.config].tokens < p.m) ++plan.config;
  const W4WgmmaConfig f = w4_wgmma_config(p.bits, plan.config);
  plan.n_blocks = divide_up(w4_tiles_n(p.n), f.warps());  // gated too: a gate row and its up row count as two
  plan.cluster = plan.n_blocks % 2 == 0 && p.sms > 1 ? 2 : 1;
  plan.launch_tokens = std::min(p.m, p.gather_x ? w4_gather_tokens : std::int64_t{1} << 30);
  plan.m_blocks = divide_up(plan.launch_tokens, f.tokens);
  // m-blocks of all launches: bits do not depend on whether x is gathered
  const std::int64_t steps = divide_up(w4_tiles_k(p.k), 2), m_blocks = divide_up(p.m, f.tokens),
                     work_tiles = plan.n_blocks * m_blocks;
  const std::int64_t sms = std::max(p.sms, 1);
  double least = 0;
  for (std::int64_t splits_wanted = 1; splits_wanted <= std::min<std::int64_t>(max_splits, steps); ++splits_wanted) {
    const std::int64_t split_steps = divide_up(steps, splits_wanted), splits = divide_up(steps, split_steps);
    if (splits != splits_wanted ||
        (splits_wanted > 1 && (split_steps < 2 || work_tiles * splits > sms * f.ctas_per_sm)))
      continue;
    // the busiest SM: its CTAs share the tensor cores (busy), or each waits for its own copies and registers (waiting)
    const std::int64_t ctas = divide_up(work_tiles * splits, sms), waves = divide_up(ctas, f.ctas_per_sm);
    const double step = 4.0 * f.tokens * f.consumer_groups;
    const double busy = static_cast<double>(ctas) * 1.3 * step, waiting = static_cast<double>(waves) * (step + 450);
    double cycles = static_cast<double>(split_steps) * std::max(busy, waiting) + 3500.0 * static_cast<double>(waves);
    if (splits > 1) cycles += 3000 + static_cast<double>(splits * m_blocks * f.tokens * p.n) * 8 / 1700;
    if (splits_wanted > 1 && cycles >= least) continue;
    least = cycles;
    plan.splits = static_cast<int>(splits);
    plan.split_steps = static_cast<int>(split_steps);
  }
  // Whole work tiles in waves, the last of which may leave most of the device idle, or stream-K. No work range is
  // shorter than a tile's K: fix-up sums go from one range to the next one only. Ranges that end where tiles end need
  // no fix-up; a fix-up costs some steps.
  const std::int64_t cluster_tiles = plan.n_blocks / plan.cluster, clusters = sms * f.ctas_per_sm / plan.cluster;
  const std::int64_t waves = divide_up(cluster_tiles * plan.m_blocks, clusters),
                     ranges = std::min(cluster_tiles, clusters / plan.m_blocks);
  if (w4_stream_k(f) && plan.splits == 1 && waves > 1 && ranges > 0 && plan.m_blocks <= max_m_group &&
      cluster_tiles * steps < std::int64_t{1} << 31) {
    const bool needs_fixup = cluster_tiles % ranges != 0;
    if (divide_up(cluster_tiles * steps, ranges) + (needs_fixup ? 3 : 0) <= waves * steps)
      plan.stream_k_ranges = static_cast<int>(ranges);
    if (plan.stream_k_ranges > 0 && needs_fixup) {
      const std::int64_t ctas = ranges * plan.m_blocks * plan.cluster;
      plan.semaphore_bytes = static_cast<std::size_t>(divide_up(8 * ctas, 256) * 256);
      plan.fixup_bytes = static_cast<std::size_t>(ctas * f.warps() * w4_tile_n * f.tokens) * sizeof(float);
    }
  }
  plan.m_group = static_cast<int>(std::clamp<std::int64_t>((std::int64_t{12} << 20) / (2 * f.tokens * p.k), 1,
                                                           max_m_group));  // 12 MB of x
  plan.shared_bytes = static_cast<std::size_t>(
      f.stages * (f.tokens * w4_step_k * 2 + f.warps() * w4_stage_bytes(p.bits) + 16) + w4_epilogue_bytes(f));
  if (p.gather_x) plan.gathered_bytes = static_cast<std::size_t>(2 * plan.launch_tokens * w4_padded_k(p.k));
  plan.gather_ctas = static_cast<int>(
      std::min(divide_up(steps * w4_step_k, w4_gather_columns), divide_up(4 * sms, plan.launch_tokens)));
}

// Rows of W to expand to 16 bits at a time, where expanding and the 16-bit product take less time than rounding the
// codes again for every 128 tokens; else 0. The bits are the same: both round weights alike and add up K in one order,
// k-step by k-step.
// Times in us, of an H200 under its power limit: step_us: a step of wgmma.cuh (128 rows, 128 tokens, 128 k), mixed
// where x and scales have different types; idle_us + busy_us: a step of the 16-bit tile (128 rows, 256 tokens, 64 k),
// which takes less where SMs are idle; bytes_us: bytes of W written in a us; chunk_us: the two launches of a chunk.
int expand_rows(const W4Problem& p, const W4Plan& plan) {
  constexpr double step_us = 0.97, mixed_step_us = 1.2, idle_us = 0.30, busy_us = 0.53, bytes_us = 3.5e6, chunk_us = 3;
  if (plan.operand == W4Operand::codes || !p.fits_linear || p.gated || plan.splits > 1 || p.m <= 512) return 0;
  constexpr LinearTile tile = linear_collective_tiles[1];
  constexpr std::int64_t pair = 2 * tile.rows;  // rows of W of a cluster
  const std::int64_t most = w4_expand_bytes / (2 * p.k) / pair * pair, m_tiles = divide_up(p.m, tile.tokens),
                     sms = std::max(p.sms, 1);
  if (most == 0) return 0;
  const double all_steps = static_cast<double>(divide_up(w4_tiles_k(p.k), 2));
  const std::int64_t cluster_tiles = plan.n_blocks / plan.cluster * plan.m_blocks, clusters = sms / plan.cluster;
  const double waves = plan.stream_k_ranges > 0 ? static_cast<double>(cluster_tiles) / static_cast<double>(clusters)
                                                : static_cast<double>(divide_up(cluster_tiles, clusters));
  double least = waves * all_steps * (p.bf16 == (plan.operand == W4Operand::bf16_scales) ? step_us : mixed_step_us);

  const auto product_us = [&](std::int64_t n) {  // of n rows of W
    const std::int64_t tiles = divide_up(n, pair) * 2 * m_tiles, waves = divide_up(tiles, sms);
    const double busy = static_cast<double>(tiles) / static_cast<double>(waves * sms);
    return static_cast<double>(waves) * 2 * all_steps * (idle_us + busy_us * busy);
  };
  std::int64_t best = 0;
  const std::int64_t fewest = divide_up(p.n, most);
  for (std::int64_t chunks = fewest; chunks <= fewest + 8; ++chunks) {
    const std::int64_t rows = divide_up(divide_up(p.n, chunks), pair) * pair, whole = p.n / rows,
                       rest = p.n - whole * rows;
    const double us = static_cast<double>(whole) * product_us(rows) + (rest > 0 ? product_us(rest) : 0) +
                      static_cast<double>(divide_up(p.n, rows)) * chunk_us +
                      2 * static_cast<double>(p.n) * static_cast<double>(p.k) / bytes_us;
    if (us >= least) continue;
    least = us;
    best = rows;
  }
  return static_cast<int>(best);
}

}  // namespace

W4Plan plan_w4a16(const W4Problem& p) {
  W4Plan plan;
  plan.scale_k = std::min(p.group, 128);
  if (p.group == p.k && plan.scale_k != 32 && plan.scale_k != 64) plan.scale_k = 128;

  const std::int64_t n_out = p.gated ? p.n / 2 : p.n;
  const bool separate =
      p.gated && n_out % w4_tile_n != 0;  // the gate and up rows of an output lie at different rows of their tiles
  if (p.gated && !separate) plan.gate_tiles = n_out / w4_tile_n;
  const auto workspace = [&] {
    plan.separate_epilogue = separate || (plan.splits > 1 && (plan.wgmma || plan.cluster == 1));
    return plan.separate_epilogue ? sizeof(float) * static_cast<std::size_t>(plan.splits * plan.launch_tokens *
                                                                             w4_tiles_n(p.n) * w4_tile_n)
                                  : 0;
  };
  if (p.wgmma && p.m > w4_stream_max_m && !p.batch_invariant && !separate) {
    plan_wgmma(p, plan);
    plan.expand_rows = expand_rows(p, plan);
    if (plan.expand_rows > 0) {
      plan.stream_k_ranges = 0;
      plan.semaphore_bytes = plan.fixup_bytes = 0;
      plan.workspace_bytes = 2 * static_cast<std::size_t>(std::min<std::int64_t>(plan.expand_rows, p.n) * p.k);
      plan.why = "W expanded to 16 bits, a chunk of rows at a time: many tokens share the cost of dequantising";
      return plan;
    }
    plan.workspace_bytes = workspace() + plan.semaphore_bytes + plan.fixup_bytes + plan.gathered_bytes;
    plan.why = plan.splits > 1 ? "wgmma, split-K to fill the device"
               : plan.stream_k_ranges > 0
                   ? "wgmma, stream-K: whole work tiles would leave part of the device idle in the last wave"
                   : "wgmma";
    return plan;
  }
  plan.config = config_for(std::min<std::int64_t>(p.m, w4_stream_block_m));
  const W4StreamConfig f = w4_stream_config(p.bits, plan.config);
  plan.n_blocks = divide_up(w4_tiles_n(p.n), w4_warps);
  plan.launch_tokens = p.m;
  const std::int64_t m_blocks = divide_up(p.m, w4_stream_block_m);
  const SplitK cut = choose_split_k(p, p.batch_invariant ? config_for(16) : plan.config, plan.n_blocks,
                                    p.batch_invariant ? 1 : m_blocks);
  plan.splits = cut.splits;
  plan.split_steps = cut.split_steps;
  if (p.clusters && plan.splits == w4_cluster && p.m <= w4_cluster_tokens && !separate) plan.cluster = w4_cluster;
  // bounds the workspace: no more tokens a launch than one CTA takes
  if (separate || (p.batch_invariant && plan.splits > 1))
    plan.launch_tokens = std::min<std::int64_t>(p.m, w4_stream_block_m);
  plan.m_blocks = divide_up(plan.launch_tokens, w4_stream_block_m);

  plan.x_tile_tokens = plan.config == 0 ? static_cast<int>(std::max<std::int64_t>(p.m, 1)) : 8 * f.n_tiles;
  const int x_tiles = plan.split_steps * w4_step_k > f.x_tile_k ? 2 : 1;
  plan.workspace_bytes = workspace();
  int loads = w4_warps * f.stages * w4_stage_bytes(p.bits) + x_tiles * plan.x_tile_tokens * w4_x_tile_pitch(f),
      sums = 0;
  if (!plan.separate_epilogue) {
    const int shift = std::countr_zero(static_cast<unsigned>(plan.cluster));
    sums = plan.cluster * w4_epilogue_tiles(plan.gate_tiles > 0, shift).warps * 8 * f.n_tiles * w4_sums_pitch * 4;
  }
  if (plan.cluster > 1)
    plan.sums_offset = loads = (loads + 15) / 16 * 16;  // a peer's sums land while codes are still read
  plan.shared_bytes = static_cast<std::size_t>(std::max(loads, plan.sums_offset + sums));
  plan.why = p.batch_invariant  ? "the same split-K at every M, as batch_invariant asks"
             : plan.cluster > 1 ? "split-K within clusters: the blocks of N alone would not fill the device evenly"
             : plan.splits > 1  ? "split-K: the blocks of N alone would not fill the device evenly"
                                : "no split-K: the blocks of N fill the device, or splitting would cost more";
  return plan;
}

}  // namespace rooftile::gpu
