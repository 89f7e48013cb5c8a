// SPDX-License-Identifier: Apache-2.0
// The epilogue of every product: bias, activation, gate, residual, rounding, store.
#pragma once

#include "kernels/gemm/params.h"
#include "tile/activation.cuh"
#include "tile/copy.cuh"
#include "tile/element.cuh"

namespace rooftile::gpu {

// Sums `count` partial sums of four neighbouring outputs, in order; load(i) returns the i-th.
template <class Load>
__device__ __forceinline__ float4 sum_in_order(int count, Load&& load) {
  float4 sum = {};
#pragma unroll 4
  for (int i = 0; i < count; ++i) {
    const float4 partial = load(i);
    sum.x += partial.x, sum.y += partial.y, sum.z += partial.z, sum.w += partial.w;
  }
  return sum;
}

// Applies the epilogue to one output and stores it, at any strides. token: index in the call, not in the launch.
// up: the up projection; ignored unless the product is gated.
template <class T>
__device__ __forceinline__ void store_output(const GemmParams& p, std::int64_t token, std::int64_t n, float sum,
                                             float up) {
  const T* const bias = static_cast<const T*>(p.bias);
  if (bias) sum += tile::to_float(bias[n * p.bias_stride]);
  sum = tile::activate(p.activation, sum);
  if (p.gated) sum *= bias ? up + tile::to_float(bias[(n + p.outputs) * p.bias_stride]) : up;
  if (p.residual.data)
    sum +=
        tile::to_float(static_cast<const T*>(p.residual.data)[p.residual.offset(token) + n * p.residual.last_stride]);
  static_cast<T*>(p.y.data)[p.y.offset(token) + n * p.y.last_stride] = tile::from_float<T>(sum);
}

// Applies the epilogue to outputs n .. n + 3 (n a multiple of 4) of any number of tokens; bias is read once. Accesses
// are 8-byte vectors where y and residual allow it.
template <class T>
class Epilogue {
 public:
  __device__ __forceinline__ Epilogue(const GemmParams& p, std::int64_t n)
      : p_(p), n_(n), plain_(p.y_vec4 && p.activation == Activation::none && !p.residual.data) {
    if (!p.bias || !p.y_vec4 || n >= p.outputs) return;
    const T* const bias = static_cast<const T*>(p.bias) + n * p.bias_stride;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      bias_[i] = tile::to_float(bias[i * p.bias_stride]);
      if (p.gated) up_bias_[i] = tile::to_float(bias[(p.outputs + i) * p.bias_stride]);
    }
  }
  // up4: sums of the up projections of the same outputs; ignored unless the product is gated.
  __device__ __forceinline__ void store(std::int64_t token, float4 sums, float4 up4) const {
    // (4) outputs; (4) up projections
    float x[4] = {sums.x, sums.y, sums.z, sums.w}, up[4] = {up4.x, up4.y, up4.z, up4.w};
    if (!p_.y_vec4) {
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
        x[i] = tile::activate(p_.activation, x[i]);
        if (p_.gated) x[i] *= up[i] + up_bias_[i];
      }
      if (p_.residual.data) {
        const T* const residual = static_cast<const T*>(p_.residual.data) + token * p_.residual.stride[0] + n_;
        const uint2 four = tile::load_vec_at<uint2>(residual);
        const float2 low = tile::unpack<T>(four.x), high = tile::unpack<T>(four.y);
        x[0] += low.x, x[1] += low.y, x[2] += high.x, x[3] += high.y;
      }
    }
    T* const y = static_cast<T*>(p_.y.data) + token * p_.y.stride[0] + n_;
    tile::store_vec_at(y, make_uint2(tile::pack<T>(x[0], x[1]), tile::pack<T>(x[2], x[3])));
  }

 private:
  const GemmParams& p_;
  const std::int64_t n_;
  const bool plain_;                      // only bias: no activation (so no gate, which has one), no residual
  float bias_[4] = {}, up_bias_[4] = {};  // (4) each; 0 without a bias
};

}  // namespace rooftile::gpu
