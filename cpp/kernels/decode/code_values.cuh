// SPDX-License-Identifier: Apache-2.0
// The values of a KV tile of 32 tokens in codes.
//   O^T [D, 8 N packed rows] += V^T [D, 32 tokens] P^T      V^T is the A operand, channels are its rows
#pragma once

#include "kernels/decode/code_scores.cuh"
#include "tile/copy.cuh"
#include "tile/mma.cuh"

namespace rooftile::gpu {

// Adds weight x zero point of 32 tokens to the zero-point correction (n-tile, 4).
template <KvFormat F, int N>
__device__ __forceinline__ void add_zero_point(float (&correction)[N][4], const tile::FragmentB (&weights)[2][N]) {
  constexpr std::uint32_t zero_point = KvTraits<F>::zero_point_pair;
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int mt = 0; mt < 2; ++mt)
      tile::mma<tile::half>(correction[n], {{zero_point, zero_point, zero_point, zero_point}}, weights[mt][n]);
}

// Adds weight x code of 32 tokens to C O^T tiles of 16 channels, from channel 32 * block32 on: o[n * C + i] is tile i
// of n-tile n; its codes count as code * code_one. weights: (k-tile of 16 tokens, n-tile).
template <KvFormat F, int D, int C, int N>
__device__ __forceinline__ void pv_codes(float (*o)[4], const tile::FragmentB (&weights)[2][N], const CodeTile<F, D>& x,
                                         int block32, int lane) {
  using Kind = KvTraits<F>;
  constexpr int k_tiles = Kind::v_k_tiles;
#pragma unroll
  for (int first = 0; first < 2; first += k_tiles)
#pragma unroll
    for (int dt = 0; dt < C / 2; ++dt) {
      // a fragment block: 16 k_tiles tokens x 32 channels in 512 bytes, 16 bytes a lane in lane order
      std::uint32_t codes[4];
      load_words(codes, x.v + ((block32 + first / k_tiles * (D / 32) + dt) * 32 + lane) * 16);
      tile::FragmentA a[k_tiles][2];  // (k-tile of 16 tokens, m-tile of 16 channels)
      Kind::dequant_v(codes, a);
#pragma unroll
      for (int kt = 0; kt < k_tiles; ++kt)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int n = 0; n < N; ++n)
            tile::mma<tile::half>(o[n * C + 2 * dt + half], a[kt][half], weights[first + kt][n]);
    }
}

}  // namespace rooftile::gpu
