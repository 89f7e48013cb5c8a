// SPDX-License-Identifier: Apache-2.0
// The one place that launches a product with a weight of 4 or 8 bits.
#include <algorithm>
#include <atomic>
#include <bit>

#include "core/kernel_name.h"
#include "core/w4_layout.h"
#include "kernels/backend.h"
#include "kernels/launch.h"
#include "kernels/linear/params.h"
#include "kernels/products/finish.h"
#include "kernels/tensor_map.h"
#include "kernels/warmup.h"
#include "kernels/w4a16/expand.cuh"
#include "kernels/w4a16/prepare.cuh"
#include "rooftile/error.h"

namespace rooftile::gpu {
namespace {

W4Kernel stream_kernel(bool is_half, int bits, int form, int span, W4Zeros zeros) {
  if (bits == 8) return is_half ? w8a16_stream_half(form, span) : w8a16_stream_bf16(form, span);
  return is_half ? w4a16_stream_half(form, span, zeros) : w4a16_stream_bf16(form, span, zeros);
}

W4TilesKernel tiles_kernel(bool is_half, int bits, int form, W4Operand operand) {
  if (bits == 8) return is_half ? w8a16_tiles_half(form, operand) : w8a16_tiles_bf16(form, operand);
  return is_half ? w4a16_tiles_half(form, operand) : w4a16_tiles_bf16(form, operand);
}

bool in_order(const W4MatmulArgs& a) { return in_tiles(a.x) && !a.w->perm; }  // TMA can load x as it lies
bool in_linear_tiles(const W4MatmulArgs& a) {
  return in_order(a) && in_tiles(a.y) && in_tiles(a.residual) && bias_in_tiles(a.bias);
}

W4Plan plan_of(const DeviceScope& scope, const W4MatmulArgs& a, bool linear_tiles) {
  return plan_w4a16({.m = a.x.rows(),
                     .n = a.w->n,
                     .k = a.w->k,
                     .bits = a.w->bits,
                     .group = a.w->group,
                     .sms = scope.sms(),
                     .clusters = scope.largest_cluster() > 1,
                     .gated = a.gated,
                     .batch_invariant = a.batch_invariant,
                     .tiles = scope.has_wgmma(),
                     .copy_x = !in_order(a),
                     .minima = a.w->zeros == W4Zeros::minima,
                     .bf16_scales = a.w->scale_dtype == DType::bf16,
                     .bf16 = a.x.dtype == DType::bf16,
                     .linear_tiles = linear_tiles});
}

// What no other launch of this process has, and memory that was never written hardly.
std::uint64_t new_ticket() {
  static std::atomic<std::uint64_t> launches{0};
  return ++launches * 0x9e3779b97f4a7c15;  // an odd factor: all are different, none is 0
}

// One launch's tokens on tiles.cuh, and before it what they need in the workspace.
void launch_tiles(const char* op, const DeviceScope& scope, std::byte* workspace, const W4MatmulArgs& a,
                  const W4Plan& plan, const W4MatmulParams& p) {
  const W4TilesForm f = w4_tiles_form(a.w->bits, plan.form);
  const bool is_half = a.x.dtype == DType::f16;
  const unsigned row_groups = p.row_blocks / static_cast<unsigned>(plan.cluster);
  W4TilesParams tiles{.product = p,
                      .x = {},
                      .token_group = static_cast<unsigned>(plan.token_group),
                      .by_items = Divisor(static_cast<int>(row_groups * p.token_blocks)),
                      .by_steps = Divisor(p.steps)};
  MatrixShape x{.rows = p.tokens, .columns = p.k, .stride = p.x_stride};
  const void* from = static_cast<const std::uint16_t*>(a.x.data) + p.first_token * p.x_stride;
  if (plan.copy_bytes > 0) {
    // few tokens, whose rows CTAs share, are sooner copied straight
    const std::size_t row_bytes =
        p.w.perm && plan.prepare_parts == 1 && p.k <= w4_prepare_row / 2 ? 2 * static_cast<std::size_t>(p.k) : 0;
    W4PrepareParams prepare{
        .product = p, .row_in_shared = row_bytes > 0, .parts = static_cast<unsigned>(plan.prepare_parts)};
    from = prepare.copy = reinterpret_cast<std::uint16_t*>(workspace + plan.workspace_bytes - plan.copy_bytes);
    x.stride = w4_padded_row(p.k);
    scope.launch(w4a16_prepare, p.tokens * plan.prepare_parts, w4_prepare_threads, row_bytes, prepare,
                 Overlap::with_previous);
  }
  tiles.x = rows_map(op, from, a.x.dtype, x, f.tokens / plan.cluster, 64);
  // as many CTAs as there is room for take one item after another
  std::int64_t ctas = std::min(std::int64_t{p.token_blocks} * p.row_blocks * p.splits,
                               std::int64_t{scope.sms()} * f.ctas / plan.cluster * plan.cluster);
  if (plan.shares > 0) {
    ctas = std::int64_t{plan.shares} * p.token_blocks * plan.cluster;
    const unsigned steps = row_groups * static_cast<unsigned>(p.steps);
    tiles.shares = static_cast<unsigned>(plan.shares);
    tiles.share_steps = steps / tiles.shares;
    tiles.longer = steps % tiles.shares;
    tiles.tickets = reinterpret_cast<std::uint64_t*>(workspace);
    tiles.handed = reinterpret_cast<float*>(workspace + plan.ticket_bytes);
    tiles.ticket = new_ticket();
  }
  scope.launch(tiles_kernel(is_half, a.w->bits, plan.form, plan.operand), ctas, f.threads(), plan.shared_bytes, tiles,
               Overlap::with_previous, plan.cluster);
}

template <class T, int bits>
auto expand_kernel(bool bf16_scales) {
  return bf16_scales ? w4a16_expand<T, bits, tile::bf16> : w4a16_expand<T, bits, tile::half>;
}
auto expand_kernel(bool is_half, int bits, bool bf16_scales) {
  if (bits == 8) return is_half ? expand_kernel<tile::half, 8>(bf16_scales) : expand_kernel<tile::bf16, 8>(bf16_scales);
  return is_half ? expand_kernel<tile::half, 4>(bf16_scales) : expand_kernel<tile::bf16, 4>(bf16_scales);
}

// A chunk of W's rows to 16 bits, its product, and the next chunk.
void launch_expanded(const DeviceScope& scope, std::byte* workspace, const W4MatmulArgs& a, const W4Plan& plan) {
  const W4View& w = *a.w;
  const int steps = static_cast<int>((w4_tiles_k(w.k) + 1) / 2);
  W4ExpandParams expand{.w = w,
                        .to = workspace,
                        .row_tiles = static_cast<unsigned>(w4_tiles_k(w.k)),
                        .k = static_cast<int>(w.k),
                        .groups = static_cast<int>(w.k / w.group),
                        .group_shift = w.group == w.k ? 31 : std::countr_zero(static_cast<unsigned>(w.group)) - 5,
                        .by_steps = Divisor(steps)};
  const auto columns = [](TensorView t, std::int64_t first, std::int64_t count) {  // of the last dimension
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
    LinearParams p{Product(a.x, columns(a.y, first, rows), columns(a.bias, first, rows),
                           columns(a.residual, first, rows), a.activation)};
    p.w = workspace;
    p.w_stride = p.k = w.k;
    p.w_last_stride = 1;
    p.x_stride = p.x.ndim > 0 ? p.x.stride[0] : w.k;
    p.tokens = a.x.rows();
    linear_collective(
        scope, p, a.x.dtype,
        plan_linear(
            {.m = p.tokens, .n = rows, .k = w.k, .sms = scope.sms(), .boxes = true, .tiles = true, .wgmma = true})
            .form);
  }
}

}  // namespace

std::size_t w4a16_workspace(const char* op, const Context& ctx, const W4MatmulArgs& a) {
  const DeviceScope scope(op, ctx);
  return std::max(plan_of(scope, a, in_order(a)).workspace_bytes,
                  plan_of(scope, a, false).workspace_bytes);  // outputs are not known yet
}

KernelName w4a16_matmul(const char* op, const Context& ctx, const W4MatmulArgs& a) {
  const DeviceScope scope(op, ctx);
  const W4View& w = *a.w;
  const W4Plan plan = plan_of(scope, a, in_linear_tiles(a));
  const int tokens_of_form =
      plan.tiles ? w4_tiles_form(w.bits, plan.form).tokens : 8 * w4_form(w.bits, plan.form).token_tiles;
  const KernelName kernel = plan.expand_rows > 0 ? kernel_name("cuda_", name(a.x.dtype), "_w", w.bits, "g", w.group,
                                                               "_", name(w.zeros), "_tile_expand", plan.expand_rows)
                                                 : kernel_name("cuda_", name(a.x.dtype), "_w", w.bits, "g", w.group,
                                                               "_", name(w.zeros), plan.tiles ? "_tile" : "_t",
                                                               tokens_of_form, plan.shares > 0 ? "_shares" : "_split",
                                                               plan.shares > 0 ? plan.shares : plan.splits);
  if (a.y.numel() == 0) return kernel;
  std::byte* const workspace = workspace_of(op, ctx, plan.workspace_bytes);
  if (plan.expand_rows > 0) {
    launch_expanded(scope, workspace, a, plan);
    return kernel;
  }

  W4MatmulParams p{Product(a.x, a.y, a.bias, a.residual, a.activation, a.gated)};
  p.x_in_pieces = in_pieces(a.x) && !w.perm;
  p.x_stride = p.x.ndim > 0 ? p.x.stride[0] : 0;
  p.w = w;
  p.groups = static_cast<int>(w.k / w.group);
  p.tile_rows = static_cast<int>(w4_tiles_n(w.n));
  p.row_tiles = static_cast<int>(w4_tiles_k(w.k));
  p.gate_tiles = static_cast<int>(plan.gate_tiles);
  p.row_blocks = static_cast<unsigned>(plan.row_blocks);
  p.by_row_blocks = Divisor(static_cast<int>(plan.row_blocks));
  p.k = static_cast<int>(w.k);
  p.group = w.group;
  p.span = plan.span;
  p.span_shift = plan.span == 128 ? 2 : plan.span == 64 ? 1 : 0;
  p.splits = plan.splits;
  p.steps = static_cast<int>((w4_tiles_k(w.k) + 1) / 2);
  p.chunk_steps = plan.chunk_steps;
  p.cluster_shift = std::countr_zero(static_cast<unsigned>(plan.cluster));
  p.x_rows = plan.x_rows;
  p.sums_at = plan.sums_at;
  p.partial = plan.finish ? reinterpret_cast<float*>(workspace) : nullptr;

  const std::int64_t m = a.x.rows();
  const bool is_half = a.x.dtype == DType::f16;
  const int block_tokens = plan.tiles ? tokens_of_form : w4_tokens;
  for (std::int64_t first = 0; first < m; first += plan.launch_tokens) {
    p.first_token = first;
    p.tokens = std::min(plan.launch_tokens, m - first);
    p.token_blocks = static_cast<unsigned>((p.tokens + block_tokens - 1) / block_tokens);
    p.by_token_blocks = Divisor(static_cast<int>(p.token_blocks));
    if (plan.tiles) launch_tiles(op, scope, workspace, a, plan, p);
    else
      scope.launch(stream_kernel(is_half, w.bits, plan.form, plan.span, w.zeros),
                   std::int64_t{p.token_blocks} * p.row_blocks * p.splits, w4_warps * 32, plan.shared_bytes, p,
                   Overlap::with_previous, plan.cluster);
    if (plan.finish) finish_product(scope, p, a.x.dtype);
  }
  return kernel;
}

void load_w4a16_kernels(const char* op) {
  for (const int bits : {4, 8})
    for (const W4Zeros zeros : {W4Zeros::symmetric, W4Zeros::minima}) {
      if (bits == 8 && zeros == W4Zeros::minima) continue;
      for (const bool is_half : {false, true}) {
        for (int form = 0; form < 4; ++form)
          for (const int span : {64, 128}) load_kernel(op, stream_kernel(is_half, bits, form, span, zeros));
      }
    }
  for (const int bits : {4, 8})
    for (const bool is_half : {false, true})
      for (int form = 0; form < 3; ++form)
        for (const W4Operand operand : {W4Operand::codes, W4Operand::f16_scales, W4Operand::bf16_scales})
          load_kernel(op, tiles_kernel(is_half, bits, form, operand));
  load_kernel(op, w4a16_prepare);
  for (const int bits : {4, 8})
    for (const bool is_half : {false, true})
      for (const bool bf16_scales : {false, true}) load_kernel(op, expand_kernel(is_half, bits, bf16_scales));
}

}  // namespace rooftile::gpu
