// SPDX-License-Identifier: Apache-2.0
// The one place that launches a product with a weight of 4 or 8 bits.
#include <algorithm>
#include <atomic>
#include <bit>

#include "core/w4_layout.h"
#include "kernels/backend.h"
#include "kernels/launch.h"
#include "kernels/gemm/params.h"
#include "kernels/gemm/split_k.h"
#include "kernels/tensor_map.h"
#include "kernels/warmup.h"
#include "kernels/gemm/expand.cuh"
#include "kernels/gemm/gather_x.cuh"
#include "rooftile/error.h"

namespace rooftile::gpu {
namespace {

W4Kernel stream_kernel(bool is_half, int bits, const W4StreamVariant& v) {
  if (bits == 8) return is_half ? w8a16_stream_half(v) : w8a16_stream_bf16(v);
  return is_half ? w4a16_stream_half(v) : w4a16_stream_bf16(v);
}

W4WgmmaKernel wgmma_kernel(bool is_half, int bits, int config, W4Operand operand) {
  if (bits == 8) return is_half ? w8a16_wgmma_half(config, operand) : w8a16_wgmma_bf16(config, operand);
  return is_half ? w4a16_wgmma_half(config, operand) : w4a16_wgmma_bf16(config, operand);
}

// Unique per launch, so a stale semaphore from an earlier launch or uninitialised memory cannot match.
std::uint64_t new_semaphore_value() {
  static std::atomic<std::uint64_t> launches{0};
  return ++launches * 0x9e3779b97f4a7c15;  // an odd factor: all values are different and not 0
}

// Runs wgmma.cuh on the tokens of one launch, after gather_x.cuh where x has to be gathered.
void launch_wgmma(const char* op, const DeviceScope& scope, std::byte* workspace, const W4MatmulArgs& a,
                  const GemmPlan& plan, const CodesParams& p) {
  const W4WgmmaConfig f = w4_wgmma_config(a.w->bits, plan.config);
  const bool is_half = a.x.dtype == DType::f16;
  const unsigned cluster_tiles = p.n_blocks / static_cast<unsigned>(plan.cluster);
  WgmmaParams params{.product = p,
                     .x = {},
                     .m_group = static_cast<unsigned>(plan.m_group),
                     .by_tiles = Divisor(static_cast<int>(cluster_tiles * p.m_blocks)),
                     .by_steps = Divisor(p.steps)};
  // one token has no stride, and TMA wants one
  MatrixShape x{.rows = p.tokens, .columns = p.k, .stride = p.x.ndim > 0 ? p.x_stride : p.k};
  const void* from = static_cast<const std::uint16_t*>(a.x.data) + p.first_token * p.x_stride;
  if (plan.gathered_bytes > 0) {
    // where several CTAs gather a token, gathering from global memory is faster
    const std::size_t row_bytes =
        p.w.perm && plan.gather_ctas == 1 && p.k <= w4_gather_row_bytes / 2 ? 2 * static_cast<std::size_t>(p.k) : 0;
    GatherParams gather{
        .product = p, .row_in_smem = row_bytes > 0, .ctas_per_token = static_cast<unsigned>(plan.gather_ctas)};
    from = gather.to = reinterpret_cast<std::uint16_t*>(workspace + plan.workspace_bytes - plan.gathered_bytes);
    x.stride = w4_padded_k(p.k);
    scope.launch(w4a16_gather_x, p.tokens * plan.gather_ctas, w4_gather_threads, row_bytes, gather,
                 Overlap::with_previous);
  }
  params.x = rows_map(op, from, a.x.dtype, x, f.tokens / plan.cluster, w4_wgmma_x_tile_k);
  // persistent CTAs: as many as are resident at once, whole clusters
  std::int64_t ctas = std::min(std::int64_t{p.m_blocks} * p.n_blocks * p.splits,
                               std::int64_t{scope.sms()} * f.ctas_per_sm / plan.cluster * plan.cluster);
  if (plan.stream_k_ranges > 0) {
    ctas = std::int64_t{plan.stream_k_ranges} * p.m_blocks * plan.cluster;
    const unsigned steps = cluster_tiles * static_cast<unsigned>(p.steps);
    params.ranges = static_cast<unsigned>(plan.stream_k_ranges);
    params.range_steps = steps / params.ranges;
    params.longer_ranges = steps % params.ranges;
    params.semaphores = reinterpret_cast<std::uint64_t*>(workspace);
    params.fixup_sums = reinterpret_cast<float*>(workspace + plan.semaphore_bytes);
    params.semaphore_value = new_semaphore_value();
  }
  scope.launch(wgmma_kernel(is_half, a.w->bits, plan.config, plan.operand), ctas, f.threads(), plan.shared_bytes,
               params, Overlap::with_previous, plan.cluster);
}

template <class T, int bits>
auto expand_kernel(bool bf16_scales) {
  return bf16_scales ? w4a16_expand<T, bits, tile::bf16> : w4a16_expand<T, bits, tile::half>;
}
auto expand_kernel(bool is_half, int bits, bool bf16_scales) {
  if (bits == 8) return is_half ? expand_kernel<tile::half, 8>(bf16_scales) : expand_kernel<tile::bf16, 8>(bf16_scales);
  return is_half ? expand_kernel<tile::half, 4>(bf16_scales) : expand_kernel<tile::bf16, 4>(bf16_scales);
}

// Expands a chunk of W's rows to 16 bits, multiplies it by the 16-bit product's kernel, and goes on with the next
// chunk.
void launch_expanded(const DeviceScope& scope, std::byte* workspace, const W4MatmulArgs& a, const GemmPlan& plan) {
  const W4View& w = *a.w;
  const int steps = static_cast<int>((w4_tiles_k(w.k) + 1) / 2);
  ExpandParams expand{.w = w,
                      .to = workspace,
                      .row_tiles = static_cast<unsigned>(w4_tiles_k(w.k)),
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
    scope.launch(expand_kernel(a.x.dtype == DType::f16, w.bits, w.scale_dtype == DType::bf16),
                 (std::int64_t{expand.tile_rows} * steps + w4_expand_threads / 32 - 1) / (w4_expand_threads / 32),
                 w4_expand_threads, 0, expand, Overlap::with_previous);
    Bits16Params p{GemmParams(a.x, columns(a.y, first, rows), columns(a.bias, first, rows),
                              columns(a.residual, first, rows), a.activation)};
    p.w = workspace;
    p.w_stride = p.k = w.k;
    p.w_last_stride = 1;
    p.x_stride = p.x.ndim > 0 ? p.x.stride[0] : w.k;
    p.tokens = a.x.rows();
    // the config alone: K is not split, as the workspace holds W
    linear_collective(scope, p, a.x.dtype,
                      plan_gemm({.m = p.tokens,
                                 .n = rows,
                                 .k = w.k,
                                 .sms = scope.sms(),
                                 .hopper = true,
                                 .aligned_operands = true,
                                 .aligned_all = true})
                          .config);
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
  const DeviceScope scope(op, ctx);
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

  CodesParams p{GemmParams(a.x, a.y, a.bias, a.residual, a.activation, a.gated)};
  p.x_in_vec16 = problem.vec;
  p.x_stride = p.x.ndim > 0 ? p.x.stride[0] : 0;
  p.w = w;
  p.groups = static_cast<int>(w.k / w.group);
  p.tile_rows = static_cast<int>(w4_tiles_n(w.n));
  p.row_tiles = static_cast<int>(w4_tiles_k(w.k));
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
  p.cluster_shift = std::countr_zero(static_cast<unsigned>(plan.cluster));
  p.x_tile_tokens = plan.x_tile_tokens;
  p.sums_offset = plan.sums_offset;
  p.partial = plan.separate_epilogue ? reinterpret_cast<float*>(workspace) : nullptr;

  const std::int64_t m = a.x.rows();
  const bool is_half = a.x.dtype == DType::f16;
  const int tokens_per_cta = wgmma ? w4_wgmma_config(w.bits, plan.config).tokens : w4_stream_block_m;
  for (std::int64_t first = 0; first < m; first += plan.launch_tokens) {
    p.first_token = first;
    p.tokens = std::min(plan.launch_tokens, m - first);
    p.m_blocks = static_cast<unsigned>((p.tokens + tokens_per_cta - 1) / tokens_per_cta);
    p.by_m_blocks = Divisor(static_cast<int>(p.m_blocks));
    if (wgmma) launch_wgmma(op, scope, workspace, a, plan, p);
    else
      scope.launch(stream_kernel(is_half, w.bits, {plan.config, plan.scale_k, w.zeros, w.scale_dtype}),
                   std::int64_t{p.m_blocks} * p.n_blocks * p.splits, w4_warps * 32, plan.shared_bytes, p,
                   Overlap::with_previous, plan.cluster);
    if (plan.separate_epilogue) split_k_epilogue(scope, p, a.x.dtype);
  }
  return kernel;
}

void load_w4a16_kernels(const char* op) {
  for (const int bits : {4, 8})
    for (const W4Zeros zeros : {W4Zeros::symmetric, W4Zeros::integer, W4Zeros::minima}) {
      if (bits == 8 && zeros == W4Zeros::minima) continue;
      for (const bool is_half : {false, true})
        for (int config = 0; config < 4; ++config)
          for (const int scale_k : {64, 128})
            for (const DType scale_dtype : {DType::f16, DType::bf16})
              load_kernel(op, stream_kernel(is_half, bits, {config, scale_k, zeros, scale_dtype}));
    }
  for (const int bits : {4, 8})
    for (const bool is_half : {false, true})
      for (int config = 0; config < 3; ++config)
        for (const W4Operand operand : {W4Operand::codes, W4Operand::f16_scales, W4Operand::bf16_scales})
          load_kernel(op, wgmma_kernel(is_half, bits, config, operand));
  load_kernel(op, w4a16_gather_x);
  for (const int bits : {4, 8})
    for (const bool is_half : {false, true})
      for (const bool bf16_scales : {false, true}) load_kernel(op, expand_kernel(is_half, bits, bf16_scales));
}

}  // namespace rooftile::gpu
