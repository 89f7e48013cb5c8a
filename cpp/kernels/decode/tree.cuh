// SPDX-License-Identifier: Apache-2.0
// The tree of schedule.h over one column of a task, by a warp at once, from nodes that lie anywhere.
// All (m, l) and the first values are fetched together; each warp works out the tree's (m, l) and the weights of every merge;
// then every thread runs the same N - 1 multiply-adds on its values. Leaves that are not there are empty states, and a node
// that came merged meets empty ones: both change no bit. So the tree is the fold's.
#pragma once

#include "kernels/decode/schedule.h"
#include "tile/softmax.cuh"

namespace rooftile::gpu {

// What the lanes tell each other, a leaf each and a merge each.
struct TreeMemory {
  float m[max_leaves], l[max_leaves];
  tile::MergeWeights weights[max_leaves - 1];   // of node (level, i) of N leaves at N - (N >> (level - 1)) + i
};

// N: a power of two, at least as many as there are leaves. Every warp of a block works it out for itself: no barriers.
template <int N>
class Tree {
 public:
  // statistics(leaf) fetches (m, l) of the node that starts there, l below 0 if a page was none; (-inf, 0) if there is none.
  template <class Statistics>
  __device__ __forceinline__ explicit Tree(const Statistics& statistics) {
#pragma unroll
    for (int i = 0; i < own; ++i) {
      const int leaf = lane() + i * 32;
      ml_[i] = leaf < N ? statistics(leaf) : make_float2(-INFINITY, 0.0f);
    }
  }

  // The weights of all merges. level_of(leaf): of the node that starts there; -1: none does. False in all lanes: a page was none.
  template <class Level>
  __device__ __forceinline__ bool weigh(TreeMemory& memory, const Level& level_of) {
    bool bad = false;
#pragma unroll
    for (int i = 0; i < own; ++i)
      if (const int leaf = lane() + i * 32; leaf < N) {
        memory.m[leaf] = ml_[i].x;
        memory.l[leaf] = ml_[i].y;
        bad |= ml_[i].y < 0.0f;
      }
    __syncwarp();   // all (m, l) are there
    if (__any_sync(0xffffffffu, bad)) return false;
    // After step `level` lane i holds node (level, i).
    const int at = lane();
    float m_own = 0.0f, l_own = 0.0f;
    int first = 0;
#pragma unroll
    for (int level = 1; N >> level > 0; ++level) {
      const int nodes = N >> level, start = at << level;
      const float m_a = level == 1 ? memory.m[2 * at % N] : __shfl_sync(0xffffffffu, m_own, 2 * at % 32);
      const float l_a = level == 1 ? memory.l[2 * at % N] : __shfl_sync(0xffffffffu, l_own, 2 * at % 32);
      const float m_b = level == 1 ? memory.m[(2 * at + 1) % N] : __shfl_sync(0xffffffffu, m_own, (2 * at + 1) % 32);
      const float l_b = level == 1 ? memory.l[(2 * at + 1) % N] : __shfl_sync(0xffffffffu, l_own, (2 * at + 1) % 32);
      if (at < nodes) {
        tile::MergeWeights merge{memory.m[start], 1.0f, 0.0f};
        l_own = memory.l[start];
        if (level_of(start) < level) {   // did not come merged
          merge = tile::merge_weights(m_a, m_b);
          l_own = tile::merge_values(l_a, l_b, merge);
        }
        m_own = merge.m;
        memory.weights[first + at] = merge;
      }
      first += nodes;
    }
    if (at == 0) memory.l[0] = l_own;
    __syncwarp();   // the weights are there
    return true;
  }

  // Of the whole, after weigh().
  __device__ __forceinline__ static float m(const TreeMemory& memory) { return memory.weights[N - 2].m; }
  __device__ __forceinline__ static float l(const TreeMemory& memory) { return memory.l[0]; }
  // A value, from those of the nodes, 0 where there is none. In place: node (level, i) ends up at i << level.
  __device__ __forceinline__ static float value(const TreeMemory& memory, float (&o)[N]) { return merge_levels<1>(memory, o); }

 private:
  template <int Level>
  __device__ __forceinline__ static float merge_levels(const TreeMemory& memory, float (&o)[N]) {
#pragma unroll
    for (int i = 0; i < N >> Level; ++i)
      o[i << Level] = tile::merge_values(o[i << Level], o[(i << Level) + (1 << (Level - 1))], memory.weights[N - (N >> (Level - 1)) + i]);
    if constexpr (N >> Level > 1) return merge_levels<Level + 1>(memory, o);
    else return o[0];
  }

  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

  static constexpr int own = (N + 31) / 32;   // leaves of a lane
  float2 ml_[own];
};

}  // namespace rooftile::gpu
