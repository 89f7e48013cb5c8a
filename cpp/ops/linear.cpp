// SPDX-License-Identifier: Apache-2.0
#include <limits>

#include "core/kernel_name.h"
#include "kernels/backend.h"
#include "ops/check.h"
#include "rooftile/gemm.h"

namespace rooftile {
namespace {

using check::Arg;

constexpr const char* op = "linear";

void check_inputs(const TensorView& x, const TensorView& weight) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  Arg(op, "x", x).given().activation().ndim(1, TensorView::max_ndim);
  Arg(op, "weight", weight).given().ndim(2, 2).dtype({x.dtype}).device(x.device, "x");
  ROOFTILE_CHECK(weight.shape[1] == x.last(), op, ": weight must be [N, K] with x's K = ", x.last(), ", got ",
                 describe(weight));
  ROOFTILE_CHECK(weight.shape[0] <= most && weight.shape[1] <= most, op, ": weight must have N and K of at most ", most,
                 ", got ", describe(weight));
}

}  // namespace

std::size_t linear_workspace(const Context& ctx, TensorView x, TensorView weight) {
  check_inputs(x, weight);
  if (!check::on_gpu(ctx)) return 0;
  return gpu::linear_workspace(ctx, {.x = x, .w = weight});
}

KernelName linear(const Context& ctx, TensorView x, TensorView weight, TensorView y, const LinearOptions& options) {
  check_inputs(x, weight);
  check::check_product(op, x, weight.shape[0], false, y, options.bias, options.residual);
  check::check_disjoint(op, "out", y, {{"weight", weight}});
  const LinearArgs args{.x = x,
                        .w = weight,
                        .y = y,
                        .bias = options.bias,
                        .residual = options.residual,
                        .activation = options.activation};
  if (check::on_gpu(ctx)) {
    check::check_gpu(op, ctx, "x", x, true);
    return gpu::linear(ctx, args);
  }
  const cpu::Kernels& k = check::cpu_kernels(op, ctx);
  if (y.numel() > 0) k.linear(Parallel(ctx.threads), args);
  return kernel_name("cpu_", k.variant, "_", name(x.dtype), "_", op);
}

}  // namespace rooftile
