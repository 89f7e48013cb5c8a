// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/plan.h"

#include <limits>

#include "core/kernel_name.h"
#include "core/op_args.h"
#include "kernels/gemm/plan_rules.h"
#include "kernels/gemm/rows.h"

namespace rooftile::gpu {
namespace {

using Choice = PlanChoice<GemmPlan>;
using Path = PlanPath<GemmPlan>;

constexpr Choice stream_choices[] = {{"config", &GemmPlan::config},
                                     {"row_tiles", &GemmPlan::row_tiles},
                                     {"slices_log2", &GemmPlan::slices_log2},
                                     {"splits", &GemmPlan::splits}};
constexpr Choice tma_choices[] = {{"config", &GemmPlan::config},
                                  {"tma_rows", &GemmPlan::tma_rows},
                                  {"cluster", &GemmPlan::cluster},
                                  {"stages", &GemmPlan::stages}};
constexpr Choice collective_choices[] = {{"config", &GemmPlan::config}, {"splits", &GemmPlan::splits}};
constexpr Choice codes_stream_choices[] = {
    {"config", &GemmPlan::config}, {"splits", &GemmPlan::splits}, {"cluster", &GemmPlan::cluster}};
constexpr Choice codes_wgmma_choices[] = {{"config", &GemmPlan::config},
                                          {"splits", &GemmPlan::splits},
                                          {"cluster", &GemmPlan::cluster},
                                          {"m_group", &GemmPlan::m_group},
                                          {"stream_k_ranges", &GemmPlan::stream_k_ranges},
                                          {"expand_rows", &GemmPlan::expand_rows}};
// In the order of GemmPath: the paths of W in 16 bits, then those of W in 4 or 8 bits.
constexpr Path paths[] = {{"stream", stream_choices},         {"tma", tma_choices},
                          {"collective", collective_choices}, {"multistage", {}},
                          {"stream", codes_stream_choices},   {"wgmma", codes_wgmma_choices}};
constexpr std::size_t first_codes_path = static_cast<std::size_t>(GemmPath::codes_stream);

const Path& path_of(const GemmPlan& plan) { return paths[static_cast<std::size_t>(plan.path)]; }

void choose(const GemmProblem& p, GemmPlan& plan) { (p.bits == 16 ? choose_bits16 : choose_codes)(p, plan); }
void complete(const GemmProblem& p, GemmPlan& plan) { (p.bits == 16 ? complete_bits16 : complete_codes)(p, plan); }
bool choices_fit(PlanCheck& check, const GemmProblem& p, const GemmPlan& plan) {
  return (p.bits == 16 ? bits16_fits : codes_fit)(check, p, plan);
}

}  // namespace

GemmProblem problem_of(const LinearArgs& a, int sms, bool hopper) {
  constexpr std::int64_t max_rows = std::numeric_limits<std::int32_t>::max();        // rows are counted in int
  constexpr std::int64_t max_n = 65535 * std::int64_t{linear_multistage_tile.rows};  // tiles of W are grid.y
  const bool sizes = a.x.rows() <= max_rows && a.w.shape[0] <= max_n,
             aligned_operands = sizes && is_tma_aligned(a.x) && is_tma_aligned(a.w);
  return {
      .m = a.x.rows(),
      .n = a.w.shape[0],
      .k = a.w.shape[1],
      .dtype = a.x.dtype,
      .sms = sms,
      .hopper = hopper,
      .vec = is_aligned(a.x, 8) && is_aligned(a.w, 8),
      .aligned_operands = aligned_operands,
      .aligned_all = aligned_operands && is_aligned(a.bias, 8) && is_tma_aligned(a.y) && is_tma_aligned(a.residual)};
}

GemmProblem problem_of(const W4MatmulArgs& a, int sms, bool hopper, bool aligned_outputs) {
  const bool aligned_operands = is_tma_aligned(a.x) && !a.w->perm;
  return {.m = a.x.rows(),
          .n = a.w->n,
          .k = a.w->k,
          .bits = a.w->bits,
          .group = a.w->group,
          .zeros = a.w->zeros,
          .scale_dtype = a.w->scale_dtype,
          .dtype = a.x.dtype,
          .sms = sms,
          .hopper = hopper,
          .gated = a.gated,
          .batch_invariant = a.batch_invariant,
          .vec = is_aligned(a.x, 8) && !a.w->perm,
          .aligned_operands = aligned_operands,
          .aligned_all = aligned_outputs && aligned_operands && is_tma_aligned(a.y) && is_tma_aligned(a.residual) &&
                         is_aligned(a.bias, 8)};
}

KernelName kernel_of(const GemmPlan& plan, const GemmProblem& p) {
  const auto linear = [&](auto... parts) { return kernel_name("cuda_", name(p.dtype), "_linear_", parts...); };
  const auto codes = [&](auto... parts) {
    return kernel_name("cuda_", name(p.dtype), "_w", p.bits, "g", p.group, "_", name(p.zeros), parts...);
  };
  switch (plan.path) {
    case GemmPath::stream:
      return linear("stream", plan.config == 0 ? 8 : 16, p.vec ? "_split" : "_strided_split", plan.splits);
    case GemmPath::tma:
      return linear("tma", linear_tma_block_m[plan.config], "_split", plan.cluster);
    case GemmPath::collective: {
      const LinearTile tile = linear_collective_tiles[plan.config];
      if (plan.splits > 1) return linear("tile", tile.rows, "x", tile.tokens, "_split", plan.splits);
      return linear("tile", tile.rows, "x", tile.tokens);
    }
    case GemmPath::multistage:
      return linear("multistage", linear_multistage_tile.rows, "x", linear_multistage_tile.tokens);
    case GemmPath::codes_stream:
      return codes("_t", 8 * w4_stream_config(p.bits, plan.config).n_tiles, "_split", plan.splits);
    case GemmPath::codes_wgmma: {
      const int tokens = w4_wgmma_config(p.bits, plan.config).tokens;
      if (plan.expand_rows > 0) return codes("_tile_expand", plan.expand_rows);
      if (plan.stream_k_ranges > 0) return codes("_tile", tokens, "_streamk", plan.stream_k_ranges);
      return codes("_tile", tokens, "_split", plan.splits);
    }
  }
  return {};
}

std::string text(const GemmPlan& plan) { return plan_text(path_of(plan), plan); }

std::string check_plan(const GemmProblem& p, const GemmPlan& plan) {
  PlanCheck check;
  if (!choices_fit(check, p, plan)) return check.wrong();
  GemmPlan right{.path = plan.path};
  for (const Choice& choice : path_of(plan).choices) right.*choice.value = plan.*choice.value;
  complete(p, right);
  const auto follows = [&](const char* field, auto GemmPlan::* member) {
    return check.follows(field, plan.*member, right.*member);
  };
  (void)(check.follows("operand", static_cast<int>(plan.operand), static_cast<int>(right.operand)) &&
         follows("scale_k", &GemmPlan::scale_k) && follows("separate_epilogue", &GemmPlan::separate_epilogue) &&
         follows("gate_tiles", &GemmPlan::gate_tiles) && follows("split_steps", &GemmPlan::split_steps) &&
         follows("x_tile_tokens", &GemmPlan::x_tile_tokens) && follows("sums_offset", &GemmPlan::sums_offset) &&
         follows("launch_tokens", &GemmPlan::launch_tokens) && follows("m_blocks", &GemmPlan::m_blocks) &&
         follows("n_blocks", &GemmPlan::n_blocks) && follows("threads", &GemmPlan::threads) &&
         follows("shared_bytes", &GemmPlan::shared_bytes) && follows("workspace_bytes", &GemmPlan::workspace_bytes) &&
         follows("semaphore_bytes", &GemmPlan::semaphore_bytes) && follows("fixup_bytes", &GemmPlan::fixup_bytes) &&
         follows("gathered_bytes", &GemmPlan::gathered_bytes) && follows("gather_ctas", &GemmPlan::gather_ctas));
  return check.wrong();
}

GemmPlan plan_gemm(const GemmProblem& p) {
  GemmPlan plan;
  choose(p, plan);
  complete(p, plan);
  return plan;
}

GemmPlan plan_gemm(const char* op, const GemmProblem& p, const char* forced) {
  if (!forced) return plan_gemm(p);
  const std::size_t first = p.bits == 16 ? 0 : first_codes_path,
                    end = p.bits == 16 ? first_codes_path : std::size(paths);
  GemmPlan plan;
  plan.path = static_cast<GemmPath>(
      first + read_plan<GemmPlan>(op, forced, std::span(paths).subspan(first, end - first), plan));
  require_fit(op, forced, [&](PlanCheck& check) { return choices_fit(check, p, plan); });
  complete(p, plan);
  plan.why = "forced by plan=";
  return plan;
}

}  // namespace rooftile::gpu
