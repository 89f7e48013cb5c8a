// SPDX-License-Identifier: Apache-2.0
// RoPE of four values of a token: their loads, and the exact rotation, rounded to the dtype.
#pragma once

#include "kernels/kv_cache/params.h"
#include "kernels/kv_cache/token.cuh"
#include "tile/element.cuh"
#include "tile/rope.cuh"

namespace rooftile::gpu {

// Vec4 number vi of a token to rotate, and the rotation partner of each element; partners past the pairs are 0.
template <class T>
struct RotaryPair {
  Vec4<T> own, partner;
};
struct Angles {
  float cos[4], sin[4];  // (4 elements of a Vec4)
};

template <class T>
__device__ RotaryPair<T> rotary_pair(const RopeTables& r, const TokenHead<T>& from, int vi, int head_dim) {
  RotaryPair<T> pair{load_vec4<InOrder>(from, vi, head_dim), {}};
  const auto partner = [&](int d) { return d < r.pairs ? d + r.pairs : d - r.pairs; };
  if (r.vec4 && from.vec4) {
    if (4 * vi < 2 * r.pairs) pair.partner = vec4_at(from.at + partner(4 * vi));
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (4 * vi + j < 2 * r.pairs) pair.partner.set(j, from.at[partner(4 * vi + j) * from.stride]);
  }
  return pair;
}

template <class T>
__device__ Angles load_angles(const RopeTables& r, std::int64_t position, int vi) {
  const std::int64_t cos = position * r.cos_row, sin = position * r.sin_row;
  Angles a{};
  if (r.vec4) {
    const int i = 4 * vi < r.pairs ? 4 * vi : 4 * vi - r.pairs;
    if (i >= r.pairs) return a;
    const auto read = [&](float (&x)[4], const void* table, std::int64_t at) {
      if (r.fp32) {
        const float4 vec = *cute::recast_ptr<float4>(static_cast<const float*>(table) + at);
        x[0] = vec.x, x[1] = vec.y, x[2] = vec.z, x[3] = vec.w;
      } else {
        const Vec4<T> vec = vec4_at(static_cast<const T*>(table) + at);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = vec[j];
      }
    };
    read(a.cos, r.cos, cos + i);
    read(a.sin, r.sin, sin + i);
  } else {
    const auto read = [&](const void* table, std::int64_t at) {
      return r.fp32 ? static_cast<const float*>(table)[at] : tile::to_float(static_cast<const T*>(table)[at]);
    };
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int d = 4 * vi + j, i = d < r.pairs ? d : d - r.pairs;
      if (i >= r.pairs) continue;
      a.cos[j] = read(r.cos, cos + i * r.cos_column);
      a.sin[j] = read(r.sin, sin + i * r.sin_column);
    }
  }
  return a;
}

template <class T>
__device__ Vec4<T> rotated(const RopeTables& r, const RotaryPair<T>& pair, const Angles& a, int vi) {
  Vec4<T> vec = pair.own;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int d = 4 * vi + j;
    const float y = tile::rotate_exact(pair.own[j], pair.partner[j], a.cos[j], d < r.pairs ? -a.sin[j] : a.sin[j]);
    if (d < 2 * r.pairs) vec.set(j, tile::from_float<T>(y));
  }
  return vec;
}

}  // namespace rooftile::gpu
