// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "core/kernel_name.h"
#include "kernels/backend.h"
#include "ops/check.h"
#include "rooftile/fused.h"

namespace rooftile {
namespace {

// What an op calls the arguments of a norm.
struct NormNames {
  const char *x = "x", *weight = "weight", *out = "out";
};

void check_norm(const char* op, const NormArgs& a, const NormNames& names = {}) {
  using check::Arg;
  Arg(op, names.x, a.x).given().activation().ndim(1, TensorView::max_ndim);
  const std::int64_t hidden = a.x.last();
  ROOFTILE_CHECK(hidden > 0, op, ": ", names.x, " must have a last dimension of at least 1, got ", describe(a.x));
  const bool adds = a.residual.given();
  if (adds) Arg(op, "residual", a.residual).shape_of(a.x, names.x).dtype({a.x.dtype}).device(a.x.device, names.x);
  for (const auto& [argument, t] : {std::pair{names.weight, &a.weight}, {"bias", &a.bias}})
    if (t->given())
      Arg(op, argument, *t).shape({hidden}, "[hidden]").dtype({a.x.dtype, DType::f32}).device(a.x.device, names.x);
  ROOFTILE_CHECK(a.eps >= 0 && std::isfinite(a.eps), op, ": eps must be finite and at least 0, got ", a.eps);
  ROOFTILE_CHECK(std::isfinite(a.weight_offset), op, ": weight_offset must be finite, got ", a.weight_offset);
  ROOFTILE_CHECK(a.weight.given() || a.weight_offset == 0, op, ": weight_offset needs a ", names.weight,
                 ", got none and ", a.weight_offset);
  const auto check_output = [&](const char* argument, const TensorView& t) {
    Arg(op, argument, t).given().shape_of(a.x, names.x).dtype({a.x.dtype}).device(a.x.device, names.x).writable();
    for (const auto& [name, in] : {std::pair{names.x, &a.x}, {"residual", &a.residual}})
      if (in->given()) check::check_overlap(op, argument, t, name, *in);
    check::check_disjoint(op, argument, t, {{names.weight, a.weight}, {"bias", a.bias}});
  };
  check_output(names.out, a.y);
  if (adds) {
    check_output("residual_out", a.res);
    check::check_disjoint(op, "residual_out", a.res, {{"out", a.y}});
  }
}

KernelName run_norm(const char* op, const Context& ctx, const NormArgs& a) {
  check_norm(op, a);
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

KernelName qk_rms_norm(const Context& ctx, TensorView q, TensorView k, TensorView q_weight, TensorView k_weight,
                       float eps, TensorView q_out, TensorView k_out, float weight_offset) {
  constexpr const char* op = "qk_rms_norm";
  using check::Arg;
  const NormArgs of_q = {.x = q, .weight = q_weight, .y = q_out, .eps = eps, .weight_offset = weight_offset};
  const NormArgs of_k = {.x = k, .weight = k_weight, .y = k_out, .eps = eps, .weight_offset = weight_offset};
  Arg(op, "q", q).given().activation().ndim(2, TensorView::max_ndim);
  Arg(op, "k", k).given().ndim(2, TensorView::max_ndim).dtype({q.dtype}).device(q.device, "q");
  check_norm(op, of_q, {"q", "q_weight", "q_out"});
  TensorView heads_of_q = q;  // k's shape but for its number of heads
  heads_of_q.shape[q.ndim - 2] = k.shape[k.ndim - 2];
  ROOFTILE_CHECK(same_shape(k, heads_of_q), op, ": k must have q's shape ", shape_text(q),
                 " but for its number of heads, got ", describe(k));
  ROOFTILE_CHECK_KIND(not_supported, q.last() <= max_head_norm, op, ": q must have heads of at most ", max_head_norm,
                      " elements, got ", describe(q));
  check_norm(op, of_k, {"k", "k_weight", "k_out"});
  check::check_disjoint(op, "q_out", q_out, {{"k", k}, {"k_weight", k_weight}});
  check::check_disjoint(op, "k_out", k_out, {{"q", q}, {"q_weight", q_weight}, {"q_out", q_out}});
  if (check::on_gpu(ctx)) {
    check::check_gpu(op, ctx, "q", q);
    return gpu::norm_pair(op, ctx, of_q, of_k);
  }
  const cpu::Kernels& kernels = check::cpu_kernels(op, ctx);
  const Parallel parallel(ctx.threads);
  if (q.numel() > 0) kernels.norm(parallel, of_q);
  if (k.numel() > 0) kernels.norm(parallel, of_k);
  return kernel_name("cpu_", kernels.variant, "_", name(q.dtype));
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
