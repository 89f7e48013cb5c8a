// SPDX-License-Identifier: Apache-2.0
// The ops w4a16_matmul and w8a16_matmul: a product with W in 4 or 8 bits.
#include <algorithm>
#include <atomic>
#include <bit>

#include "core/w4_layout.h"
#include "kernels/backend.h"
#include "kernels/gemm/dispatch.h"
#include "kernels/gemm/params.h"
#include "kernels/gemm/prepare.h"
#include "kernels/gemm/split_k.h"
#include "kernels/launch.h"
#include "kernels/tensor_map.h"

namespace rooftile::gpu {
namespace {

// Unique per launch, so a stale semaphore from an earlier launch or uninitialised memory cannot match.
std::uint64_t new_semaphore_value() {
  static std::atomic<std::uint64_t> launches{0};
  return ++launches * 0x9e3779b97f4a7c15;  // an odd factor: all values are different and not 0
}

// Sets what wgmma_codes.cuh receives besides the product of one launch, after gathering x where TMA cannot load it.
// Returns the number of CTAs.
std::int64_t prepare_wgmma(const DeviceScope& scope, std::byte* workspace, const W4MatmulArgs& a, const GemmPlan& plan,
                           WgmmaParams& p) {
  const W4WgmmaConfig f = w4_wgmma_config(a.w->bits, plan.config);
  const unsigned cluster_tiles = p.n_blocks / static_cast<unsigned>(plan.cluster);
  p.m_group = static_cast<unsigned>(plan.m_group);
  p.by_tiles = Divisor(static_cast<int>(cluster_tiles * p.m_blocks));
  p.by_steps = Divisor(p.steps);
  // one token has no stride, and TMA wants one
  MatrixShape x{.rows = p.tokens, .columns = p.k, .stride = p.x.ndim > 0 ? p.x_stride : p.k};
  const void* from = static_cast<const std::uint16_t*>(a.x.data) + p.first_token * p.x_stride;
  if (plan.gathered_bytes > 0) {
    auto* const gathered = workspace_at<std::uint16_t>(workspace, plan.workspace_bytes - plan.gathered_bytes);
    gather_x(scope, plan, p, gathered);
    from = gathered;
    x.stride = w4_padded_k(p.k);
  }
  p.x_map = rows_map(scope.op(), from, a.x.dtype, x, f.tokens / plan.cluster, w4_wgmma_x_tile_k);
  if (plan.stream_k_ranges == 0)  // persistent CTAs: as many as are resident at once, whole clusters
    return std::min(std::int64_t{p.m_blocks} * p.n_blocks * p.splits,
                    std::int64_t{scope.sms()} * f.ctas_per_sm / plan.cluster * plan.cluster);
  const unsigned steps = cluster_tiles * static_cast<unsigned>(p.steps);
  p.ranges = static_cast<unsigned>(plan.stream_k_ranges);
  p.range_steps = steps / p.ranges;
  p.longer_ranges = steps % p.ranges;
  p.semaphores = workspace_at<std::uint64_t>(workspace, 0);
  p.fixup_sums = workspace_at<float>(workspace, plan.semaphore_bytes);
  p.semaphore_value = new_semaphore_value();
  return std::int64_t{plan.stream_k_ranges} * p.m_blocks * plan.cluster;
}

// Expands a chunk of W's rows to 16 bits, multiplies it by the 16-bit product's kernel, and goes on with the next
// chunk.
void launch_expanded(const DeviceScope& scope, std::byte* workspace, const W4MatmulArgs& a, const GemmPlan& plan) {
  const W4View& w = *a.w;
  const int steps = static_cast<int>((w4_tiles_k(w.k) + 1) / 2);
  ExpandParams expand{.w = w,
                      .to = workspace,
                      .k_tiles = static_cast<unsigned>(w4_tiles_k(w.k)),
                      .k = static_cast<int>(w.k),
                      .groups = static_cast<int>(w.k / w.group),
                      .group_shift = w.group == w.k ? 31 : std::countr_zero(static_cast<unsigned>(w.group)) - 5,
                      .by_steps = Divisor(steps)};
  // Elements [first, first + count) of the last dimension.
  const auto columns = [](TensorView t, std::int64_t first, std::int64_t count) {
    if (!t.given()) return t;
    t.data = static_cast<std::uint16_t*>(t.data) + first;
    t.shape[t.ndim - 1] = count;
    return t;
  };
  for (std::int64_t first = 0; first < w.n; first += plan.expand_rows) {
    const std::int64_t rows = std::min<std::int64_t>(plan.expand_rows, w.n - first);
    expand.first_tile_row = first / w4_tile_n;
    expand.rows = static_cast<int>(rows);
    expand.tile_rows = static_cast<unsigned>(w4_tiles_n(rows));
    expand_rows(scope, expand, a.x.dtype);
    TensorView rows_of_w{.data = workspace, .dtype = a.x.dtype, .device = a.x.device, .ndim = 2};
    rows_of_w.shape[0] = rows, rows_of_w.shape[1] = rows_of_w.stride[0] = w.k, rows_of_w.stride[1] = 1;
    const LinearArgs args{.x = a.x,
                          .w = rows_of_w,
                          .y = columns(a.y, first, rows),
                          .bias = columns(a.bias, first, rows),
                          .residual = columns(a.residual, first, rows),
                          .activation = a.activation};
    const GemmProblem problem = problem_of(args, scope.sms(), scope.has_wgmma());
    GemmPlan plan_of_rows = plan_gemm(problem);
    plan_of_rows.splits = 1;  // the workspace holds W
    plan_of_rows.separate_epilogue = false;
    run_linear(scope, args, problem, plan_of_rows, nullptr);
  }
}

}  // namespace

std::size_t w4a16_workspace(const char* op, const Context& ctx, const W4MatmulArgs& a) {
  const DeviceScope scope(op, ctx);
  const auto bytes = [&](bool fits_linear) {
    return plan_gemm(op, problem_of(a, scope.sms(), scope.has_wgmma(), fits_linear), ctx.variant).workspace_bytes;
  };
  return ctx.variant ? bytes(true) : std::max(bytes(true), bytes(false));  // y and residual are not known yet
}

KernelName w4a16_matmul(const char* op, const Context& ctx, const W4MatmulArgs& a) {
  DeviceScope scope(op, ctx);
  const W4View& w = *a.w;
  const GemmProblem problem = problem_of(a, scope.sms(), scope.has_wgmma());
  const GemmPlan plan = plan_gemm(op, problem, ctx.variant);
  const bool wgmma = plan.path == GemmPath::codes_wgmma;
  const KernelName kernel = kernel_of(plan, problem);
  if (a.y.numel() == 0) return kernel;
  std::byte* const workspace = workspace_of(op, ctx, plan.workspace_bytes);
  if (plan.expand_rows > 0) {
    launch_expanded(scope, workspace, a, plan);
    return kernel;
  }

  WgmmaParams p{{GemmParams(a.x, a.y, a.bias, a.residual, a.activation, a.gated)}};
  p.x_in_vec16 = problem.vec;
  p.x_stride = p.x.ndim > 0 ? p.x.stride[0] : 0;
  p.w = w;
  p.groups = static_cast<int>(w.k / w.group);
  p.tile_rows = static_cast<int>(w4_tiles_n(w.n));
  p.k_tiles = static_cast<int>(w4_tiles_k(w.k));
  p.gate_tiles = static_cast<int>(plan.gate_tiles);
  p.n_blocks = static_cast<unsigned>(plan.n_blocks);
  p.by_n_blocks = Divisor(static_cast<int>(plan.n_blocks));
  p.k = static_cast<int>(w.k);
  p.group = w.group;
  p.scale_k = plan.scale_k;
  p.scale_k_shift = plan.scale_k == 128 ? 2 : plan.scale_k == 64 ? 1 : 0;
  p.splits = plan.splits;
  p.steps = static_cast<int>((w4_tiles_k(w.k) + 1) / 2);
  p.split_steps = plan.split_steps;
  p.cluster = plan.cluster;
  p.cluster_shift = wgmma ? std::countr_zero(static_cast<unsigned>(plan.cluster)) : 0;
  p.x_tile_tokens = plan.x_tile_tokens;
  p.sums_offset = plan.sums_offset;
  p.partial = plan.separate_epilogue ? reinterpret_cast<float*>(workspace) : nullptr;

  const std::int64_t m = a.x.rows();
  if (plan.m_blocks == 1 && plan.launch_tokens >= m)  // reads each weight once
    scope.reads_once(w.codes, static_cast<std::size_t>(w4_tiles_n(w.n) * w4_tiles_k(w.k) * w4_tile_bytes(w.bits)));
  const int tokens_per_cta = wgmma ? w4_wgmma_config(w.bits, plan.config).tokens : w4_stream_block_m;
  for (std::int64_t first = 0; first < m; first += plan.launch_tokens) {
    p.first_token = first;
    p.tokens = std::min(plan.launch_tokens, m - first);
    p.m_blocks = static_cast<unsigned>((p.tokens + tokens_per_cta - 1) / tokens_per_cta);
    p.by_m_blocks = Divisor(static_cast<int>(p.m_blocks));
    const std::int64_t ctas =
        wgmma ? prepare_wgmma(scope, workspace, a, plan, p) : std::int64_t{p.m_blocks} * p.n_blocks * p.splits;
    launch_variant(scope, plan, problem, ctas, p);
    if (plan.separate_epilogue) split_k_epilogue(scope, p, a.x.dtype);
  }
  return kernel;
}

}  // namespace rooftile::gpu
