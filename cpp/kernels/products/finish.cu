// SPDX-License-Identifier: Apache-2.0
// Adds the chunks of K in order and finishes the product.
//   partial fp32 [split][token][n, padded to 16] -> y [M, N]     4 bytes a split and output: it stays in L2
// A thread has four neighbouring outputs of a token, with the ups of a gated product.
#include "kernels/products/finish.h"

#include "core/divisor.h"
#include "kernels/products/finish.cuh"
#include "kernels/warmup.h"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {
namespace {

constexpr int finish_threads = 256;

std::int64_t finish_blocks(std::int64_t outputs) {
  return (outputs + 4 * finish_threads - 1) / (4 * finish_threads);
}  // of a token

struct FinishParams {
  Product product;
  std::int64_t padded_n;
  Divisor by_blocks;  // of a token
};

template <class T>
__global__ void __launch_bounds__(finish_threads) finish_chunks(const __grid_constant__ FinishParams params) {
  const Product& p = params.product;
  const std::int64_t padded_n = params.padded_n;
  const int block = static_cast<int>(blockIdx.x), of_all = divide(block, params.by_blocks);
  const std::int64_t token = of_all, n = std::int64_t{(block - of_all * params.by_blocks.value) * finish_threads +
                                                      static_cast<int>(threadIdx.x)} *
                                         4;
  tile::let_next_kernel_start();
  if (n >= p.outputs) return;
  tile::wait_for_previous_kernel();
  const float* const partial = p.partial + token * padded_n;
  const auto sum_of = [&](std::int64_t at) {  // of four neighbours, the last of which may be outside
    float4 sum = {};
#pragma unroll 4
    for (int split = 0; split < p.splits; ++split) {
      const float* const from = partial + split * p.tokens * padded_n + at;
      float4 part = {};
      if (at % 4 == 0) {
        part = *reinterpret_cast<const float4*>(from);
      } else {  // ups of gates whose number is no multiple of 4
        const std::int64_t left = padded_n - at;
        part = {from[0], left > 1 ? from[1] : 0.0f, left > 2 ? from[2] : 0.0f, left > 3 ? from[3] : 0.0f};
      }
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    return sum;
  };
  const float4 sums = sum_of(n);
  Outputs<T>(p, n).store(p.first_token + token, sums, p.gated ? sum_of(n + p.outputs) : float4{});
}

}  // namespace

void finish_product(const DeviceScope& scope, const Product& p, DType dtype) {
  const std::int64_t blocks = finish_blocks(p.outputs);
  scope.launch(dtype == DType::f16 ? finish_chunks<tile::half> : finish_chunks<tile::bf16>, p.tokens * blocks,
               finish_threads, 0, FinishParams{p, p.padded_n(), Divisor(static_cast<int>(blocks))},
               Overlap::with_previous);
}

void load_product_kernels(const char* op) {
  load_kernel(op, finish_chunks<tile::half>);
  load_kernel(op, finish_chunks<tile::bf16>);
}

}  // namespace rooftile::gpu
