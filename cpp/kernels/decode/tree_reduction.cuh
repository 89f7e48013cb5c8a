// SPDX-License-Identifier: Apache-2.0
// The reduction tree of scheduler.h for one packed row of a work tile, computed by a warp from partials at any
// addresses. All (m, l) and the first values are loaded together. A butterfly of shuffles gives every lane the maximum
// of each subtree above its split, so all merge factors are computed in parallel. Then every thread runs the same N - 1
// multiply-adds on its channel. Missing splits are empty partials (-inf, 0). A partial that arrives merged only meets
// empty partials, with factors 1 and 0, which change no bit. So the result equals that of PartialReduction.
#pragma once

#include "kernels/decode/scheduler.h"
#include "tile/copy.cuh"
#include "tile/softmax.cuh"

namespace rooftile::gpu {

// Merge factors, written and read by one warp: N factors of level 1, N / 2 of level 2, ...
struct TreeStorage {
  alignas(8) float factor[2 * max_splits];  // levels one after another
};

// N: a power of two, at least the number of splits. Every warp computes its own factors, so no CTA barrier is needed.
template <int N>
class TreeReduction {
 public:
  // load_ml(split) returns (m, l) of the partial that starts at that split: l < 0 marks an invalid page, (-inf, 0) a
  // missing partial.
  template <class LoadMl>
  __device__ __forceinline__ explicit TreeReduction(const LoadMl& load_ml) {
#pragma unroll
    for (int i = 0; i < splits_per_lane; ++i) {
      const float2 ml = load_ml(split_of(i));
      m_[i] = ml.x;
      l_[i] = ml.y;
    }
  }

  // Computes the factors of all merges and the (m, l) of the whole row, in all lanes. Returns false in all lanes if a
  // partial is marked invalid.
  __device__ __forceinline__ bool compute_factors(TreeStorage& smem) {
    bool invalid = false;
#pragma unroll
    for (float l : l_) invalid |= l < 0.0f;
    if (__any_sync(0xffffffffu, invalid)) return false;
    float factor[splits_per_lane][shuffle_levels];  // (split, level)
#pragma unroll
    for (int level = 1; level <= shuffle_levels; ++level)
#pragma unroll
      for (int i = 0; i < splits_per_lane; ++i) {
        const int half = 1 << (level - 1), split = split_of(i);
        factor[i][level - 1] = raise_max(m_[i], __shfl_xor_sync(0xffffffffu, m_[i], half));
        if (lane() < N && split % half == 0) smem.factor[factors_begin(level) + split / half] = factor[i][level - 1];
      }
#pragma unroll
    for (int level = 1; level <= shuffle_levels; ++level)
#pragma unroll
      for (int i = 0; i < splits_per_lane; ++i) {
        const int half = 1 << (level - 1);
        const float f = factor[i][level - 1], of_other = __shfl_xor_sync(0xffffffffu, f, half),
                    other = __shfl_xor_sync(0xffffffffu, l_[i], half);
        const bool right = lane() & half;
        l_[i] = right ? tile::merge_values(other, l_[i], {0.0f, of_other, f})
                      : tile::merge_values(l_[i], other, {0.0f, f, of_other});
      }
    if constexpr (splits_per_lane == 2) {  // both sides of the last merge are in one lane
      const float m_b = m_[1], f_b = raise_max(m_[1], m_[0]), f_a = raise_max(m_[0], m_b);
      l_[0] = tile::merge_values(l_[0], l_[1], {0.0f, f_a, f_b});
      if (lane() == 0) {
        smem.factor[factors_begin(shuffle_levels + 1)] = f_a;
        smem.factor[factors_begin(shuffle_levels + 1) + 1] = f_b;
      }
    }
    __syncwarp();  // all lanes' factors are in shared memory
    return true;
  }

  // (m, l) of the whole row, after compute_factors().
  __device__ __forceinline__ float m() const { return m_[0]; }
  __device__ __forceinline__ float l() const { return l_[0]; }
  // One channel of the whole row, from o[split] of the partials, 0 where missing. In place: the partial at (level, i)
  // is in o[i << level].
  __device__ __forceinline__ static float reduce(const TreeStorage& smem, float (&o)[N]) {
    return reduce_levels<1>(smem, o);
  }

 private:
  static constexpr int splits_per_lane = N > 32 ? 2 : 1;  // splits of a lane
  static constexpr int shuffle_levels = N == 16 ? 4 : 5;  // levels whose two sides are in two lanes
  static_assert(N == 16 || N == 32 || N == 64);
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ static int split_of(int i) { return lane() % N + 32 * i; }
  // Index of the first factor of a level.
  static constexpr int factors_begin(int level) { return 2 * N - (2 * N >> (level - 1)); }
  // Replaces m by max(m, other) and returns the factor of m's side (merge_weights).
  __device__ __forceinline__ static float raise_max(float& m, float other) {
    const float old_m = m;
    m = fmaxf(m, other);
    return exp2f(__fsub_rn(old_m, m == -INFINITY ? 0.0f : m));
  }

  template <int Level>
  __device__ __forceinline__ static float reduce_levels(const TreeStorage& smem, float (&o)[N]) {
#pragma unroll
    for (int i = 0; i < N >> Level; ++i) {
      const float2 factors = tile::load_vec_at<float2>(&smem.factor[factors_begin(Level) + 2 * i]);
      o[i << Level] =
          tile::merge_values(o[i << Level], o[(i << Level) + (1 << (Level - 1))], {0.0f, factors.x, factors.y});
    }
    if constexpr (N >> Level > 1) return reduce_levels<Level + 1>(smem, o);
    else return o[0];
  }

  float m_[splits_per_lane], l_[splits_per_lane];  // (split)
};

}  // namespace rooftile::gpu
