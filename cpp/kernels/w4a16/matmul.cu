// SPDX-License-Identifier: Apache-2.0
// The compiled forms of the 4-bit product, and the one place that launches them.
#include <algorithm>
#include <cstdio>

#include "core/w4_layout.h"
#include "kernels/backend.h"
#include "kernels/launch.h"
#include "kernels/warmup.h"
#include "kernels/w4a16/matmul.cuh"
#include "rooftile/error.h"

namespace rooftile::gpu {
namespace {

constexpr const char* op_name = "w4a16_matmul";

W4Plan plan_of(const DeviceScope& scope, const W4MatmulArgs& a) {
  return plan_w4a16({.m = a.x.rows(), .n = a.w->n, .k = a.w->k, .group = a.w->group, .sms = scope.sms(),
                     .batch_invariant = a.batch_invariant});
}

using Kernel = void (*)(W4MatmulParams);

template <class T>
Kernel stream_kernel(int form) {
  switch (form) {
    case 0: return w4a16_stream<W4Config<T, 0, 2>>;
    case 1: return w4a16_stream<W4Config<T, 1, 2>>;
    case 2: return w4a16_stream<W4Config<T, 2, 1>>;
    default: return w4a16_stream<W4Config<T, 3, 1>>;
  }
}

// Two elements at a time: every row starts at 4 bytes.
bool in_pairs(const W4MatmulArgs& a) {
  bool even = reinterpret_cast<std::uintptr_t>(a.x.data) % 4 == 0;
  for (int i = 0; i + 1 < a.x.ndim; ++i) even &= a.x.shape[i] == 1 || a.x.stride[i] % 2 == 0;
  return even && a.x.last_stride() == 1 && !a.w->perm;
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
  std::snprintf(kernel.text, sizeof kernel.text, "cuda_%s_w4g%d_%s_t%d_split%d", name(a.x.dtype), w.group, name(w.zeros),
                8 * w4_forms[plan.form].token_tiles, plan.splits);
  if (a.y.numel() == 0) return kernel;
  ROOFTILE_CHECK(ctx.workspace_bytes >= plan.workspace_bytes, op_name, ": workspace must have ", plan.workspace_bytes,
                 " bytes for this product, got ", ctx.workspace_bytes);
  ROOFTILE_CHECK(plan.workspace_bytes == 0 || reinterpret_cast<std::uintptr_t>(ctx.workspace) % sizeof(float) == 0, op_name,
                 ": workspace is not aligned to 4 bytes");

  W4MatmulParams p;
  p.x = Rows(a.x);
  p.y = Rows(a.y);
  p.residual = Rows(a.residual);
  if (a.bias.given()) {
    p.bias = a.bias.data;
    p.bias_stride = a.bias.stride[0];
  }
  p.x_in_pairs = in_pairs(a);
  p.w = w;
  p.groups = static_cast<int>(w.k / w.group);
  p.activation = a.activation;
  p.row_blocks = plan.row_blocks;
  p.span = plan.span;
  p.splits = plan.splits;
  p.chunk_tiles = plan.chunk_tiles;
  p.panel_tiles = plan.panel_tiles;
  p.x_tokens = plan.x_tokens;
  p.partial = static_cast<float*>(ctx.workspace);

  const std::int64_t m = a.x.rows();
  const bool is_half = a.x.dtype == DType::f16;
  for (std::int64_t first = 0; first < m; first += plan.launch_tokens) {
    p.first_token = first;
    p.tokens = std::min(plan.launch_tokens, m - first);
    p.token_blocks = (p.tokens + w4_tokens - 1) / w4_tokens;
    scope.launch(is_half ? stream_kernel<tile::half>(plan.form) : stream_kernel<tile::bf16>(plan.form),
                 p.token_blocks * p.row_blocks * p.splits, w4_warps * 32, plan.shared_bytes, p);
    if (p.splits == 1) continue;
    scope.launch(is_half ? w4a16_finish<tile::half> : w4a16_finish<tile::bf16>,
                 (p.tokens * w.n + w4_finish_threads - 1) / w4_finish_threads, w4_finish_threads, 0, p);
  }
  return kernel;
}

void load_w4a16_kernels(const char* op) {
  for (int form = 0; form < 4; ++form) {
    load_kernel(op, stream_kernel<tile::half>(form));
    load_kernel(op, stream_kernel<tile::bf16>(form));
  }
  load_kernel(op, w4a16_finish<tile::half>);
  load_kernel(op, w4a16_finish<tile::bf16>);
}

}  // namespace rooftile::gpu
