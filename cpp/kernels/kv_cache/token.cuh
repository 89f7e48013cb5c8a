// SPDX-License-Identifier: Apache-2.0
// One head of one token, read and written four values at a time.
#pragma once

#include <cstdint>
#include <cute/pointer.hpp>
#include <type_traits>

#include "kernels/kv_cache/params.h"
#include "tile/element.cuh"

namespace rooftile::gpu {

template <class T>
struct alignas(8) Vec4 {   // packed in words: four 16-bit members would take a register each
  std::uint32_t words[2];  // (2 x 2 elements of T)

  __device__ float operator[](int j) const {
    const float2 pair = tile::unpack<T>(words[j / 2]);
    return j % 2 == 0 ? pair.x : pair.y;
  }
  __device__ void set(int j, T x) {
    const std::uint32_t bits = tile::bit_cast<std::uint16_t>(x);
    words[j / 2] = j % 2 == 0 ? (words[j / 2] & 0xffff0000u) | bits : (words[j / 2] & 0xffffu) | bits << 16;
  }
  __device__ T get(int j) const {
    return tile::bit_cast<T>(static_cast<std::uint16_t>(words[j / 2] >> (16 * (j % 2))));
  }
};

// The four elements from `at` on as one 8-byte access.
template <class T>
__device__ auto& vec4_at(T* at) {
  return *cute::recast_ptr<Vec4<std::remove_const_t<T>>>(at);
}

// The channels of Vec4 number vi of a token. K codes are stored in order; V codes store d, d + 8, d + 16, d + 24
// together.
struct InOrder {
  static __device__ int dim(int vi, int j) { return 4 * vi + j; }
};
struct InterleavedBy8 {
  static __device__ int dim(int vi, int j) { return vi / 8 * 32 + vi % 8 + 8 * j; }
};

template <class T>
struct TokenHead {  // one head of one token: D elements
  T* at;
  std::int64_t stride;
  bool vec4;
};
template <class T>
__device__ TokenHead<T> token_head(const TokenTensor& s, int b, int token, int head) {
  return {static_cast<T*>(s.data) + (b * s.batch + token * s.token + head * s.head), s.dim, s.vec4};
}

// Loads Vec4 number vi of a token's head; elements past head_dim are 0.
template <class Order, class T>
__device__ Vec4<T> load_vec4(const TokenHead<T>& from, int vi, int head_dim) {
  if constexpr (std::is_same_v<Order, InOrder>)
    if (from.vec4 && 4 * vi < head_dim) return vec4_at(from.at + 4 * vi);
  Vec4<T> vec{};
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (const int d = Order::dim(vi, j); d < head_dim) vec.set(j, from.at[d * from.stride]);
  return vec;
}

template <class T>
__device__ void store_vec4(const TokenHead<T>& to, int vi, int head_dim, const Vec4<T>& vec) {
  if (to.vec4 && 4 * vi < head_dim) {
    Vec4<T>& at = vec4_at(to.at + 4 * vi);
    at = vec;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (4 * vi + j < head_dim) to.at[(4 * vi + j) * to.stride] = vec.get(j);
}

}  // namespace rooftile::gpu
