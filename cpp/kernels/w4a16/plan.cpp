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
constexpr std::int64_t most_token_group = 8;           // blocks of tokens whose x is read at the same time
constexpr int w4_cluster = 2, w4_cluster_tokens = 16;  // two chunks of K of up to so many tokens are a cluster

int form_of(std::int64_t tokens) {
  int form = 0;
  while (form < 3 && 8 * w4_forms[form].token_tiles < tokens) ++form;
  return form;
}

struct Cut {
  int splits, chunk_steps;
};

// The number of splits whose estimated time is least. The constants are rough facts of a large GPU (KB per microsecond
// of one SM; what a second kernel takes): they need to rank candidates, not to predict.
Cut cut_k(const W4Problem& p, int form, std::int64_t row_blocks, std::int64_t token_blocks) {
  const std::int64_t steps = divide_up(w4_tiles_k(p.k), 2),
                     slots = 2 * std::max(p.sms, 1);  // two CTAs a multiprocessor
  const double tokens = 8.0 * w4_forms[form].token_tiles, rows = 16.0 * w4_warps;
  const bool clusters = p.clusters && form <= form_of(w4_cluster_tokens);
  Cut best{1, static_cast<int>(steps)};
  double least = 0;
  for (std::int64_t wanted = 1; wanted <= std::min<std::int64_t>(max_splits, steps); ++wanted) {
    const std::int64_t chunk = divide_up(steps, wanted), splits = divide_up(steps, chunk);
    if (splits != wanted || (wanted > 1 && chunk < 2)) continue;
    if (wanted > 1 && row_blocks * token_blocks * splits > slots) continue;  // the workspace is one tile a CTA at most
    const std::int64_t waves = divide_up(row_blocks * token_blocks * splits, slots);
    const double kilobytes = rows * static_cast<double>(chunk) * (16 * p.bits + 2 * tokens) / 1024;
    double us = static_cast<double>(waves) * (kilobytes / 14 + 1.0);
    if (splits == w4_cluster && clusters) us += 0.5;
    else if (splits > 1)
      us += 1.0 + 2 * static_cast<double>(splits * row_blocks * token_blocks) * rows * tokens * 4 / 3.5e6;
    if (wanted == 1 || us < least) {
      least = us;
      best = {static_cast<int>(splits), static_cast<int>(chunk)};
    }
  }
  return best;
}

// The same for tiles.cuh, in cycles of a multiprocessor; rough facts of an H200. Nothing but the number of blocks of
// tokens depends on m.
void plan_tiles(const W4Problem& p, W4Plan& plan) {
  plan.tiles = true;
  if (p.minima || plan.span < w4_step_k) plan.operand = p.bf16_scales ? W4Operand::bf16_scales : W4Operand::f16_scales;
  while (plan.form < 2 && w4_tiles_forms[plan.form].tokens < p.m) ++plan.form;
  const W4TilesForm f = w4_tiles_form(p.bits, plan.form);
  plan.row_blocks = divide_up(w4_tiles_n(p.n), f.warps());  // a pair of gate and up rows is two, so gated or not
  plan.cluster = plan.row_blocks % 2 == 0 && p.sms > 1 ? 2 : 1;
  plan.launch_tokens = std::min(p.m, p.copy_x ? w4_copied_tokens : std::int64_t{1} << 30);
  plan.token_blocks = divide_up(plan.launch_tokens, f.tokens);
  // all of them, whatever a launch takes: bits do not depend on what is prepared
  const std::int64_t steps = divide_up(w4_tiles_k(p.k), 2), token_blocks = divide_up(p.m, f.tokens),
                     blocks = plan.row_blocks * token_blocks;
  const std::int64_t sms = std::max(p.sms, 1);
  double least = 0;
  for (std::int64_t wanted = 1; wanted <= std::min<std::int64_t>(max_splits, steps); ++wanted) {
    const std::int64_t chunk = divide_up(steps, wanted), splits = divide_up(steps, chunk);
    if (splits != wanted || (wanted > 1 && (chunk < 2 || blocks * splits > sms * f.ctas))) continue;
    // of the busiest multiprocessor: its CTAs share the tensor cores, or wait for their own copies and registers
    const std::int64_t ctas = divide_up(blocks * splits, sms), rounds = divide_up(ctas, f.ctas);
    const double step = 4.0 * f.tokens * f.groups;
    const double busy = static_cast<double>(ctas) * 1.3 * step, waiting = static_cast<double>(rounds) * (step + 450);
    double cycles = static_cast<double>(chunk) * std::max(busy, waiting) + 3500.0 * static_cast<double>(rounds);
    if (splits > 1) cycles += 3000 + static_cast<double>(splits * token_blocks * f.tokens * p.n) * 8 / 1700;
    if (wanted > 1 && cycles >= least) continue;
    least = cycles;
    plan.splits = static_cast<int>(splits);
    plan.chunk_steps = static_cast<int>(chunk);
  }
  // Whole items in rounds, the last of which may leave most of the device idle, or even shares. None is shorter than an
  // item: who goes on with another's sums must find them there. Nothing is handed on where shares end with rows; where
  // it is, that costs some steps.
  const std::int64_t row_groups = plan.row_blocks / plan.cluster, clusters = sms * f.ctas / plan.cluster;
  const std::int64_t rounds = divide_up(row_groups * plan.token_blocks, clusters),
                     shares = std::min(row_groups, clusters / plan.token_blocks);
  if (w4_tiles_shares(f) && plan.splits == 1 && rounds > 1 && shares > 0 && plan.token_blocks <= most_token_group &&
      row_groups * steps < std::int64_t{1} << 31) {
    const bool handed = row_groups % shares != 0;
    if (divide_up(row_groups * steps, shares) + (handed ? 3 : 0) <= rounds * steps)
      plan.shares = static_cast<int>(shares);
    if (plan.shares > 0 && handed) {
      const std::int64_t ctas = shares * plan.token_blocks * plan.cluster;
      plan.ticket_bytes = static_cast<std::size_t>(divide_up(8 * ctas, 256) * 256);
      plan.handed_bytes = static_cast<std::size_t>(ctas * f.warps() * w4_tile_n * f.tokens) * sizeof(float);
    }
  }
  plan.token_group = static_cast<int>(std::clamp<std::int64_t>((std::int64_t{12} << 20) / (2 * f.tokens * p.k), 1,
                                                               most_token_group));  // 12 MB of x at once
  plan.shared_bytes = static_cast<std::size_t>(
      f.stages * (f.tokens * w4_step_k * 2 + f.warps() * w4_slot_bytes(p.bits) + 16) + w4_tiles_out_bytes(f));
  if (p.copy_x) plan.copy_bytes = static_cast<std::size_t>(2 * plan.launch_tokens * w4_padded_row(p.k));
  plan.prepare_parts = static_cast<int>(
      std::min(divide_up(steps * w4_step_k, w4_prepare_columns), divide_up(4 * sms, plan.launch_tokens)));
}

// Rows of W that are expanded to 16 bits at a time where that and the 16-bit product take less than rounding codes for
// every 128 tokens again; else 0. Bits are the same: both round weights alike and add up K in one order, k-step by
// k-step.
// Times in us, of an H200 under its power limit: a step of tiles.cuh (128 rows, 128 tokens, 128 k), a step of the
// 16-bit tile (128 rows, 256 tokens, 64 k), which takes less where SMs are idle; bytes of W that are written in a us; a
// chunk's two launches.
int expand_rows(const W4Problem& p, const W4Plan& plan) {
  constexpr double step_us = 0.97, mixed_step_us = 1.2, idle_us = 0.30, busy_us = 0.53, bytes_us = 3.5e6, chunk_us = 3;
  if (plan.operand == W4Operand::codes || !p.linear_tiles || p.gated || plan.splits > 1 || p.m <= 512) return 0;
  constexpr LinearTile tile = linear_collectives[1];
  constexpr std::int64_t pair = 2 * tile.rows;  // of a cluster
  const std::int64_t most = w4_expand_bytes / (2 * p.k) / pair * pair, token_tiles = divide_up(p.m, tile.tokens),
                     sms = std::max(p.sms, 1);
  if (most == 0) return 0;
  const double all_steps = static_cast<double>(divide_up(w4_tiles_k(p.k), 2));
  const std::int64_t row_groups = plan.row_blocks / plan.cluster * plan.token_blocks, clusters = sms / plan.cluster;
  const double rounds = plan.shares > 0 ? static_cast<double>(row_groups) / static_cast<double>(clusters)
                                        : static_cast<double>(divide_up(row_groups, clusters));
  double least = rounds * all_steps * (p.bf16 == (plan.operand == W4Operand::bf16_scales) ? step_us : mixed_step_us);

  const auto product_us = [&](std::int64_t n) {  // of n rows
    const std::int64_t tiles = divide_up(n, pair) * 2 * token_tiles, waves = divide_up(tiles, sms);
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
  plan.span = std::min(p.group, 128);
  if (p.group == p.k && plan.span != 32 && plan.span != 64) plan.span = 128;

  const std::int64_t outputs = p.gated ? p.n / 2 : p.n;
  const bool apart = p.gated && outputs % w4_tile_n != 0;  // a tile row of ups is not that of its gates
  if (p.gated && !apart) plan.gate_tiles = outputs / w4_tile_n;
  const auto workspace = [&] {
    plan.finish = apart || (plan.splits > 1 && (plan.tiles || plan.cluster == 1));
    return plan.finish ? sizeof(float) *
                             static_cast<std::size_t>(plan.splits * plan.launch_tokens * w4_tiles_n(p.n) * w4_tile_n)
                       : 0;
  };
  if (p.tiles && p.m > w4_stream_tokens && !p.batch_invariant && !apart) {
    plan_tiles(p, plan);
    plan.expand_rows = expand_rows(p, plan);
    if (plan.expand_rows > 0) {
      plan.shares = 0;
      plan.ticket_bytes = plan.handed_bytes = 0;
      plan.workspace_bytes = 2 * static_cast<std::size_t>(std::min<std::int64_t>(plan.expand_rows, p.n) * p.k);
      plan.why = "rows of W in 16 bits, a chunk at a time: many tokens share what dequantising costs";
      return plan;
    }
    plan.workspace_bytes = workspace() + plan.ticket_bytes + plan.handed_bytes + plan.copy_bytes;
    plan.why = plan.splits > 1 ? "tiles of tokens, split along K to fill the device"
               : plan.shares > 0
                   ? "tiles of tokens, in even shares: whole ones would leave some of the device idle in the last round"
                   : "tiles of tokens";
    return plan;
  }
  plan.form = form_of(std::min<std::int64_t>(p.m, w4_tokens));
  const W4Form f = w4_form(p.bits, plan.form);
  plan.row_blocks = divide_up(w4_tiles_n(p.n), w4_warps);
  plan.launch_tokens = p.m;
  const std::int64_t token_blocks = divide_up(p.m, w4_tokens);
  const Cut cut =
      cut_k(p, p.batch_invariant ? form_of(16) : plan.form, plan.row_blocks, p.batch_invariant ? 1 : token_blocks);
  plan.splits = cut.splits;
  plan.chunk_steps = cut.chunk_steps;
  if (p.clusters && plan.splits == w4_cluster && p.m <= w4_cluster_tokens && !apart) plan.cluster = w4_cluster;
  // the workspace stays bounded: no more tokens at once than one CTA takes
  if (apart || (p.batch_invariant && plan.splits > 1)) plan.launch_tokens = std::min<std::int64_t>(p.m, w4_tokens);
  plan.token_blocks = divide_up(plan.launch_tokens, w4_tokens);

  plan.x_rows = plan.form == 0 ? static_cast<int>(std::max<std::int64_t>(p.m, 1)) : 8 * f.token_tiles;
  const int panels = plan.chunk_steps * w4_step_k > f.panel_k ? 2 : 1;
  plan.workspace_bytes = workspace();
  int loads = w4_warps * f.stages * w4_slot_bytes(p.bits) + panels * plan.x_rows * w4_panel_pitch(f), sums = 0;
  if (!plan.finish) {
    const int shift = std::countr_zero(static_cast<unsigned>(plan.cluster));
    sums = plan.cluster * w4_finisher(plan.gate_tiles > 0, shift).warps * 8 * f.token_tiles * w4_sums_pitch * 4;
  }
  if (plan.cluster > 1) plan.sums_at = loads = (loads + 15) / 16 * 16;  // others' sums come while codes are still read
  plan.shared_bytes = static_cast<std::size_t>(std::max(loads, plan.sums_at + sums));
  plan.why = p.batch_invariant ? "one split at every number of rows, as asked"
             : plan.cluster > 1
                 ? "a cluster of CTAs has the chunks of K: the blocks of rows alone would not fill the device evenly"
             : plan.splits > 1 ? "split along K: the blocks of rows alone would not fill the device evenly"
                               : "whole rows: they fill the device, or splitting would cost more";
  return plan;
}

}  // namespace rooftile::gpu
