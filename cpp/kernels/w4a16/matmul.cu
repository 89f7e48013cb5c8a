// SPDX-License-Identifier: Apache-2.0
// The one place that launches the 4-bit product.
#include <algorithm>
#include <bit>
#include <cstdio>

#include "core/w4_layout.h"
#include "kernels/backend.h"
#include "kernels/launch.h"
#include "kernels/products/finish.h"
#include "kernels/tensor_map.h"
#include "kernels/warmup.h"
#include "kernels/w4a16/params.h"
#include "rooftile/error.h"

namespace rooftile::gpu {
namespace {

constexpr const char* op_name = "w4a16_matmul";

W4Kernel stream_kernel(bool is_half, int form, int span, W4Zeros zeros) {
  return is_half ? w4a16_stream_half(form, span, zeros) : w4a16_stream_bf16(form, span, zeros);
}

// Every row of x is whole pieces of 16 bytes that start at multiples of them, and rows lie evenly.
bool in_pieces(const W4MatmulArgs& a) {
  bool even = reinterpret_cast<std::uintptr_t>(a.x.data) % 16 == 0 && a.x.last() % 8 == 0;
  for (int i = 0; i + 1 < a.x.ndim; ++i) even &= a.x.shape[i] == 1 || a.x.stride[i] % 8 == 0;
  return even && a.x.last_stride() == 1 && !a.w->perm && Rows(a.x).ndim <= 1;
}

W4Plan plan_of(const DeviceScope& scope, const W4MatmulArgs& a) {
  const Rows x(a.x);
  const bool tiles = scope.has_wgmma() && in_pieces(a) && a.w->zeros != W4Zeros::minima && (x.ndim == 0 || x.stride[0] > 0);
  return plan_w4a16({.m = a.x.rows(), .n = a.w->n, .k = a.w->k, .group = a.w->group, .sms = scope.sms(),
                     .batch_invariant = a.batch_invariant, .tiles = tiles});
}

}  // namespace

std::size_t w4a16_workspace(const Context& ctx, const W4MatmulArgs& a) {
  const DeviceScope scope(op_name, ctx);
  return plan_of(scope, a).workspace_bytes;
}

KernelName w4a16_matmul(const Context& ctx, const W4MatmulArgs& a) {
  const DeviceScope scope(op_name, ctx);
  const W4View& w = *a.w;
  const W4Plan plan = plan_of(scope, a);
  KernelName kernel;
  std::snprintf(kernel.text, sizeof kernel.text, "cuda_%s_w4g%d_%s_%s%d_split%d", name(a.x.dtype), w.group, name(w.zeros), plan.tiles ? "tile" : "t",
                plan.tiles ? w4_tiles_forms[plan.form].tokens : 8 * w4_forms[plan.form].token_tiles, plan.splits);
  if (a.y.numel() == 0) return kernel;
  ROOFTILE_CHECK(ctx.workspace_bytes >= plan.workspace_bytes, op_name, ": workspace must have ", plan.workspace_bytes,
                 " bytes for this product, got ", ctx.workspace_bytes);
  ROOFTILE_CHECK(plan.workspace_bytes == 0 || reinterpret_cast<std::uintptr_t>(ctx.workspace) % 16 == 0, op_name,
                 ": workspace is not aligned to 16 bytes");

  W4MatmulParams p{Product(a.x, a.y, a.bias, a.residual, a.activation)};
  p.x_in_pieces = in_pieces(a);
  p.x_stride = p.x.ndim > 0 ? p.x.stride[0] : 0;
  p.w = w;
  p.groups = static_cast<int>(w.k / w.group);
  p.row_blocks = static_cast<unsigned>(plan.row_blocks);
  p.k = static_cast<int>(w.k);
  p.group = w.group;
  p.span = plan.span;
  p.span_shift = plan.span == 128 ? 2 : plan.span == 64 ? 1 : 0;
  p.splits = plan.splits;
  p.steps = static_cast<int>((w4_tiles_k(w.k) + 1) / 2);
  p.chunk_steps = plan.chunk_steps;
  p.x_rows = plan.x_rows;
  p.partial = static_cast<float*>(ctx.workspace);

  const std::int64_t m = a.x.rows();
  const bool is_half = a.x.dtype == DType::f16;
  if (plan.tiles) {
    const W4TilesForm f = w4_tiles_forms[plan.form];
    W4TilesParams tiles{.product = p, .x = {}, .cluster_shift = std::countr_zero(static_cast<unsigned>(plan.cluster)),
                        .token_group = static_cast<unsigned>(plan.token_group)};
    tiles.product.tokens = m;
    tiles.product.token_blocks = static_cast<unsigned>(plan.token_blocks);
    const MatrixShape x{.rows = m, .columns = w.k, .stride = p.x.ndim > 0 ? p.x_stride : w.k};
    tiles.x = rows_map(op_name, a.x.data, a.x.dtype, x, f.tokens / plan.cluster, 64);
    scope.launch(is_half ? w4a16_tiles_half(plan.form, plan.span) : w4a16_tiles_bf16(plan.form, plan.span),
                 plan.token_blocks * plan.row_blocks * plan.splits, f.threads(), plan.shared_bytes, tiles, Overlap::with_previous, plan.cluster);
    if (p.splits > 1) finish_product(scope, tiles.product, a.x.dtype);
    return kernel;
  }
  for (std::int64_t first = 0; first < m; first += plan.launch_tokens) {
    p.first_token = first;
    p.tokens = std::min(plan.launch_tokens, m - first);
    p.token_blocks = static_cast<unsigned>((p.tokens + w4_tokens - 1) / w4_tokens);
    scope.launch(stream_kernel(is_half, plan.form, plan.span, w.zeros), std::int64_t{p.token_blocks} * p.row_blocks * p.splits,
                 w4_warps * 32, plan.shared_bytes, p);
    if (p.splits > 1) finish_product(scope, p, a.x.dtype);
  }
  return kernel;
}

void load_w4a16_kernels(const char* op) {
  for (int form = 0; form < 4; ++form)
    for (int span : {64, 128})
      for (W4Zeros zeros : {W4Zeros::symmetric, W4Zeros::minima}) {
        load_kernel(op, w4a16_stream_half(form, span, zeros));
        load_kernel(op, w4a16_stream_bf16(form, span, zeros));
      }
  for (int form = 0; form < 3; ++form)
    for (int span : {32, 64, 128}) {
      load_kernel(op, w4a16_tiles_half(form, span));
      load_kernel(op, w4a16_tiles_bf16(form, span));
    }
}

}  // namespace rooftile::gpu
