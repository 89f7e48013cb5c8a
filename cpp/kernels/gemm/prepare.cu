// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/prepare.h"

#include "kernels/gemm/expand.cuh"
#include "kernels/gemm/gather_x.cuh"
#include "kernels/warmup.h"

namespace rooftile::gpu {
namespace {

template <class T, int bits>
auto expand_kernel(bool bf16_scales) {
  return bf16_scales ? w4a16_expand<T, bits, tile::bf16> : w4a16_expand<T, bits, tile::half>;
}
auto expand_kernel(DType dtype, int bits, bool bf16_scales) {
  return tile::with_element16(dtype, [&](auto element) {
    using T = decltype(element);
    return bits == 8 ? expand_kernel<T, 8>(bf16_scales) : expand_kernel<T, 4>(bf16_scales);
  });
}

}  // namespace

void gather_x(const DeviceScope& scope, const GemmPlan& plan, const CodesParams& p, std::uint16_t* to) {
  // where several CTAs gather a token, gathering from global memory is faster
  const std::size_t row_bytes =
      p.w.perm && plan.gather_ctas == 1 && p.k <= w4_gather_row_bytes / 2 ? 2 * static_cast<std::size_t>(p.k) : 0;
  const GatherParams params{
      .product = p, .to = to, .row_in_smem = row_bytes > 0, .ctas_per_token = static_cast<unsigned>(plan.gather_ctas)};
  scope.launch(w4a16_gather_x, p.tokens * plan.gather_ctas, w4_gather_threads, row_bytes, params,
               Overlap::with_previous);
}

void expand_rows(const DeviceScope& scope, const ExpandParams& p, DType dtype) {
  constexpr int warps = w4_expand_threads / 32;
  scope.launch(expand_kernel(dtype, p.w.bits, p.w.scale_dtype == DType::bf16),
               (std::int64_t{p.tile_rows} * p.by_steps.value + warps - 1) / warps, w4_expand_threads, 0, p,
               Overlap::with_previous);
}

void load_prepare_kernels(const char* op) {
  load_kernel(op, w4a16_gather_x);
  for (const DType dtype : {DType::f16, DType::bf16})
    for (const int bits : {4, 8})
      for (const bool bf16_scales : {false, true}) load_kernel(op, expand_kernel(dtype, bits, bf16_scales));
}

}  // namespace rooftile::gpu
