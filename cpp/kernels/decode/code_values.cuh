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
// of n-tile n, in multiples of code_unit. weights: (k-tile of 16 tokens, n-tile).
template <KvFormat F, int D, int C, int N>
__device__ __forceinline__ void pv_codes(float (*o)[4], const tile::FragmentB (&weights)[2][N], const CodeTile<F, D>& x,
                                         int block32, int lane) {
  using Kind = KvTraits<F>;
  // Fragment blocks of 512 bytes, 16 bytes a lane in lane order. 8-bit codes: 16 tokens x 32 channels; 4-bit: 32 x 32.
  const auto block = [&](int i) { return tile::load_vec_at<uint4>(x.v + (block32 * 32 + lane + i * 32) * 16); };
  if constexpr (!Kind::nibbles) {
#pragma unroll
    for (int mt = 0; mt < 2; ++mt)
#pragma unroll
      for (int dt = 0; dt < C / 2; ++dt) {
        const uint4 vec = block(mt * (D / 32) + dt);
#pragma unroll
        for (int j = 0; j < 4; j += 2) {  // word j: channel 8 j + g; bytes: tokens 2t, 2t + 1, 2t + 8, 2t + 9
          tile::FragmentA a;
          Kind::decode(word(vec, j), a.r[0], a.r[2]);
          Kind::decode(word(vec, j + 1), a.r[1], a.r[3]);
#pragma unroll
          for (int n = 0; n < N; ++n) tile::mma<tile::half>(o[n * C + 2 * dt + j / 2], a, weights[mt][n]);
        }
      }
  } else {
#pragma unroll
    for (int dt = 0; dt < C / 2; ++dt) {
      const uint4 vec = block(dt);
#pragma unroll
      for (int mt = 0; mt < 2; ++mt) {  // word w: tokens 8 w + 2t and 8 w + 2t + 1; pair r: channel 8 r + g
        std::uint32_t even[4], odd[4];  // (pair): of the even and the odd word
        Kind::decode(word(vec, 2 * mt), even);
        Kind::decode(word(vec, 2 * mt + 1), odd);
#pragma unroll
        for (int r = 0; r < 4; r += 2)
#pragma unroll
          for (int n = 0; n < N; ++n)
            tile::mma<tile::half>(o[n * C + 2 * dt + r / 2], {{even[r], even[r + 1], odd[r], odd[r + 1]}},
                                  weights[mt][n]);
      }
    }
  }
}

}  // namespace rooftile::gpu
