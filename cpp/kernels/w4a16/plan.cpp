// SPDX-License-Identifier: Apache-2.0
#include "kernels/w4a16/plan.h"

#include <algorithm>

#include "core/w4_layout.h"

namespace rooftile::gpu {
namespace {

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

constexpr std::size_t shared_limit = 99 * 1024;   // of one CTA on the smallest of 8.x; two fit 9.0
constexpr int max_splits = 16;

int form_of(std::int64_t tokens) {
  int form = 0;
  while (form < 3 && 8 * w4_forms[form].token_tiles < tokens) ++form;
  return form;
}

struct Cut {
  int splits, chunk_tiles;
};

// The number of splits whose estimated time is least. The constants are rough facts of a large GPU (KB per microsecond of
// one SM; what one more launch and one more wave of CTAs take): they need to rank candidates, not to predict.
Cut cut_k(const W4Problem& p, int form, int unit_tiles, std::int64_t row_blocks, std::int64_t token_blocks) {
  const W4Form f = w4_forms[form];
  const std::int64_t tiles = w4_tiles_k(p.k), units = divide_up(tiles, unit_tiles), sms = std::max(p.sms, 1);
  const double tokens = 8.0 * f.token_tiles, rows = 16.0 * f.row_tiles * w4_warps;
  Cut best{1, static_cast<int>(units) * unit_tiles};
  double least = 0;
  for (std::int64_t wanted = 1; wanted <= std::min<std::int64_t>(max_splits, units); ++wanted) {
    const std::int64_t chunk = divide_up(units, wanted), splits = divide_up(units, chunk);
    if (splits != wanted || (wanted > 1 && chunk * unit_tiles < 4)) continue;
    const std::int64_t waves = divide_up(row_blocks * token_blocks * splits, sms);
    const double kilobytes = rows * static_cast<double>(chunk * unit_tiles) * (32 + tokens / 8) / 1024;
    const double per_us = waves > 1 ? 34 : 24;   // one CTA alone keeps too few bytes in flight
    double us = static_cast<double>(waves) * (kilobytes / per_us + 0.2);
    if (splits > 1) {
      const double partial = static_cast<double>(splits * row_blocks * token_blocks) * rows * tokens * 4;
      us += 1.5 + 2 * partial / 3.5e6;
    }
    if (wanted == 1 || us < least) {
      least = us;
      best = {static_cast<int>(splits), static_cast<int>(chunk) * unit_tiles};
    }
  }
  return best;
}

}  // namespace

W4Plan plan_w4a16(const W4Problem& p) {
  W4Plan plan;
  plan.span = std::min(p.group, 128);
  if (p.group == p.k && plan.span != 32 && plan.span != 64) plan.span = 128;
  const int unit_tiles = plan.span == 128 ? 2 : 1;
  const auto blocks_of_rows = [&](int form) { return divide_up(w4_tiles_n(p.n), w4_warps * w4_forms[form].row_tiles); };

  plan.form = form_of(std::min<std::int64_t>(p.m, w4_tokens));
  const W4Form f = w4_forms[plan.form];
  plan.row_blocks = blocks_of_rows(plan.form);
  plan.launch_tokens = p.m;
  const std::int64_t token_blocks = divide_up(p.m, w4_tokens);
  const int like = p.batch_invariant ? form_of(16) : plan.form;
  const Cut cut = cut_k(p, like, unit_tiles, blocks_of_rows(like), p.batch_invariant ? 1 : token_blocks);
  plan.splits = cut.splits;
  plan.chunk_tiles = cut.chunk_tiles;
  // the workspace of a split product stays bounded: no more tokens at once than one CTA takes
  if (p.batch_invariant && plan.splits > 1) plan.launch_tokens = std::min<std::int64_t>(p.m, w4_tokens);
  plan.token_blocks = divide_up(plan.launch_tokens, w4_tokens);

  plan.x_tokens = plan.form == 0 ? static_cast<int>(std::max<std::int64_t>(p.m, 1)) : 8 * f.token_tiles;
  const std::size_t ring = static_cast<std::size_t>(w4_warps * f.stages * w4_slot_bytes(f));
  const std::size_t tile = static_cast<std::size_t>(plan.x_tokens) * (2 * w4_tile_k + 4 * 2);   // x, and at most two sums
  int room = static_cast<int>((shared_limit - ring) / tile) / unit_tiles * unit_tiles;
  if (room > 4) room -= room % 4;   // a warp stages x in runs of four tiles
  plan.panel_tiles = std::min(plan.chunk_tiles, room);
  plan.shared_bytes = ring + tile * static_cast<std::size_t>(plan.panel_tiles);
  if (plan.splits > 1)
    plan.workspace_bytes = sizeof(float) * static_cast<std::size_t>(plan.splits * plan.launch_tokens * w4_tiles_n(p.n) * w4_tile_n);
  plan.why = p.batch_invariant ? "one split at every number of rows, as asked"
             : plan.splits > 1 ? "split along K: the blocks of rows alone would not fill the device evenly"
                               : "whole rows: they fill the device, or splitting would cost more";
  return plan;
}

}  // namespace rooftile::gpu
