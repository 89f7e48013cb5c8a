// SPDX-License-Identifier: Apache-2.0
// The choices for W in 4 or 8 bits: the paths stream and wgmma.
#include <algorithm>
#include <bit>

#include "kernels/gemm/plan_rules.h"

namespace rooftile::gpu {
namespace {

constexpr std::int64_t max_m_group = 8;  // m-blocks whose x is read at the same time

int config_for(std::int64_t tokens) {
  int config = 0;
  while (config < w4_stream_last && 8 * w4_stream_configs[config].n_tiles < tokens) ++config;
  return config;
}

std::int64_t steps_of(const GemmProblem& p) { return divide_up(w4_tiles_k(p.k), 2); }  // of 128 k
// Whether the gate and up rows of an output lie at different rows of their tiles.
bool separate_gates(const GemmProblem& p) { return p.gated && p.n / 2 % w4_tile_n != 0; }
// Whether each of `splits` splits of `steps` steps has at least `least`.
bool splits_evenly(std::int64_t steps, std::int64_t splits, std::int64_t least) {
  if (splits == 1) return true;
  const std::int64_t split_steps = divide_up(steps, splits);
  return split_steps >= least && divide_up(steps, split_steps) == splits;
}
// wgmma_codes.cuh: clusters resident on the device; and cluster tiles along N (128 rows of W for each CTA of a
// cluster).
std::int64_t resident_clusters(const GemmProblem& p, const GemmPlan& plan) {
  return std::int64_t{std::max(p.sms, 1)} * w4_wgmma_config(p.bits, plan.config).ctas_per_sm / plan.cluster;
}
std::int64_t cluster_tiles(const GemmPlan& plan) { return plan.n_blocks / plan.cluster; }

void complete_wgmma(const GemmProblem& p, GemmPlan& plan) {
  const W4WgmmaConfig f = w4_wgmma_config(p.bits, plan.config);
  if (p.zeros == W4Zeros::minima || plan.scale_k < w4_step_k) {
    plan.operand = p.scale_dtype == DType::bf16 ? W4Operand::bf16_scales : W4Operand::f16_scales;
    if (p.zeros != W4Zeros::minima && plan.scale_k == 64 && w4_has_two_sums(p.bits, f))
      plan.operand = W4Operand::codes_64;
  }
  plan.n_blocks = divide_up(w4_tiles_n(p.n), f.warps());  // gated too: a gate row and its up row count as two
  plan.launch_tokens = std::min(p.m, !p.aligned_operands ? w4_gather_tokens : std::int64_t{1} << 30);
  plan.m_blocks = divide_up(plan.launch_tokens, f.tokens);
  if (plan.stream_k_ranges > 0 && cluster_tiles(plan) % plan.stream_k_ranges != 0) {
    const std::int64_t ctas = plan.stream_k_ranges * plan.m_blocks * plan.cluster;
    plan.semaphore_bytes = static_cast<std::size_t>(divide_up(8 * ctas, 256) * 256);
    plan.fixup_bytes = static_cast<std::size_t>(ctas * f.warps() * w4_tile_n * f.tokens) * sizeof(float);
  }
  plan.threads = f.threads();
  plan.shared_bytes = static_cast<std::size_t>(w4_wgmma_shared_bytes(p.bits, f));
  // A CTA for each SM. Where two fit, CTAs that start while the kernel before ends go in pairs to the SMs that are free
  // first: 17 tokens, K = N = 4096, groups of 128 took 9.1 us on an H200, 20 tokens 6.9.
  if (plan.n_blocks * plan.m_blocks * plan.splits <= p.sms)
    plan.shared_bytes = std::max(plan.shared_bytes, static_cast<std::size_t>(least_shared_for(1)));
  if (!p.aligned_operands) plan.gathered_bytes = static_cast<std::size_t>(2 * plan.launch_tokens * w4_padded_k(p.k));
  plan.gather_ctas =
      static_cast<int>(std::min(divide_up(steps_of(p) * w4_step_k, w4_gather_columns),
                                divide_up(4 * std::max(p.sms, 1), std::max<std::int64_t>(plan.launch_tokens, 1))));
}

void complete_stream(const GemmProblem& p, GemmPlan& plan) {
  const W4StreamConfig f = w4_stream_config(p.bits, plan.config);
  plan.n_blocks = divide_up(w4_tiles_n(p.n), w4_warps);
  // bounds the workspace: no more tokens a launch than one CTA takes
  plan.launch_tokens = separate_gates(p) || (p.batch_invariant && plan.splits > 1)
                           ? std::min<std::int64_t>(p.m, w4_stream_block_m)
                           : p.m;
  plan.m_blocks = divide_up(plan.launch_tokens, w4_stream_block_m);
  plan.x_tile_tokens = plan.config == 0 ? static_cast<int>(std::max<std::int64_t>(p.m, 1)) : 8 * f.n_tiles;
  const int x_tiles = plan.split_steps * w4_step_k > f.x_tile_k ? 2 : 1;
  int loads = w4_warps * f.stages * w4_stage_bytes(p.bits) + x_tiles * plan.x_tile_tokens * w4_x_tile_pitch(f),
      sums = 0;
  if (!plan.separate_epilogue) {
    sums =
        plan.cluster * w4_epilogue_tiles(plan.gate_tiles > 0, plan.cluster).warps * 8 * f.n_tiles * w4_sums_pitch * 4;
  }
  if (plan.cluster > 1)
    plan.sums_offset = loads = (loads + 15) / 16 * 16;  // a peer's sums land while codes are still read
  plan.threads = 32 * w4_warps;
  plan.shared_bytes =
      static_cast<std::size_t>(std::max({loads, plan.sums_offset + sums, p.hopper ? w4_stream_least_shared : 0}));
}

// Whether `splits` K splits of the blocks of N can be clusters that run at once. A cluster lies in one GPC, 16 or more
// SMs on Hopper; one GPC may have fewer, so it is not counted. Two CTAs always find a place.
bool splits_are_clusters(const GemmProblem& p, std::int64_t splits, std::int64_t blocks) {
  if (!p.hopper || separate_gates(p) || splits < 2 || splits > w4_max_cluster) return false;
  return splits == 2 || blocks <= (p.sms / 16 - 1) * (2 * 16 / splits);  // two CTAs an SM, 16 SMs a GPC
}

// stream_codes.cuh: the number of K splits with the least estimated time. The constants are rough facts of a large GPU:
// they need to rank candidates, not to predict. A CTA, two to an SM, loads 14 KB per us and costs 1.0 us a wave; the
// exchange within a cluster costs 0.5 us, the second kernel 1.0 us, and partial sums move at 3.5 MB per us.
// N = K = 4096, M = 1, 4 bits, 132 SMs: 32 blocks of 128 rows, 32 steps, room for 264 CTAs. A step is 128 x 128 codes
// of half a byte and 8 tokens x 128 of x: 10 KB. Whole K: 320 / 14 + 1 = 23.9 us. Two, a cluster: 160 / 14 + 1.5 =
// 12.9. Eight: 40 / 14 + 1, 1.0 for the second kernel and 0.6 for 2 x 8 x 32 x 128 x 8 sums of 4 bytes: 5.5. Nine would
// be 288 CTAs.
int choose_split_k(const GemmProblem& p, int config, std::int64_t n_blocks, std::int64_t m_blocks) {
  const std::int64_t steps = steps_of(p), resident_ctas = 2 * std::max(p.sms, 1);  // two CTAs per SM
  const double tokens = 8.0 * w4_stream_configs[config].n_tiles, rows = 16.0 * w4_warps;
  const bool few_tokens = config <= config_for(w4_cluster_tokens);
  // One work tile a CTA bounds the workspace.
  const std::int64_t work_tiles = n_blocks * m_blocks, fitting = resident_ctas / std::max<std::int64_t>(work_tiles, 1),
                     most = std::clamp<std::int64_t>(fitting, 1, std::min<std::int64_t>(max_splits, steps));
  int best = 1;
  double least = 0;
  for (std::int64_t splits = 1; splits <= most; ++splits) {
    if (!splits_evenly(steps, splits, 2)) continue;
    const std::int64_t split_steps = divide_up(steps, splits), waves = divide_up(work_tiles * splits, resident_ctas);
    const double kilobytes = rows * static_cast<double>(split_steps) * (16 * p.bits + 2 * tokens) / 1024;
    double us = static_cast<double>(waves) * (kilobytes / 14 + 1.0);
    if (few_tokens && splits_are_clusters(p, splits, work_tiles)) us += 0.5;
    else if (splits > 1) us += 1.0 + 2 * static_cast<double>(splits * work_tiles) * rows * tokens * 4 / 3.5e6;
    if (splits > 1 && us >= least) continue;
    least = us;
    best = static_cast<int>(splits);
  }
  return best;
}
// The bucket of 16 tokens decides for every M where the caller asks for batch_invariant.
int choose_split_k(const GemmProblem& p, int config) {
  const std::int64_t n_blocks = divide_up(w4_tiles_n(p.n), w4_warps);
  return p.batch_invariant ? choose_split_k(p, config_for(16), n_blocks, 1)
                           : choose_split_k(p, config, n_blocks, divide_up(p.m, w4_stream_block_m));
}

// Cycles of issue slots that the plan counts for a step of a wgmma CTA, 4 bits: as many as one takes that has an SM to
// itself, since two on an SM gain nothing (docs/lab/w4a16.md). In 8 bits the bytes of a step take longer.
constexpr double w4_issue_cycles = 700;
// Others, fitted to an H200: a busy SM takes 1.3 cycles of a step for each cycle of its MMAs, a lone CTA waits 450 for
// copies and decoding besides its MMAs; a wave starts and ends in 3500, the kernel of split K takes 3000 and reads and
// writes 1700 bytes of partial sums a cycle.
constexpr double w4_mma_factor = 1.3, w4_step_wait = 450, w4_wave_cycles = 3500, w4_reduce_cycles = 3000,
                 w4_partial_bytes_per_cycle = 1700;

// wgmma_codes.cuh: tile config, K splits and stream-K, from estimated cycles of an SM; rough facts of an H200. Only the
// number of m-blocks depends on m.
// N = 14336, K = 4096, M = 64, 132 SMs: 112 work tiles of 128 rows x 64 tokens, one for each SM; two splits make 224.
// 32 steps of max(1.3 * 512, 512 + 450) cycles and 3500 are 34 000. N = 28672: 112 clusters' tiles for 66 clusters are
// two waves, 64 steps; stream-K gives each cluster 112 * 32 / 66 = 55 steps and 3 for the fix-up, so it runs.
// M = 32: 112 work tiles, 32 steps of 256 + 450 cycles and 3500 are 26 000; two splits, two CTAs an SM, are 16 steps of
// 2 * 700 cycles, which with the sums of both splits are 33 000, so K is not split.
void plan_wgmma(const GemmProblem& p, GemmPlan& plan) {
  plan.path = GemmPath::codes_wgmma;
  while (plan.config < w4_wgmma_last && w4_wgmma_configs[plan.config].tokens < p.m) ++plan.config;
  const W4WgmmaConfig f = w4_wgmma_config(p.bits, plan.config);
  plan.cluster = divide_up(w4_tiles_n(p.n), f.warps()) % 2 == 0 && p.sms > 1 ? 2 : 1;
  complete_codes(p, plan);
  // m-blocks of all launches: bits do not depend on whether x is gathered
  const std::int64_t steps = steps_of(p), m_blocks = divide_up(p.m, f.tokens), work_tiles = plan.n_blocks * m_blocks;
  const std::int64_t sms = std::max(p.sms, 1);
  double least = 0;
  for (std::int64_t splits = 1; splits <= std::min<std::int64_t>(max_splits, steps); ++splits) {
    if (!splits_evenly(steps, splits, 2) || (splits > 1 && work_tiles * splits > sms * f.ctas_per_sm)) continue;
    // the busiest SM: its CTAs share the tensor cores or the issue slots (busy), or each waits for its own copies and
    // registers (waiting)
    const std::int64_t ctas = divide_up(work_tiles * splits, sms), waves = divide_up(ctas, f.ctas_per_sm);
    const double step = 4.0 * f.tokens * f.consumer_groups;
    const double busy = static_cast<double>(ctas) * std::max(w4_mma_factor * step, p.bits == 4 ? w4_issue_cycles : 0),
                 waiting = static_cast<double>(waves) * (step + w4_step_wait);
    double cycles = static_cast<double>(divide_up(steps, splits)) * std::max(busy, waiting) +
                    w4_wave_cycles * static_cast<double>(waves);
    if (splits > 1)
      cycles +=
          w4_reduce_cycles + static_cast<double>(splits * m_blocks * f.tokens * p.n) * 8 / w4_partial_bytes_per_cycle;
    if (splits > 1 && cycles >= least) continue;
    least = cycles;
    plan.splits = static_cast<int>(splits);
  }
  // In waves of whole work tiles the last wave may leave most of the device idle; stream-K avoids this. No work range
  // is shorter than a tile's K: fix-up sums go from one range to the next one only. Ranges that end where tiles end
  // need no fix-up; a fix-up costs some steps.
  const std::int64_t tiles = cluster_tiles(plan), clusters = resident_clusters(p, plan),
                     waves = divide_up(tiles * plan.m_blocks, clusters),
                     ranges = std::min(tiles, clusters / plan.m_blocks);
  if (w4_stream_k(f) && plan.splits == 1 && waves > 1 && ranges > 0 && plan.m_blocks <= max_m_group &&
      tiles * steps < std::int64_t{1} << 31 &&
      divide_up(tiles * steps, ranges) + (tiles % ranges != 0 ? 3 : 0) <= waves * steps)
    plan.stream_k_ranges = static_cast<int>(ranges);
  // Two CTAs of a cluster share tiles of x, but start only where two SMs of a GPC are free, and end together. With one
  // m-block single CTAs are up to 4 % faster (docs/lab/w4a16.md): always up to 64 tokens, and where K is split.
  // stream-K keeps its clusters, on which its work ranges, and so bits, depend.
  if (plan.stream_k_ranges == 0 && m_blocks == 1 && (f.tokens <= 64 || plan.splits > 1)) plan.cluster = 1;
  plan.m_group = static_cast<int>(std::clamp<std::int64_t>((std::int64_t{12} << 20) / (2 * f.tokens * p.k), 1,
                                                           max_m_group));  // 12 MB of x
}

// Rows of W to expand to 16 bits at a time, where expanding and the 16-bit product take less time than rounding the
// codes again for every 128 tokens; else 0. The bits are the same: both round weights alike and add up K in one order,
// k-step by k-step.
// Times in us, of an H200 under its power limit: step_us: a step of wgmma_codes.cuh (128 rows, 128 tokens, 128 k),
// mixed where x and scales have different types; idle_us + busy_us: a step of the 16-bit tile (128 rows, 256 tokens, 64
// k), which takes less where SMs are idle; bytes_us: bytes of W written in a us; chunk_us: the two launches of a chunk.
// M = N = K = 4096, groups of 32, fp16, 132 SMs: 32 blocks of N x 32 of M: 512 tiles of clusters, 66 at once, 8 waves
// of 32 steps of 0.97 us: 248 us. Expanded in one chunk, 32 MB: 512 tiles are 4 waves, 97 % busy, of 64 steps of 0.30 +
// 0.53 * 0.97 us: 208, and 3 for the chunk and 10 to write W: 221 us, so all 4096 rows are expanded. Up to 512 tokens
// no chunk wins on 78 SMs or more, whatever N and K; on fewer the model says so for some, unmeasured.
int choose_expand_rows(const GemmProblem& p, const GemmPlan& plan) {
  constexpr double step_us = 0.97, mixed_step_us = 1.2, idle_us = 0.30, busy_us = 0.53, bytes_us = 3.5e6, chunk_us = 3;
  if (w4_exact(plan.operand) || !p.aligned_all || p.gated || plan.splits > 1 || p.m <= 512 || p.n == 0) return 0;
  constexpr std::int64_t pair = 2 * w4_expand_tile.rows;  // rows of W of a cluster
  const std::int64_t most = w4_expand_bytes / (2 * p.k) / pair * pair, m_tiles = divide_up(p.m, w4_expand_tile.tokens),
                     sms = std::max(p.sms, 1);
  if (most == 0) return 0;
  const double all_steps = static_cast<double>(steps_of(p));
  const std::int64_t all_tiles = cluster_tiles(plan) * plan.m_blocks, clusters = sms / plan.cluster;
  const double waves = plan.stream_k_ranges > 0 ? static_cast<double>(all_tiles) / static_cast<double>(clusters)
                                                : static_cast<double>(divide_up(all_tiles, clusters));
  double least = waves * all_steps *
                 ((p.dtype == DType::bf16) == (plan.operand == W4Operand::bf16_scales) ? step_us : mixed_step_us);

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

void plan_stream(const GemmProblem& p, GemmPlan& plan) {
  plan.path = GemmPath::codes_stream;
  plan.config = config_for(std::min<std::int64_t>(p.m, w4_stream_block_m));
  plan.splits = choose_split_k(p, plan.config);
  if (p.m <= w4_cluster_tokens && splits_are_clusters(p, plan.splits, divide_up(w4_tiles_n(p.n), w4_warps)))
    plan.cluster = plan.splits;
  plan.why = p.batch_invariant  ? "the same split-K at every M, as batch_invariant asks"
             : plan.cluster > 1 ? "split-K within clusters: the blocks of N alone would not fill the device evenly"
             : plan.splits > 1  ? "split-K: the blocks of N alone would not fill the device evenly"
                                : "no split-K: the blocks of N fill the device, or splitting would cost more";
}

// Whether the choices of a plan fit the problem.
bool stream_fits(PlanCheck& check, const GemmProblem& p, const GemmPlan& plan) {
  const std::int64_t max_tokens = std::min<std::int64_t>(p.m, w4_stream_block_m),
                     ctas = divide_up(w4_tiles_n(p.n), w4_warps) *
                            (p.batch_invariant ? 1 : divide_up(p.m, w4_stream_block_m));
  return check.range("config", plan.config, 0, w4_stream_last) &&
         check.range("config", plan.config, config_for(max_tokens), w4_stream_last) &&
         check.range("splits", plan.splits, 1, max_splits) &&
         check.need(splits_evenly(steps_of(p), plan.splits, 2), "splits must give each split at least 2 of the ",
                    steps_of(p), " steps of K, got ", plan.splits) &&
         check.need(plan.splits == 1 || ctas * plan.splits <= 2 * std::max(p.sms, 1), "splits must leave ", ctas,
                    " work tiles x splits at ", 2 * std::max(p.sms, 1), " CTAs, got ", plan.splits) &&
         check.need(!p.batch_invariant || plan.splits == choose_split_k(p, plan.config), "splits must be ",
                    choose_split_k(p, config_for(16)), ", as batch_invariant asks, got ", plan.splits) &&
         check.need(plan.cluster == 1 || (plan.cluster == plan.splits && plan.cluster <= w4_max_cluster && p.hopper &&
                                          !separate_gates(p) && p.m <= w4_cluster_tokens &&
                                          plan.config <= config_for(w4_cluster_tokens)),
                    "cluster must be 1, or on Hopper as many as splits, at most ", w4_max_cluster,
                    ", with config at most 1 for up to ", w4_cluster_tokens, " tokens, got ", plan.cluster);
}

bool wgmma_fits(PlanCheck& check, const GemmProblem& p, const GemmPlan& plan) {
  if (!(check.need(
            p.hopper && !p.batch_invariant && !separate_gates(p),
            "path must not be wgmma, which needs Hopper, no batch_invariant, and of gated weights N / 2 that is a "
            "multiple of 16") &&
        check.range("config", plan.config, 0, w4_wgmma_last) &&
        check.range("cluster", plan.cluster, 1, p.sms > 1 ? 2 : 1) &&
        check.range("splits", plan.splits, 1, max_splits) && check.range("m_group", plan.m_group, 1, max_m_group)))
    return false;
  const W4WgmmaConfig f = w4_wgmma_config(p.bits, plan.config);
  GemmPlan whole = plan;  // what follows from the choices above alone
  whole.stream_k_ranges = whole.expand_rows = 0;
  complete_codes(p, whole);
  const std::int64_t work_tiles = whole.n_blocks * divide_up(p.m, f.tokens), ctas = std::max(p.sms, 1) * f.ctas_per_sm,
                     tiles = cluster_tiles(whole);
  constexpr std::int64_t pair = 2 * w4_expand_tile.rows;
  return check.need(whole.n_blocks % plan.cluster == 0, "cluster must divide the ", whole.n_blocks,
                    " blocks of N, got ", plan.cluster) &&
         check.need(splits_evenly(steps_of(p), plan.splits, 2), "splits must give each split at least 2 of the ",
                    steps_of(p), " steps of K, got ", plan.splits) &&
         check.need(plan.splits == 1 || work_tiles * plan.splits <= ctas, "splits must leave ", work_tiles,
                    " work tiles x splits at ", ctas, " CTAs, got ", plan.splits) &&
         check.need(plan.stream_k_ranges == 0 ||
                        (w4_stream_k(f) && plan.splits == 1 && whole.m_blocks > 0 && whole.m_blocks <= max_m_group &&
                         tiles * steps_of(p) < std::int64_t{1} << 31),
                    "stream_k_ranges must be 0 with config=0, with splits, or with no or more than ", max_m_group,
                    " blocks of tokens, got ", plan.stream_k_ranges) &&
         (plan.stream_k_ranges == 0 || check.range("stream_k_ranges", plan.stream_k_ranges, 0,
                                                   std::min(tiles, resident_clusters(p, whole) / whole.m_blocks))) &&
         check.need(
             plan.expand_rows == 0 || (p.aligned_all && !p.gated && !w4_exact(whole.operand) && plan.splits == 1 &&
                                       plan.stream_k_ranges == 0 && p.m > linear_tma_max_tokens),
             "expand_rows must be 0 unless the weight has minima or groups of 32 or 64, rows are whole 16-byte "
             "vectors, there are more than ",
             linear_tma_max_tokens, " tokens, no gate, no splits and no stream-K, got ", plan.expand_rows) &&
         (plan.expand_rows == 0 || (check.range("expand_rows", plan.expand_rows, pair, w4_expand_bytes / (2 * p.k)) &&
                                    check.need(plan.expand_rows % pair == 0, "expand_rows must be a multiple of ", pair,
                                               ", got ", plan.expand_rows)));
}

}  // namespace

void complete_codes(const GemmProblem& p, GemmPlan& plan) {
  const bool wgmma = plan.path == GemmPath::codes_wgmma;
  plan.scale_k = std::min(p.group, 128);
  if (p.group == p.k && plan.scale_k != 32 && plan.scale_k != 64) plan.scale_k = 128;
  if (p.gated && !separate_gates(p)) plan.gate_tiles = p.n / 2 / w4_tile_n;
  plan.split_steps = static_cast<int>(divide_up(steps_of(p), plan.splits));
  plan.separate_epilogue = separate_gates(p) || (plan.splits > 1 && (wgmma || plan.cluster == 1));
  if (wgmma) complete_wgmma(p, plan);
  else complete_stream(p, plan);
  if (plan.expand_rows > 0) {
    plan.workspace_bytes = 2 * static_cast<std::size_t>(std::min<std::int64_t>(plan.expand_rows, p.n) * p.k);
    return;
  }
  plan.workspace_bytes = plan.semaphore_bytes + plan.fixup_bytes + plan.gathered_bytes;
  plan.workspace_bytes += partial_bytes(p, plan);
}

bool codes_fit(PlanCheck& check, const GemmProblem& p, const GemmPlan& plan) {
  switch (plan.path) {
    case GemmPath::codes_stream:
      return stream_fits(check, p, plan);
    case GemmPath::codes_wgmma:
      return wgmma_fits(check, p, plan);
    default:
      return check.need(false, "path must be stream or wgmma");
  }
}

void choose_codes(const GemmProblem& p, GemmPlan& plan) {
  if (p.hopper && p.m > w4_stream_max_m && !p.batch_invariant && !separate_gates(p)) {
    plan_wgmma(p, plan);
    plan.expand_rows = choose_expand_rows(p, plan);
    if (plan.expand_rows > 0) plan.stream_k_ranges = 0;
    plan.why = plan.expand_rows > 0
                   ? "W expanded to 16 bits, a chunk of rows at a time: many tokens share the cost of dequantising"
               : plan.splits > 1 ? "wgmma, split-K to fill the device"
               : plan.stream_k_ranges > 0
                   ? "wgmma, stream-K: whole work tiles would leave part of the device idle in the last wave"
                   : "wgmma";
  } else {
    plan_stream(p, plan);
  }
}

}  // namespace rooftile::gpu
