// SPDX-License-Identifier: Apache-2.0
// The tree of schedule.h over one column of a task, by a warp at once, from nodes that lie anywhere.
// All (m, l) and the first values are fetched together. A butterfly of shuffles gives every lane the maximum of each
// node above its leaf, so all factors are found side by side; then every thread runs the same N - 1 multiply-adds on
// its values. Leaves that are not there are empty states, and a node that came merged meets them alone: factors of 1
// and 0, which change no bit. So the tree is the fold's.
#pragma once

#include "kernels/decode/schedule.h"
#include "tile/softmax.cuh"

namespace rooftile::gpu {

// What the lanes of a warp tell each other: of N leaves, what each is multiplied with on level 1, then of N / 2 nodes
// on level 2 ...
struct TreeMemory {
  alignas(8) float factor[2 * max_leaves];
};

// N: a power of two, at least as many as there are leaves. Every warp of a block works it out for itself: no barriers.
template <int N>
class Tree {
 public:
  // statistics(leaf) fetches (m, l) of the node that starts there, l below 0 if a page was none; (-inf, 0) if there is
  // none.
  template <class Statistics>
  __device__ __forceinline__ explicit Tree(const Statistics& statistics) {
#pragma unroll
    for (int i = 0; i < own; ++i) {
      const float2 ml = statistics(leaf_of(i));
      m_[i] = ml.x;
      l_[i] = ml.y;
    }
  }

  // The factors of all merges, and the whole's (m, l), in all lanes. False in all of them: a page was none.
  __device__ __forceinline__ bool weigh(TreeMemory& memory) {
    bool bad = false;
#pragma unroll
    for (float l : l_) bad |= l < 0.0f;
    if (__any_sync(0xffffffffu, bad)) return false;
    float factor[own][across];
#pragma unroll
    for (int level = 1; level <= across; ++level)
#pragma unroll
      for (int i = 0; i < own; ++i) {
        const int side = 1 << (level - 1), leaf = leaf_of(i);
        factor[i][level - 1] = follow(m_[i], __shfl_xor_sync(0xffffffffu, m_[i], side));
        if (lane() < N && leaf % side == 0) memory.factor[first(level) + leaf / side] = factor[i][level - 1];
      }
#pragma unroll
    for (int level = 1; level <= across; ++level)
#pragma unroll
      for (int i = 0; i < own; ++i) {
        const int side = 1 << (level - 1);
        const float f = factor[i][level - 1], of_other = __shfl_xor_sync(0xffffffffu, f, side),
                    other = __shfl_xor_sync(0xffffffffu, l_[i], side);
        const bool right = lane() & side;
        l_[i] = right ? tile::merge_values(other, l_[i], {0.0f, of_other, f})
                      : tile::merge_values(l_[i], other, {0.0f, f, of_other});
      }
    if constexpr (own == 2) {  // the last merge is a lane's own
      const float m_b = m_[1], f_b = follow(m_[1], m_[0]), f_a = follow(m_[0], m_b);
      l_[0] = tile::merge_values(l_[0], l_[1], {0.0f, f_a, f_b});
      if (lane() == 0) {
        memory.factor[first(across + 1)] = f_a;
        memory.factor[first(across + 1) + 1] = f_b;
      }
    }
    __syncwarp();  // the factors are there
    return true;
  }

  // Of the whole, after weigh().
  __device__ __forceinline__ float m() const { return m_[0]; }
  __device__ __forceinline__ float l() const { return l_[0]; }
  // A value, from those of the nodes, 0 where there is none. In place: node (level, i) ends up at i << level.
  __device__ __forceinline__ static float value(const TreeMemory& memory, float (&o)[N]) {
    return merge_levels<1>(memory, o);
  }

 private:
  static constexpr int own = N > 32 ? 2 : 1;      // leaves of a lane
  static constexpr int across = N == 16 ? 4 : 5;  // levels of which two lanes have the two sides
  static_assert(N == 16 || N == 32 || N == 64);
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
  __device__ __forceinline__ static int leaf_of(int i) { return lane() % N + 32 * i; }
  // Where the factors of a level begin.
  static constexpr int first(int level) { return 2 * N - (2 * N >> (level - 1)); }
  // The maximum of two nodes in the place of the first's, and what the first is multiplied with (merge_weights).
  __device__ __forceinline__ static float follow(float& m, float other) {
    const float of_this = m;
    m = fmaxf(m, other);
    return exp2f(__fsub_rn(of_this, m == -INFINITY ? 0.0f : m));
  }

  template <int Level>
  __device__ __forceinline__ static float merge_levels(const TreeMemory& memory, float (&o)[N]) {
#pragma unroll
    for (int i = 0; i < N >> Level; ++i) {
      const float2 factors = *reinterpret_cast<const float2*>(&memory.factor[first(Level) + 2 * i]);
      o[i << Level] =
          tile::merge_values(o[i << Level], o[(i << Level) + (1 << (Level - 1))], {0.0f, factors.x, factors.y});
    }
    if constexpr (N >> Level > 1) return merge_levels<Level + 1>(memory, o);
    else return o[0];
  }

  float m_[own], l_[own];
};

}  // namespace rooftile::gpu
