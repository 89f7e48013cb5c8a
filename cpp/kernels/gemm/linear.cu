// SPDX-License-Identifier: Apache-2.0
// 16-bit products: plans a call, launches the stream kernel or hands over to the other three paths.
#include "kernels/backend.h"
#include "kernels/gemm/stream_bits16.cuh"
#include "kernels/gemm/split_k.h"
#include "kernels/warmup.h"
#include "rooftile/error.h"

namespace rooftile::gpu {
namespace {

constexpr const char* op_name = "linear";

template <class T>
auto stream_of(int config, bool vec) {
  if (config == 0) return vec ? linear_stream<LinearConfig<T, 1, true>> : linear_stream<LinearConfig<T, 1, false>>;
  return vec ? linear_stream<LinearConfig<T, 2, true>> : linear_stream<LinearConfig<T, 2, false>>;
}
auto stream_of(DType dtype, int config, bool vec) {
  return dtype == DType::f16 ? stream_of<tile::half>(config, vec) : stream_of<tile::bf16>(config, vec);
}

}  // namespace

std::size_t linear_workspace(const Context& ctx, const LinearArgs& a) {
  const DeviceScope scope(op_name, ctx);
  return plan_gemm(op_name, problem_of(a, scope.sms(), scope.has_wgmma()), ctx.variant).workspace_bytes;
}

KernelName linear(const Context& ctx, const LinearArgs& a) {
  const DeviceScope scope(op_name, ctx);
  const GemmProblem problem = problem_of(a, scope.sms(), scope.has_wgmma());
  const GemmPlan plan = plan_gemm(op_name, problem, ctx.variant);
  const KernelName kernel = kernel_of(plan, problem);
  if (a.y.numel() == 0) return kernel;

  Bits16Params p{GemmParams(a.x, a.y, a.bias, a.residual, a.activation)};
  p.w = a.w.data;
  p.w_stride = a.w.stride[0];
  p.w_last_stride = a.w.stride[1];
  p.x_stride = p.x.ndim > 0 ? p.x.stride[0] : a.x.last();
  p.k = a.w.shape[1];
  p.tokens = a.x.rows();
  p.splits = plan.splits;
  p.partial = reinterpret_cast<float*>(workspace_of(op_name, ctx, plan.workspace_bytes));
  if (plan.m_blocks > 0) p.by_m_blocks = Divisor(static_cast<int>(plan.m_blocks));
  if (plan.n_blocks > 0) p.by_n_blocks = Divisor(static_cast<int>(plan.n_blocks));
  const int step_k = plan.path == GemmPath::tma ? linear_tma_step_k : linear_step_k;
  p.steps = static_cast<int>((p.k + step_k - 1) / step_k);
  p.split_steps = plan.split_steps;
  if (plan.path == GemmPath::tma) {
    linear_tma(scope, p, a.x.dtype, plan);
    return kernel;
  }
  if (plan.path == GemmPath::collective) {
    linear_collective(scope, p, a.x.dtype, plan.config);
    if (p.splits > 1) split_k_epilogue(scope, p, a.x.dtype);
    return kernel;
  }
  if (plan.path == GemmPath::multistage) {
    linear_multistage(scope, p, a.x.dtype);
    return kernel;
  }
  p.row_tiles = plan.row_tiles;
  p.slices_log2 = plan.slices_log2;
  scope.launch(stream_of(a.x.dtype, plan.config, problem.vec), plan.m_blocks * plan.n_blocks * plan.splits,
               32 * (plan.row_tiles << plan.slices_log2), plan.shared_bytes, p, Overlap::with_previous);
  if (p.splits > 1) split_k_epilogue(scope, p, a.x.dtype);
  return kernel;
}

void load_linear_kernels(const char* op) {
  for (DType dtype : {DType::f16, DType::bf16})
    for (int config : {0, 1})
      for (bool vec : {true, false}) load_kernel(op, stream_of(dtype, config, vec));
  load_linear_tma(op);
  load_linear_collectives_half(op);
  load_linear_collectives_bf16(op);
  load_linear_multistage(op);
}

}  // namespace rooftile::gpu
