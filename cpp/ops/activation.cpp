// SPDX-License-Identifier: Apache-2.0
#include "core/kernel_name.h"
#include "kernels/backend.h"
#include "ops/check.h"
#include "rooftile/fused.h"

namespace rooftile {
namespace {

KernelName run_gated(const char* op, const Context& ctx, const TensorView& x, const TensorView& h, Gate gate) {
  using check::Arg;
  Arg(op, "gate_up", x).given().activation().ndim(1, TensorView::max_ndim);
  ROOFTILE_CHECK(x.last() % 2 == 0, op, ": gate_up must have an even last dimension [gate | up], got ", describe(x));
  TensorView half = x;
  half.shape[x.ndim - 1] /= 2;
  TensorView up = half;
  up.data =
      static_cast<std::byte*>(x.data) + half.last() * x.last_stride() * static_cast<std::int64_t>(size_of(x.dtype));
  Arg(op, "out", h).given().shape_of(half, "half of gate_up").dtype({x.dtype}).device(x.device, "gate_up").writable();
  check::check_overlap(op, "out", h, "the gate half of gate_up", half);
  check::check_disjoint(op, "out", h, {{"the up half of gate_up", up}});
  if (check::on_gpu(ctx)) {
    check::check_gpu(op, ctx, "gate_up", x);
    return gpu::gated(op, ctx, x, h, gate);
  }
  const cpu::Kernels& k = check::cpu_kernels(op, ctx);
  if (h.numel() > 0) k.gated(Parallel(ctx.threads), x, h, gate);
  return kernel_name("cpu_", k.variant, "_", name(x.dtype));
}

}  // namespace

KernelName silu_mul(const Context& ctx, TensorView x, TensorView h) {
  return run_gated("silu_mul", ctx, x, h, Gate::silu);
}

KernelName gelu_mul(const Context& ctx, TensorView x, Gelu approximate, TensorView h) {
  return run_gated("gelu_mul", ctx, x, h, approximate == Gelu::tanh ? Gate::gelu_tanh : Gate::gelu_erf);
}

}  // namespace rooftile
