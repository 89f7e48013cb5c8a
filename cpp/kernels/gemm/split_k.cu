// SPDX-License-Identifier: Apache-2.0
// Split-K reduction and epilogue: sums the partial sums of all splits of K in order, then applies the epilogue.
//   partial fp32 [split][token][padded_n] -> y [M, N]     reads 4 bytes a split and output, which L2 still holds
// Bound by latency: a launch and one wait for L2, 1.0 us for up to 3.5 MB of partial sums.
// A thread owns four neighbouring outputs of a token; in a gated product it also reads the four up projections.
// Sync: PDL. The kernel waits for the split kernels before it reads; the next kernel may start at once.
#include "kernels/gemm/split_k.h"

#include "core/divisor.h"
#include "kernels/gemm/epilogue.cuh"
#include "kernels/warmup.h"
#include "tile/copy.cuh"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {
namespace {

constexpr int reduce_threads = 256;

std::int64_t ctas_of_token(std::int64_t outputs) { return (outputs + 4 * reduce_threads - 1) / (4 * reduce_threads); }

struct ReduceParams {
  GemmParams product;
  std::int64_t padded_n;
  Divisor by_ctas;  // CTAs of a token
};

template <class T>
__global__ void __launch_bounds__(reduce_threads) reduce_split_k(const __grid_constant__ ReduceParams params) {
  const GemmParams& p = params.product;
  const std::int64_t padded_n = params.padded_n;
  const int cta = static_cast<int>(blockIdx.x), token_index = divide(cta, params.by_ctas);
  const std::int64_t token = token_index, n = std::int64_t{(cta - token_index * params.by_ctas.value) * reduce_threads +
                                                           static_cast<int>(threadIdx.x)} *
                                              4;
  tile::let_next_kernel_start();
  if (n >= p.outputs) return;
  tile::wait_for_previous_kernel();
  const float* const partial = p.partial + token * padded_n;
  const auto sum_of = [&](std::int64_t at) {  // sum of four neighbours; the last ones may lie past N
    return sum_in_order(p.splits, [&](int split) -> float4 {
      const float* const from = partial + split * p.tokens * padded_n + at;
      if (at % 4 == 0) return tile::load_vec_at<float4>(from);
      // the up projections are unaligned when `outputs` is no multiple of 4
      const std::int64_t left = padded_n - at;
      return {from[0], left > 1 ? from[1] : 0.0f, left > 2 ? from[2] : 0.0f, left > 3 ? from[3] : 0.0f};
    });
  };
  const float4 sums = sum_of(n);
  Epilogue<T>(p, n).store(p.first_token + token, sums, p.gated ? sum_of(n + p.outputs) : float4{});
}

}  // namespace

void split_k_epilogue(const DeviceScope& scope, const GemmParams& p, DType dtype) {
  const std::int64_t ctas = ctas_of_token(p.outputs);
  scope.launch(dtype == DType::f16 ? reduce_split_k<tile::half> : reduce_split_k<tile::bf16>, p.tokens * ctas,
               reduce_threads, 0, ReduceParams{p, p.padded_n(), Divisor(static_cast<int>(ctas))},
               Overlap::with_previous);
}

void load_split_k_kernels(const char* op) {
  load_kernel(op, reduce_split_k<tile::half>);
  load_kernel(op, reduce_split_k<tile::bf16>);
}

}  // namespace rooftile::gpu
