// SPDX-License-Identifier: Apache-2.0
// What follows the product: bias, activation, residual, rounding; and the sum of what several chunks of K left.
//   partial fp32 [split][token][n, padded to 16] -> y [M, N]     4 bytes a split and output: it stays in L2
#pragma once

#include "core/w4_layout.h"
#include "kernels/w4a16/params.h"
#include "tile/element.cuh"
#include "tile/grid.cuh"

namespace rooftile::gpu {

__device__ __forceinline__ float activate(Activation a, float x) {
  switch (a) {
    case Activation::none: return x;
    case Activation::silu: return x / (1.0f + expf(-x));
    case Activation::gelu_tanh: return x / (1.0f + expf(-1.5957691216057308f * x * fmaf(0.044715f * x, x, 1.0f)));
    case Activation::gelu_erf: return 0.5f * x * erfcf(-0.70710678118654752f * x);
  }
  return x;
}

// Adds bias, activation, gate and residual to one output and stores it. `token` counts from the first of the call; `up`: of a gated
// product.
template <class T>
__device__ __forceinline__ void store_output(const W4MatmulParams& p, std::int64_t token, std::int64_t n, float sum, float up) {
  const T* const bias = static_cast<const T*>(p.bias);
  if (bias) sum += tile::to_float(bias[n * p.bias_stride]);
  sum = activate(p.activation, sum);
  if (p.gated) sum *= bias ? up + tile::to_float(bias[(n + p.outputs) * p.bias_stride]) : up;
  if (p.residual.data) sum += tile::to_float(static_cast<const T*>(p.residual.data)[p.residual.offset(token) + n * p.residual.last_stride]);
  static_cast<T*>(p.y.data)[p.y.offset(token) + n * p.y.last_stride] = tile::from_float<T>(sum);
}

// The same of four neighbours along N, n a multiple of 4, of one token after another.
template <class T>
class Outputs {
 public:
  __device__ __forceinline__ Outputs(const W4MatmulParams& p, std::int64_t n)
      : p_(p), n_(n), plain_(p.y_in_pieces && p.activation == Activation::none && !p.residual.data) {
    if (!p.bias || !p.y_in_pieces || n >= p.outputs) return;
    const T* const bias = static_cast<const T*>(p.bias) + n * p.bias_stride;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bias_[i] = tile::to_float(bias[i * p.bias_stride]);
      if (p.gated) up_bias_[i] = tile::to_float(bias[(p.outputs + i) * p.bias_stride]);
    }
  }
  // ups: of a gated product.
  __device__ __forceinline__ void store(std::int64_t token, float4 sums, float4 ups) const {
    float x[4] = {sums.x, sums.y, sums.z, sums.w}, up[4] = {ups.x, ups.y, ups.z, ups.w};
    if (!p_.y_in_pieces) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (n_ + i < p_.outputs) store_output<T>(p_, token, n_ + i, x[i], up[i]);
      return;
    }
    if (n_ >= p_.outputs) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] += bias_[i];
    if (!plain_) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = activate(p_.activation, x[i]);
        if (p_.gated) x[i] *= up[i] + up_bias_[i];
      }
      if (p_.residual.data) {
        const T* const residual = static_cast<const T*>(p_.residual.data) + token * p_.residual.stride[0] + n_;
        const uint2 four = *reinterpret_cast<const uint2*>(residual);
        const float2 low = tile::unpack<T>(four.x), high = tile::unpack<T>(four.y);
        x[0] += low.x, x[1] += low.y, x[2] += high.x, x[3] += high.y;
      }
    }
    T* const y = static_cast<T*>(p_.y.data) + token * p_.y.stride[0] + n_;
    *reinterpret_cast<uint2*>(y) = make_uint2(tile::pack<T>(x[0], x[1]), tile::pack<T>(x[2], x[3]));
  }

 private:
  const W4MatmulParams& p_;
  const std::int64_t n_;
  const bool plain_;
  float bias_[4] = {}, up_bias_[4] = {};
};

inline constexpr int w4_finish_threads = 256;

// Adds the chunks of K in order. A thread has four neighbouring outputs of a token.
template <class T>
__global__ void __launch_bounds__(w4_finish_threads) w4a16_finish(const __grid_constant__ W4MatmulParams p) {
  const std::int64_t padded_n = w4_tiles_n(p.w.n) * w4_tile_n;
  const unsigned blocks = p.finish_blocks;
  const std::int64_t token = blockIdx.x / blocks, n = (std::int64_t{blockIdx.x % blocks} * w4_finish_threads + threadIdx.x) * 4;
  tile::let_next_kernel_start();
  if (n >= p.outputs) return;
  tile::wait_for_previous_kernel();
  const float* const partial = p.partial + token * padded_n;
  const auto sum_of = [&](std::int64_t at) {   // of four neighbours, the last of which may be outside
    float4 sum = {};
#pragma unroll 4
    for (int split = 0; split < p.splits; ++split) {
      const float* const from = partial + split * p.tokens * padded_n + at;
      float4 part = {};
      if (at % 4 == 0) {
        part = *reinterpret_cast<const float4*>(from);
      } else {   // ups of gates whose number is no multiple of 4
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

}  // namespace rooftile::gpu
