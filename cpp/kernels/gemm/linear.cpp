// SPDX-License-Identifier: Apache-2.0
// The op linear: a product with W in 16 bits.
#include <bit>

#include "kernels/backend.h"
#include "kernels/gemm/dispatch.h"
#include "kernels/gemm/params.h"
#include "kernels/gemm/split_k.h"
#include "kernels/launch.h"
#include "kernels/tensor_map.h"

namespace rooftile::gpu {
namespace {

constexpr const char* op_name = "linear";

// What the kernels of every path receive; tma's tensor maps are not set.
TmaParams params_of(const LinearArgs& a, const GemmPlan& plan, float* partial) {
  TmaParams p{{GemmParams(a.x, a.y, a.bias, a.residual, a.activation)}};
  p.w = a.w.data;
  p.w_stride = a.w.stride[0];
  p.w_last_stride = a.w.stride[1];
  p.x_stride = p.x.ndim > 0 ? p.x.stride[0] : a.x.last();
  p.k = a.w.shape[1];
  p.tokens = a.x.rows();
  p.splits = plan.splits;
  p.partial = partial;
  if (plan.m_blocks > 0) p.by_m_blocks = Divisor(static_cast<int>(plan.m_blocks));
  if (plan.n_blocks > 0) p.by_n_blocks = Divisor(static_cast<int>(plan.n_blocks));
  const int step_k = plan.path == GemmPath::tma ? linear_tma_step_k : linear_step_k;
  p.steps = static_cast<int>((p.k + step_k - 1) / step_k);
  p.split_steps = plan.split_steps;
  p.row_tiles = plan.row_tiles;
  p.slices_log2 = plan.slices_log2;
  return p;
}

}  // namespace

void run_linear(const DeviceScope& scope, const LinearArgs& a, const GemmProblem& problem, const GemmPlan& plan,
                float* partial) {
  TmaParams p = params_of(a, plan, partial);
  if (plan.path == GemmPath::tma) {
    p.rows = plan.tma_rows;
    p.stages = plan.stages;
    p.cluster_log2 = std::countr_zero(static_cast<unsigned>(plan.cluster));
    p.w_map = rows_map(scope.op(), p.w, problem.dtype, {.rows = p.n, .columns = p.k, .stride = p.w_stride},
                       plan.tma_rows, linear_tma_tile_k);
    p.x_map = rows_map(scope.op(), p.x.data, problem.dtype, {.rows = p.tokens, .columns = p.k, .stride = p.x_stride},
                       linear_tma_block_m[plan.config], linear_tma_tile_k);
  }
  launch_variant(scope, plan, problem, plan.m_blocks * plan.n_blocks * plan.splits * plan.cluster, p);
  if (plan.separate_epilogue) split_k_epilogue(scope, p, problem.dtype);
}

std::size_t linear_workspace(const Context& ctx, const LinearArgs& a) {
  const DeviceScope scope(op_name, ctx);
  return plan_gemm(op_name, problem_of(a, scope.sms(), scope.has_wgmma()), ctx.variant).workspace_bytes;
}

KernelName linear(const Context& ctx, const LinearArgs& a) {
  DeviceScope scope(op_name, ctx);
  const GemmProblem problem = problem_of(a, scope.sms(), scope.has_wgmma());
  const GemmPlan plan = plan_gemm(op_name, problem, ctx.variant);
  const bool dense = a.w.stride[1] == 1 && a.w.stride[0] == a.w.shape[1];
  if (dense && plan.m_blocks == 1 && (plan.path == GemmPath::stream || plan.path == GemmPath::tma))
    scope.reads_once(a.w.data, static_cast<std::size_t>(a.w.numel()) * 2);
  if (a.y.numel() > 0)
    run_linear(scope, a, problem, plan, reinterpret_cast<float*>(workspace_of(op_name, ctx, plan.workspace_bytes)));
  return kernel_of(plan, problem);
}

}  // namespace rooftile::gpu
