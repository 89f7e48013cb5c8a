// SPDX-License-Identifier: Apache-2.0
// K's scales of a kivi tile as tensor cores take them.
#pragma once

#include <cstdint>
#include <cute/pointer.hpp>
#include <type_traits>

#include "kernels/decode/code_tile.cuh"
#include "tile/copy.cuh"
#include "tile/element.cuh"

namespace rooftile::gpu {

// K's scales and minima of a kivi tile as fp16, divided by a power of two, `scale`. fp16 cache: 1. bf16 cache, whose
// range is wider: within a factor of two of the largest magnitude. A warp that has the tile to itself (up to 128
// channels) makes them fp16 in shared memory; else each lane converts what it loads. Made by whole warps.
template <class T, KvFormat F, int D>
struct GroupScale {
  static constexpr bool converts = is_kivi(F) && std::is_same_v<T, tile::bf16>, in_place = converts && D <= 128;
  float scale = 1.0f;
  std::uint32_t inverse = 0;  // 1 / scale as a pair of bf16

  __device__ __forceinline__ GroupScale(CodeTile<F, D>& x, int lane) {
    if constexpr (converts) {
      constexpr int pairs = sizeof(x.k_scales) / 4, lane_pairs = (pairs + 31) / 32;
      const auto there = [lane](int i) { return pairs % 32 == 0 || 32 * i + lane < pairs; };
      std::uint32_t pair[lane_pairs];  // (lane_pairs) pairs of bf16
      std::uint32_t top = 0;           // bits of the largest magnitude
#pragma unroll
      for (int i = 0; i < lane_pairs; ++i)
        if (there(i)) {
          pair[i] = tile::load_vec_at<std::uint32_t>(x.k_scales + 2 * (32 * i + lane));
          top = max(top, max(pair[i] & 0x7fff, pair[i] >> 16 & 0x7fff));
        }
      const std::uint32_t exponent = __reduce_max_sync(0xffffffffu, top) >> 7;
      const std::uint32_t biased = exponent > 0 && exponent < 254 ? exponent : 127;  // zeros or not finite: no scaling
      scale = __uint_as_float(biased << 23);
      inverse = (254 - biased) * 0x00800080u;
      if constexpr (in_place) {
        __syncwarp();  // all lanes have read
#pragma unroll
        for (int i = 0; i < lane_pairs; ++i)
          if (there(i)) *cute::recast_ptr<std::uint32_t>(x.k_scales + 2 * (32 * i + lane)) = divided(pair[i]);
        __syncwarp();  // all lanes have written
      }
    }
  }
  // Of two scales or minima of the tile.
  __device__ __forceinline__ std::uint32_t f16(std::uint32_t pair) const {
    if constexpr (converts && !in_place) return divided(pair);
    else return pair;
  }

 private:
  __device__ __forceinline__ std::uint32_t divided(std::uint32_t pair) const {
    const __nv_bfloat162 x = __hmul2(tile::bit_cast<__nv_bfloat162>(pair), tile::bit_cast<__nv_bfloat162>(inverse));
    return tile::pack<tile::half>(__low2float(x), __high2float(x));
  }
};

}  // namespace rooftile::gpu
