// SPDX-License-Identifier: Apache-2.0
// The 16-bit element types on the device, and their pairs in one register.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cutlass/platform/platform.h>

#include "rooftile/tensor.h"

namespace rooftile::tile {

using half = __half;
using bf16 = __nv_bfloat16;
using cutlass::platform::bit_cast;  // std::bit_cast takes no __half2: its copy constructor is not trivial

__device__ __forceinline__ float to_float(half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(bf16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(float x) { return x; }
template <class T>
__device__ __forceinline__ T from_float(float x);  // round to nearest even
template <>
__device__ __forceinline__ half from_float<half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ bf16 from_float<bf16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}

// Packs two neighbouring elements into one 32-bit register, the first in the low half.
template <class T>
__device__ __forceinline__ std::uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack<half>(float low, float high) {
  return bit_cast<std::uint32_t>(__floats2half2_rn(low, high));
}
template <>
__device__ __forceinline__ std::uint32_t pack<bf16>(float low, float high) {
  return bit_cast<std::uint32_t>(__floats2bfloat162_rn(low, high));
}
template <class T>
__device__ __forceinline__ float2 unpack(std::uint32_t pair);
template <>
__device__ __forceinline__ float2 unpack<half>(std::uint32_t pair) {
  return __half22float2(bit_cast<__half2>(pair));
}
template <>
__device__ __forceinline__ float2 unpack<bf16>(std::uint32_t pair) {
  return __bfloat1622float2(bit_cast<__nv_bfloat162>(pair));
}

// The device type of a 16-bit activation dtype.
template <DType t>
using ElementOf = std::conditional_t<t == DType::f16, half, bf16>;
// Host only: calls f(T{}) with T the device type of a 16-bit activation dtype.
template <class F>
auto with_element16(DType t, F&& f) {
  return t == DType::f16 ? f(half{}) : f(bf16{});
}

}  // namespace rooftile::tile
