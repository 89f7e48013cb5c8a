// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <memory>

#include "core/kernel_name.h"
#include "cpu/element.h"
#include "kernels/backend.h"
#include "ops/append.h"
#include "ops/check.h"
#include "rooftile/fused.h"

namespace rooftile {
namespace {

using check::Arg;

// The leading dimensions of `x` [..., H, D] as a shape of their own.
TensorView leading(const TensorView& x) {
  TensorView t = x;
  t.ndim = x.ndim - 2;
  return t;
}

void check_heads(const char* op, const char* argument, const TensorView& x, const TensorView& q,
                 const TensorView& cos) {
  Arg(op, argument, x).given().ndim(2, TensorView::max_ndim).dtype({q.dtype}).device(q.device, "q");
  ROOFTILE_CHECK(same_shape(leading(x), leading(q)), op, ": ", argument, " must have q's leading dimensions ",
                 shape_text(leading(q)), ", got ", describe(x));
  ROOFTILE_CHECK(2 * cos.shape[1] <= x.last(), op, ": cos has ", cos.shape[1], " columns, so ", argument,
                 " needs head_dim >= ", 2 * cos.shape[1], ", got ", describe(x));
}

// Of all that came, last: as many as the outputs have tokens.
void check_values(const char* op, const TensorView& positions, const TensorView& q, const TensorView& k,
                  const TensorView& cos) {
  if (q.device.type != DeviceType::cpu || (q.numel() == 0 && k.numel() == 0)) return;
  for (std::int64_t i = 0; i < positions.numel(); ++i) {
    const std::int64_t p = cpu::integer_at(positions, cpu::element_offset(positions, i));
    ROOFTILE_CHECK(p >= 0 && p < cos.shape[0], op, ": positions must lie in [0, ", cos.shape[0],
                   "), the rows of cos, got ", p, " at index ", i);
  }
}

void check_positions(const char* op, const TensorView& positions, const TensorView& q) {
  Arg(op, "positions", positions).given().dtype({DType::i32, DType::i64}).device(q.device, "q");
  ROOFTILE_CHECK(same_shape(positions, leading(q)), op, ": positions must have q's leading dimensions ",
                 shape_text(leading(q)), ", got ", describe(positions));
}

void check_inputs(const char* op, const TensorView& q, const TensorView& k, const TensorView& cos,
                  const TensorView& sin, const TensorView& positions) {
  Arg(op, "q", q).given().activation().ndim(2, TensorView::max_ndim);
  Arg(op, "cos", cos).given().dtype({q.dtype, DType::f32}).ndim(2, 2).countable().device(q.device, "q");
  Arg(op, "sin", sin).given().dtype({q.dtype, DType::f32}).shape_of(cos, "cos").device(q.device, "q");
  check_heads(op, "q", q, q, cos);
  check_heads(op, "k", k, q, cos);
  check_positions(op, positions, q);
}

void check_output(const char* op, const char* argument, const TensorView& t, const char* in_name,
                  const TensorView& in) {
  Arg(op, argument, t).given().shape_of(in, in_name).dtype({in.dtype}).device(in.device, in_name).writable();
  check::check_overlap(op, argument, t, in_name, in);
}

}  // namespace

KernelName rope(const Context& ctx, TensorView q, TensorView k, TensorView cos, TensorView sin, TensorView positions,
                TensorView q_out, TensorView k_out) {
  constexpr const char* op = "rope";
  check_inputs(op, q, k, cos, sin, positions);
  check_output(op, "q_out", q_out, "q", q);
  check_output(op, "k_out", k_out, "k", k);
  check::check_disjoint(op, "q_out", q_out, {{"k", k}, {"cos", cos}, {"sin", sin}, {"positions", positions}});
  check::check_disjoint(op, "k_out", k_out,
                        {{"q", q}, {"cos", cos}, {"sin", sin}, {"positions", positions}, {"q_out", q_out}});
  check_values(op, positions, q, k, cos);
  if (check::on_gpu(ctx)) {
    check::check_gpu(op, ctx, "q", q);
    return gpu::rope(op, ctx, q, k, cos, sin, positions, q_out, k_out);
  }
  const cpu::Kernels& kernels = check::cpu_kernels(op, ctx);
  const Parallel parallel(ctx.threads);
  if (q.numel() > 0) kernels.rope(parallel, q, cos, sin, positions, q_out);
  if (k.numel() > 0) kernels.rope(parallel, k, cos, sin, positions, k_out);
  return kernel_name("cpu_", kernels.variant, "_", name(q.dtype));
}

KernelName rope_append(const Context& ctx, TensorView q, TensorView k, TensorView v, TensorView cos, TensorView sin,
                       TensorView positions, const KvCacheView& cache, TensorView rows, TensorView counts,
                       TensorView q_out) {
  constexpr const char* op = "rope_append";
  Arg(op, "q", q).given().ndim(4, 4);
  check_inputs(op, q, k, cos, sin, positions);
  check_output(op, "q_out", q_out, "q", q);
  check::check_disjoint(
      op, "q_out", q_out,
      {{"k", k}, {"v", v}, {"cos", cos}, {"sin", sin}, {"positions", positions}, {"rows", rows}, {"counts", counts}});
  check::check_disjoint(op,
                        {{"q", q},
                         {"k", k},
                         {"v", v},
                         {"cos", cos},
                         {"sin", sin},
                         {"positions", positions},
                         {"rows", rows},
                         {"counts", counts},
                         {"q_out", q_out}},
                        cache);
  // Without heads q_out would have no memory that bounds the tokens.
  ROOFTILE_CHECK_KIND(not_supported, q.shape[2] >= 1 && q.shape[2] <= check::max_heads, op, ": q must have 1 to ",
                      check::max_heads, " heads, got ", describe(q));
  check_values(op, positions, q, k, cos);
  // before memory is made by what k says
  Arg(op, "k", k)
      .shape({k.shape[0], k.shape[1], cache.kv_heads, cache.head_dim}, "[batch, tokens, kv_heads, head_dim]");
  ROOFTILE_CHECK(q.last() == cache.head_dim, op, ": q must have the cache's head_dim ", cache.head_dim, ", got ",
                 describe(q));
  if (check::on_gpu(ctx)) {
    AppendArgs a = check::gpu_append(op, ctx, cache, k, v, rows, counts);
    a.q = q;
    a.q_out = q_out;
    a.cos = cos;
    a.sin = sin;
    a.positions = positions;
    return gpu::kv_append(op, ctx, a);
  }
  const cpu::Kernels& kernels = check::cpu_kernels(op, ctx);
  const Parallel parallel(ctx.threads);

  TensorView rotated = k;  // contiguous: k belongs to the caller and the cache may round it
  std::int64_t stride = 1;
  for (int i = k.ndim - 1; i >= 0; --i) {
    rotated.stride[i] = stride;
    stride *= k.shape[i];
  }
  const auto room = std::make_unique_for_overwrite<std::byte[]>(static_cast<std::size_t>(k.numel()) * size_of(k.dtype));
  rotated.data = room.get();
  if (k.numel() > 0) kernels.rope(parallel, k, cos, sin, positions, rotated);
  append(op, ctx, cache, rotated, v, rows, counts);  // checks v, rows, counts and the capacity before it writes
  if (q.numel() > 0) kernels.rope(parallel, q, cos, sin, positions, q_out);
  return kernel_name("cpu_", kernels.variant, "_", name(q.dtype), "_", name(cache.format));
}

}  // namespace rooftile
