// SPDX-License-Identifier: Apache-2.0
#include "core/kernel_name.h"
#include "kernels/backend.h"
#include "ops/check.h"
#include "rooftile/fused.h"

namespace rooftile {

KernelName softmax(const Context& ctx, TensorView x, TensorView y) {
  constexpr const char* op = "softmax";
  using check::Arg;
  Arg(op, "x", x).given().activation().ndim(1, TensorView::max_ndim);
  Arg(op, "out", y).given().shape_of(x, "x").dtype({x.dtype}).device(x.device, "x").writable();
  check::check_overlap(op, "out", y, "x", x);
  if (check::on_gpu(ctx)) {
    check::check_gpu(op, ctx, "x", x);
    return gpu::softmax(ctx, x, y);
  }
  const cpu::Kernels& k = check::cpu_kernels(op, ctx);
  if (y.numel() > 0) k.softmax(Parallel(ctx.threads), x, y);
  return kernel_name("cpu_", k.variant, "_", name(x.dtype));
}

}  // namespace rooftile
