// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "core/kernel_name.h"
#include "cpu/element.h"
#include "kernels/backend.h"
#include "ops/check.h"
#include "rooftile/fused.h"

namespace rooftile {
namespace {

constexpr const char* op = "embedding";

void check_output(const EmbeddingArgs& a) {
  TensorView rows = a.y;
  --rows.ndim;
  ROOFTILE_CHECK(same_shape(rows, a.ids) && a.y.last() == a.weight.shape[1], op,
                 ": out must have ids' dimensions and hidden = ", a.weight.shape[1], " behind them, got ",
                 describe(a.y), " for ids ", shape_text(a.ids));
  check::check_disjoint(op, "out", a.y, {{"ids", a.ids}, {"weight", a.weight}});
}

void check_ids(const EmbeddingArgs& a) {
  for (std::int64_t i = 0; i < a.ids.numel(); ++i) {
    const std::int64_t id = cpu::integer_at(a.ids, cpu::element_offset(a.ids, i));
    ROOFTILE_CHECK(id >= 0 && id < a.weight.shape[0], op, ": ids must lie in [0, ", a.weight.shape[0],
                   "), the rows of weight, got ", id, " at index ", i);
  }
}

}  // namespace

KernelName embedding(const Context& ctx, TensorView ids, TensorView weight, float scale, TensorView y) {
  using check::Arg;
  const EmbeddingArgs a = {.ids = ids, .weight = weight, .y = y, .scale = scale};
  Arg(op, "weight", weight).given().activation().ndim(2, 2);
  Arg(op, "ids", ids)
      .given()
      .ndim(0, TensorView::max_ndim - 1)
      .dtype({DType::i32, DType::i64})
      .device(weight.device, "weight");
  ROOFTILE_CHECK(std::isfinite(scale), op, ": scale must be finite in float32, got ", scale);
  Arg(op, "out", y)
      .given()
      .ndim(1, TensorView::max_ndim)
      .dtype({weight.dtype})
      .device(weight.device, "weight")
      .writable();
  check_output(a);
  if (check::on_gpu(ctx)) {
    check::check_gpu(op, ctx, "weight", weight);
    return gpu::embedding(ctx, a);
  }
  const cpu::Kernels& k = check::cpu_kernels(op, ctx);
  if (y.numel() > 0) {
    check_ids(a);
    k.embedding(Parallel(ctx.threads), a);
  }
  return kernel_name("cpu_", k.variant, "_", name(weight.dtype));
}

}  // namespace rooftile
