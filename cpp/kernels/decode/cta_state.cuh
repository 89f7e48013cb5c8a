// SPDX-License-Identifier: Apache-2.0
// What a block whose warps work on one step of tokens together knows of those it has seen.
// Each warp finds the weights of the tokens it has the scores of, all of them read all weights from shared memory, and
// each multiplies them with channels of its own.
#pragma once

#include "kernels/decode/mma_tile.cuh"

namespace rooftile::gpu {

// N: times 8 columns. C: times 16 channels of the warp's own.
template <int N, int C, KvFormat F>
struct CtaState {
  float m[N][2];         // what the weights count from, at most `slack` below the largest logit. The same in all warps
  float l[N][2];         // this lane's share of the sum of the weights
  float min_term[N][2];  // of the part of every output that does not depend on the channel; this lane's share
  // tile i of columns n at n * C + i: (channels 16 i + g, columns 2t, 2t + 1), (16 i + 8 + g, ...), of all tokens
  float o[N * C][4];
  float zp_correction[N][4];  // how much all of o have too much, a part of the tokens each warp
  float o_scale;              // o counts in this unit, a power of two; 0: no token yet. The same in all warps
  bool empty;                 // no step yet

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int n = 0; n < N; ++n) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        m[n][j] = -INFINITY;
        l[n][j] = min_term[n][j] = 0.0f;
      }
      for (float& x : zp_correction[n]) x = 0.0f;
    }
#pragma unroll
    for (auto& tile : o)
      for (float& x : tile) x = 0.0f;
    o_scale = 0.0f;
    empty = true;
  }
};

__device__ __forceinline__ float weight_of(float logit, float m) {
  return tile::fast_exp2(logit - (m == -INFINITY ? 0.0f : m));
}

// A step's weights lie as [8 columns' tile][token][8]: 16-bit elements, 16 bytes a token.
// One lane's four weights of 16 tokens.
template <class T>
__device__ __forceinline__ void store_weights(T* rows, const float (&p)[4], int lane) {
  auto* const at = reinterpret_cast<std::uint32_t*>(rows + lane / 4 * mma_n + lane % 4 * 2);
  at[0] = tile::pack<T>(p[0], p[1]);
  at[8 * mma_n / 2] = tile::pack<T>(p[2], p[3]);
}
// Those of 32 tokens as operands B: of the first 16 in the first two registers.
template <class T>
__device__ __forceinline__ tile::FragmentA load_weights(const T* rows, int lane) {
  return tile::load_8x8x4_transposed(rows + lane * mma_n);
}

// What the values of 32 tokens are weighed with besides the probabilities: lane i has token i's. A token that no column
// sees has 0, whatever the memory holds.
template <KvFormat F>
struct StepScales {
  float scale = 0.0f, zero_value = 0.0f;  // the scale; what the minimum makes of the middle of the codes
  std::uint32_t max_scale_bits = 0;       // of the finite scales' magnitudes, the largest one's bits

  template <class T, int D>
  __device__ __forceinline__ StepScales(const CodeTile<F, D>& x, bool wanted, int lane, T) {
    scale = wanted ? stored_scale<T>(x.v_scale()[lane]) : 0.0f;
    if constexpr (has_min(F)) zero_value = wanted ? stored_scale<T>(x.second_scale()[lane]) + 8.0f * scale : 0.0f;
    const std::uint32_t magnitude = __float_as_uint(scale) & 0x7fffffffu;
    max_scale_bits = __reduce_max_sync(0xffffffffu, magnitude < 0x7f800000u ? magnitude : 0u);
  }
};

}  // namespace rooftile::gpu
