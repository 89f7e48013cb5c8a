// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "core/kernel_name.h"
#include "kernels/backend.h"
#include "ops/check.h"
#include "rooftile/fused.h"

namespace rooftile {
namespace {

KernelName run_norm(const char* op, const Context& ctx, const NormArgs& a) {
  using check::Arg;
  Arg(op, "x", a.x).given().activation().ndim(1, TensorView::max_ndim);
  const std::int64_t hidden = a.x.last();
  ROOFTILE_CHECK(hidden > 0, op, ": x must have a last dimension of at least 1, got ", describe(a.x));
  const bool adds = a.residual.given();
  if (adds) Arg(op, "residual", a.residual).shape_of(a.x, "x").dtype({a.x.dtype}).device(a.x.device, "x");
  for (const auto& [argument, t] : {std::pair{"weight", &a.weight}, {"bias", &a.bias}})
    if (t->given())
      Arg(op, argument, *t).shape({hidden}, "[hidden]").dtype({a.x.dtype, DType::f32}).device(a.x.device, "x");
  ROOFTILE_CHECK(a.eps >= 0 && std::isfinite(a.eps), op, ": eps must be finite and at least 0, got ", a.eps);
  ROOFTILE_CHECK(std::isfinite(a.weight_offset), op, ": weight_offset must be finite, got ", a.weight_offset);
  ROOFTILE_CHECK(a.weight.given() || a.weight_offset == 0, op, ": weight_offset needs a weight, got none and ",
                 a.weight_offset);
  const auto check_output = [&](const char* argument, const TensorView& t) {
    Arg(op, argument, t).given().shape_of(a.x, "x").dtype({a.x.dtype}).device(a.x.device, "x").writable();
    for (const auto& [name, in] : {std::pair{"x", &a.x}, {"residual", &a.residual}})
      if (in->given()) check::check_overlap(op, argument, t, name, *in);
    check::check_disjoint(op, argument, t, {{"weight", a.weight}, {"bias", a.bias}});
  };
  check_output("out", a.y);
  if (adds) {
    check_output("residual_out", a.res);
    check::check_disjoint(op, "residual_out", a.res, {{"out", a.y}});
  }
  if (check::on_gpu(ctx)) {
    check::check_gpu(op, ctx, "x", a.x);
    return gpu::norm(op, ctx, a);
  }
  const cpu::Kernels& k = check::cpu_kernels(op, ctx);
  if (a.y.numel() > 0) k.norm(Parallel(ctx.threads), a);
  return kernel_name("cpu_", k.variant, "_", name(a.x.dtype));
}

}  // namespace

KernelName rms_norm(const Context& ctx, TensorView x, TensorView weight, float eps, TensorView y, float weight_offset) {
  return run_norm("rms_norm", ctx, {.x = x, .weight = weight, .y = y, .eps = eps, .weight_offset = weight_offset});
}

KernelName add_rms_norm(const Context& ctx, TensorView x, TensorView residual, TensorView weight, float eps,
                        TensorView y, TensorView res, float weight_offset) {
  check::Arg("add_rms_norm", "residual", residual).given();
  return run_norm(
      "add_rms_norm", ctx,
      {.x = x, .residual = residual, .weight = weight, .y = y, .res = res, .eps = eps, .weight_offset = weight_offset});
}

KernelName layer_norm(const Context& ctx, TensorView x, TensorView weight, TensorView bias, float eps, TensorView y) {
  return run_norm("layer_norm", ctx,
                  {.x = x, .weight = weight, .bias = bias, .y = y, .eps = eps, .subtract_mean = true});
}

KernelName add_layer_norm(const Context& ctx, TensorView x, TensorView residual, TensorView weight, TensorView bias,
                          float eps, TensorView y, TensorView res) {
  check::Arg("add_layer_norm", "residual", residual).given();
  return run_norm("add_layer_norm", ctx,
                  {.x = x,
                   .residual = residual,
                   .weight = weight,
                   .bias = bias,
                   .y = y,
                   .res = res,
                   .eps = eps,
                   .subtract_mean = true});
}

}  // namespace rooftile
