// SPDX-License-Identifier: Apache-2.0
// The fold of schedule.h on the device: leaves of one task arrive in order, full nodes are merged as soon as they are
// complete, and what a run can merge no further leaves through `emit`.
#pragma once

#include "kernels/decode/schedule.h"
#include "tile/softmax.cuh"

namespace rooftile::gpu {

// A thread's share of a softmax state: (m, l) of K columns and S values of them. One column: pieces of four channels.
// More: tiles in the layout of a product (tile/mma.cuh), two columns each, rows being channels.
template <int K, int S>
struct Node {
  float m[K], l[K], o[S];
  // Which column value i belongs to.
  static constexpr int column(int i) { return K == 1 ? 0 : i / (2 * S / K) * 2 + i % 2; }
};

template <int K, int S>
__device__ __forceinline__ Node<K, S> merge(const Node<K, S>& a, const Node<K, S>& b) {
  Node<K, S> r;
  tile::MergeWeights w[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    w[k] = tile::merge_weights(a.m[k], b.m[k]);
    r.m[k] = w[k].m;
    r.l[k] = tile::merge_values(a.l[k], b.l[k], w[k]);
  }
#pragma unroll
  for (int i = 0; i < S; ++i) r.o[i] = tile::merge_values(a.o[i], b.o[i], w[Node<K, S>::column(i)]);
  return r;
}

// Left halves that wait for their right ones: at most one a level. Threads of a warp that share columns share a place
// for their (m, l). The last levels are touched once in some leaves: the values of all but the first `Near` wait in the
// workspace.
template <int K, int S, int Threads, int Places, int Near>
struct FoldMemory {
  static constexpr int near = Near, deep = fold_levels - Near;
  float o[near][S][Threads];
  float m[fold_levels][K][Places], l[fold_levels][K][Places];
  __device__ float* values(int level, float* deep) {
    return level < near ? o[level][0] : deep + (level - near) * S * Threads;
  }
};

template <int K, int S, int Threads, int Places, int Near>
class Fold {
 public:
  // deep: [fold_levels - Near][S][Threads] floats of the block. first: the run's first leaf; only: it is all of the
  // run, but not of its task. thread: this one; place: of its columns.
  __device__ Fold(FoldMemory<K, S, Threads, Places, Near>& memory, float* deep, int thread, int place, int first,
                  bool only)
      : memory_(memory), deep_(deep), thread_(thread), place_(place), first_(first), only_(only) {}

  // The node of leaf `at`, the next in order.
  template <class Emit>
  __device__ void push(Node<K, S> node, int at, const Emit& emit) {
    int level = 0;
    while (level + 1 < fold_levels && (at >> level) % 2 == 1 && at - (1 << level) >= first_) {
      node = merge(load(level), node);
      waiting_ &= ~(1u << level);
      at -= 1 << level;
      ++level;
    }
    if (only_ || (level + 1 < fold_levels &&
                  (at >> level) % 2 == 1)) {  // its left half, or what follows, belongs to another block
      emit(node);
      return;
    }
    __syncwarp();  // threads of one place have read what is overwritten here
#pragma unroll
    for (int k = 0; k < K; ++k) {
      memory_.m[level][k][place_] = node.m[k];
      memory_.l[level][k][place_] = node.l[k];
    }
#pragma unroll
    for (int i = 0; i < S; ++i) values(level)[i * Threads] = node.o[i];
    waiting_ |= 1u << level;
    __syncwarp();
  }

  // The run ends inside its task: what waits, in order.
  template <class Emit>
  __device__ void flush(const Emit& emit) {
    for (int level = fold_levels - 1; level >= 0; --level)
      if (waiting_ >> level & 1) emit(load(level));
    waiting_ = 0;
  }

  // The run was the whole task: its result.
  __device__ Node<K, S> finish() {
    Node<K, S> result;  // some level waits
    bool any = false;
    for (int level = 0; level < fold_levels; ++level) {
      if (!(waiting_ >> level & 1)) continue;
      result = any ? merge(load(level), result) : load(level);
      any = true;
    }
    waiting_ = 0;
    return result;
  }

 private:
  __device__ Node<K, S> load(int level) const {
    Node<K, S> node;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      node.m[k] = memory_.m[level][k][place_];
      node.l[k] = memory_.l[level][k][place_];
    }
#pragma unroll
    for (int i = 0; i < S; ++i) node.o[i] = values(level)[i * Threads];
    return node;
  }
  // This thread's values of a level, Threads apart.
  __device__ float* values(int level) const { return memory_.values(level, deep_) + thread_; }

  FoldMemory<K, S, Threads, Places, Near>& memory_;
  float* deep_;
  int thread_, place_, first_;
  bool only_;
  unsigned waiting_ = 0;
};

}  // namespace rooftile::gpu
