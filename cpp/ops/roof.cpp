// SPDX-License-Identifier: Apache-2.0
#include "core/align.h"
#include "rooftile/roof.h"

#include "kernels/backend.h"
#include "ops/check.h"

namespace rooftile {

KernelName read_bytes(const Context& ctx, TensorView x, TensorView sink) {
  constexpr const char* op = "read_bytes";
  using check::Arg;
  Arg(op, "x", x).given().ndim(1, 1).dtype({DType::u8});
  ROOFTILE_CHECK(x.shape[0] % 16 == 0 && (x.shape[0] <= 1 || x.stride[0] == 1) && is_aligned(x.data, 16), op,
                 ": x must be contiguous, aligned to 16 bytes and a multiple of them, got ", describe(x));
  Arg(op, "sink", sink).given().shape({1}, "[1]").dtype({DType::i32}).device(x.device, "x").writable();
  check::check_disjoint(op, "sink", sink, {{"x", x}});
  ROOFTILE_CHECK_KIND(not_supported, check::on_gpu(ctx), op, ": x must be on a GPU, got ", describe(x));
  return gpu::read_bytes(ctx, x, sink);
}

}  // namespace rooftile
