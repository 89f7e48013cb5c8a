// SPDX-License-Identifier: Apache-2.0
// Softmax state of a CTA whose warps share one step of tokens (step_kv). Each warp computes the weights of its own KV
// tile. All warps read all weights from shared memory, and each multiplies them with its own channels of V.
#pragma once

#include "kernels/decode/mma_tile.cuh"

namespace rooftile::gpu {

// N: MMA n-tiles of 8 packed rows. C: MMA m-tiles of 16 channels of one warp.
template <int N, int C, KvFormat F>
struct CtaState {
  // m: reference maximum of the weights, at most rescale_threshold below the row's maximum; the same in all warps. l:
  // this lane's part of the sum of weights. min_term: this lane's part of the sum of weight x zero value, the part of
  // the output that is the same for all channels.
  float m[N][2];         // (n-tile, packed row 2t + j)
  float l[N][2];         // (n-tile, packed row 2t + j)
  float min_term[N][2];  // (n-tile, packed row 2t + j)
  // Tile n * C + i holds channels 16 i + g (elements 0, 1) and 16 i + 8 + g (elements 2, 3) of packed rows 8 n + 2t and
  // 8 n + 2t + 1, summed over all tokens of the CTA.
  float o[N * C][4];          // (N x C mma tiles of 16 channels, 4)
  float zp_correction[N][4];  // (n-tile, 4): zero-point correction of o, over the KV tile of this warp
  float o_scale;              // a power of two: the sum is o * o_scale; 0: no token yet. The same in all warps
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

// Stores one lane's four weights of 16 tokens. sP (8 packed rows, 16 tokens).
template <class T, class Traits, class STensor>
__device__ __forceinline__ void store_weights(const float (&p)[4], const STensor& sP, int lane) {
  using namespace cute;
  Tensor sPt = make_tensor(sP.data(), select<1, 0>(sP.layout()));              // (16 tokens, 8 packed rows)
  Tensor tPsP = typename Traits::TiledMma{}.get_slice(lane).partition_C(sPt);  // (MMA, 1, 1)
  Tensor pairs = recast<std::uint32_t>(tPsP);                                  // (2, 1, 1): two packed rows each
  pairs(0) = tile::pack<T>(p[0], p[1]);
  pairs(1) = tile::pack<T>(p[2], p[3]);
}
// Weights of 32 tokens as B operands. sP (8 packed rows, 32 tokens, N) -> (MMA, two k-tiles of 16 tokens, N).
template <class Traits, class STensor>
__device__ __forceinline__ auto load_weights(const STensor& sP, int lane) {
  using namespace cute;
  typename Traits::SmemCopyP smem_copy;
  const auto thr_copy = smem_copy.get_slice(lane);
  constexpr int N = decltype(size<2>(sP))::value;
  Tensor rP = make_tensor<typename Traits::Element>(Shape<Shape<_2, _2>, _2, Int<N>>{});  // (MMA, k-tile, N)
  CUTE_UNROLL
  for (int n = 0; n < N; ++n) {
    Tensor fragment = make_tensor(rP(_, _, n).data(), Shape<Shape<_2, _2>, _1, _2>{});  // (MMA, 1, k-tile)
    copy(smem_copy, thr_copy.partition_S(sP(_, _, n)), thr_copy.retile_D(fragment));
  }
  return rP;
}

// Scale and zero value (the value of the zero-point code) of V for 32 tokens: lane i holds token i. A token that no
// packed row sees gets 0, whatever is in memory.
template <KvFormat F>
struct StepScales {
  float scale = 0.0f, zero_value = 0.0f;  // V's scale; min + 8 * scale
  std::uint32_t max_scale_bits = 0;       // bits of the largest magnitude among the finite scales

  template <class T, int D>
  __device__ __forceinline__ StepScales(const CodeTile<F, D>& x, bool wanted, int lane, T) {
    scale = wanted ? stored_scale<T>(x.v_scale()[lane]) : 0.0f;
    if constexpr (has_min(F)) zero_value = wanted ? stored_scale<T>(x.second_scale()[lane]) + 8.0f * scale : 0.0f;
    const std::uint32_t magnitude = __float_as_uint(scale) & 0x7fffffffu;
    max_scale_bits = __reduce_max_sync(0xffffffffu, magnitude < 0x7f800000u ? magnitude : 0u);
  }
};

}  // namespace rooftile::gpu
