// SPDX-License-Identifier: Apache-2.0
// 16-bit products: which of the four kernels a call takes, and the launch of the one that streams.
#include <limits>

#include "core/kernel_name.h"
#include "kernels/backend.h"
#include "kernels/linear/stream.cuh"
#include "kernels/products/finish.h"
#include "kernels/warmup.h"
#include "rooftile/error.h"

namespace rooftile::gpu {
namespace {

constexpr const char* op_name = "linear";

template <class T>
auto stream_of(int form, bool pieces) {
  if (form == 0) return pieces ? linear_stream<LinearConfig<T, 1, true>> : linear_stream<LinearConfig<T, 1, false>>;
  return pieces ? linear_stream<LinearConfig<T, 2, true>> : linear_stream<LinearConfig<T, 2, false>>;
}
auto stream_of(DType dtype, int form, bool pieces) {
  return dtype == DType::f16 ? stream_of<tile::half>(form, pieces) : stream_of<tile::bf16>(form, pieces);
}

LinearPlan plan_of(const DeviceScope& scope, const LinearArgs& a) {
  constexpr std::int64_t most_rows = std::numeric_limits<std::int32_t>::max(),
                         most_n = 65535 * std::int64_t{linear_block.rows};  // counted in int; a grid's y
  const bool sizes = a.x.rows() <= most_rows && a.w.shape[0] <= most_n, boxes = sizes && in_tiles(a.x) && in_tiles(a.w);
  return plan_linear({.m = a.x.rows(),
                      .n = a.w.shape[0],
                      .k = a.w.shape[1],
                      .sms = scope.sms(),
                      .boxes = boxes,
                      .tiles = boxes && bias_in_tiles(a.bias) && in_tiles(a.y) && in_tiles(a.residual),
                      .wgmma = scope.has_wgmma()});
}

KernelName name_of(const LinearPlan& plan, DType dtype, bool pieces) {
  const auto linear = [&](auto... parts) { return kernel_name("cuda_", name(dtype), "_linear_", parts...); };
  switch (plan.path) {
    case LinearPath::stream:
      return linear("t", plan.form == 0 ? 8 : 16, pieces ? "_split" : "_strided_split", plan.splits);
    case LinearPath::boxes:
      return linear("box", linear_box_forms[plan.form], "_split", plan.cluster);
    case LinearPath::collective:
      return linear("tile", linear_collectives[plan.form].rows, "x", linear_collectives[plan.form].tokens);
    case LinearPath::blocks:
      return linear("block", linear_block.rows, "x", linear_block.tokens);
  }
  return {};
}

}  // namespace

std::size_t linear_workspace(const Context& ctx, const LinearArgs& a) {
  const DeviceScope scope(op_name, ctx);
  return plan_of(scope, a).workspace_bytes;
}

KernelName linear(const Context& ctx, const LinearArgs& a) {
  const DeviceScope scope(op_name, ctx);
  const LinearPlan plan = plan_of(scope, a);
  const bool pieces = in_pieces(a.x) && in_pieces(a.w);
  const KernelName kernel = name_of(plan, a.x.dtype, pieces);
  if (a.y.numel() == 0) return kernel;

  LinearParams p{Product(a.x, a.y, a.bias, a.residual, a.activation)};
  p.w = a.w.data;
  p.w_stride = a.w.stride[0];
  p.w_last_stride = a.w.stride[1];
  p.x_stride = p.x.ndim > 0 ? p.x.stride[0] : a.x.last();
  p.k = a.w.shape[1];
  p.tokens = a.x.rows();
  p.splits = plan.splits;
  p.partial = reinterpret_cast<float*>(workspace_of(op_name, ctx, plan.workspace_bytes));
  p.token_blocks = static_cast<unsigned>(plan.token_blocks);
  p.row_blocks = static_cast<unsigned>(plan.row_blocks);
  const int step_k = plan.path == LinearPath::boxes ? linear_box_k : linear_step_k;
  p.steps = static_cast<int>((p.k + step_k - 1) / step_k);
  p.chunk_steps = plan.chunk_steps;
  if (plan.path == LinearPath::boxes) {
    linear_boxes(scope, p, a.x.dtype, plan);
    return kernel;
  }
  if (plan.path == LinearPath::collective) {
    linear_collective(scope, p, a.x.dtype, plan.form);
    return kernel;
  }
  if (plan.path == LinearPath::blocks) {
    linear_blocks(scope, p, a.x.dtype);
    return kernel;
  }
  p.row_tiles = plan.row_tiles;
  p.slice_shift = plan.slice_shift;
  scope.launch(stream_of(a.x.dtype, plan.form, pieces), plan.token_blocks * plan.row_blocks * plan.splits,
               32 * (plan.row_tiles << plan.slice_shift), plan.shared_bytes, p, Overlap::with_previous);
  if (p.splits > 1) finish_product(scope, p, a.x.dtype);
  return kernel;
}

void load_linear_kernels(const char* op) {
  for (DType dtype : {DType::f16, DType::bf16})
    for (int form : {0, 1})
      for (bool pieces : {true, false}) load_kernel(op, stream_of(dtype, form, pieces));
  load_linear_boxes(op);
  load_linear_collectives(op);
  load_linear_blocks(op);
}

}  // namespace rooftile::gpu
