// SPDX-License-Identifier: Apache-2.0
// The fold of schedule.h on the device: leaves of one task arrive in order, full nodes are merged as soon as they are
// complete, and what a run can merge no further leaves through `emit`.
#pragma once

#include "kernels/decode/schedule.h"
#include "tile/softmax.cuh"

namespace rooftile::gpu {

// A thread's share of a softmax state: S values of one column, in pieces of four (combine: one value).
template <int S>
struct Node {
  float m, l, o[S];
};

template <int S>
__device__ __forceinline__ Node<S> merge(const Node<S>& a, const Node<S>& b) {
  const tile::MergeWeights w = tile::merge_weights(a.m, b.m);
  Node<S> r;
  r.m = w.m;
  r.l = tile::merge_values(a.l, b.l, w);
#pragma unroll
  for (int i = 0; i < S; ++i) r.o[i] = tile::merge_values(a.o[i], b.o[i], w);
  return r;
}

// Left halves that wait for their right ones: at most one a level. Threads that share a column share its (m, l). The last
// levels are touched once in some leaves: the values of all but the first `Near` wait in the workspace.
template <int S, int Threads, int Columns, int Near>
struct FoldMemory {
  static constexpr int near = Near, deep = fold_levels - Near;
  float o[near][S][Threads];
  float m[fold_levels][Columns], l[fold_levels][Columns];
  __device__ float* values(int level, float* deep) { return level < near ? o[level][0] : deep + (level - near) * S * Threads; }
};

template <int S, int Threads, int Columns, int Near>
class Fold {
 public:
  // deep: [fold_levels - Near][S][Threads] floats of the block. first: the run's first leaf. thread, column: this thread's place.
  __device__ Fold(FoldMemory<S, Threads, Columns, Near>& memory, float* deep, int thread, int column, int first)
      : memory_(memory), deep_(deep), thread_(thread), column_(column), first_(first) {}

  // The node of leaf `at`, the next in order.
  template <class Emit>
  __device__ void push(Node<S> node, int at, const Emit& emit) {
    int level = 0;
    while (level + 1 < fold_levels && (at >> level) % 2 == 1 && at - (1 << level) >= first_) {
      node = merge(load(level), node);
      waiting_ &= ~(1u << level);
      at -= 1 << level;
      ++level;
    }
    if (level + 1 < fold_levels && (at >> level) % 2 == 1) {   // its left half belongs to another block
      emit(node);
      return;
    }
    __syncwarp();   // threads of one column have read what is overwritten here
    memory_.m[level][column_] = node.m;
    memory_.l[level][column_] = node.l;
#pragma unroll
    for (int i = 0; i < S; ++i) values(level)[i * Threads] = node.o[i];
    waiting_ |= 1u << level;
    __syncwarp();
  }

  // Instead of push: the run's node number `slot`, below Near, stays as it is, with an l of its own, for the blocks of the cluster to read.
  __device__ void keep(const Node<S>& node, float l, int slot) {
    memory_.m[slot][column_] = node.m;
    memory_.l[slot][column_] = l;
#pragma unroll
    for (int i = 0; i < S; ++i) memory_.o[slot][i][thread_] = node.o[i];
  }

  // The run ends inside its task: what waits, in order.
  template <class Emit>
  __device__ void flush(const Emit& emit) {
    for (int level = fold_levels - 1; level >= 0; --level)
      if (waiting_ >> level & 1) emit(load(level));
    waiting_ = 0;
  }

  // The run was the whole task: its result.
  __device__ Node<S> finish() {
    Node<S> result{-INFINITY, 0.0f, {}};
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
  __device__ Node<S> load(int level) const {
    Node<S> node;
    node.m = memory_.m[level][column_];
    node.l = memory_.l[level][column_];
#pragma unroll
    for (int i = 0; i < S; ++i) node.o[i] = values(level)[i * Threads];
    return node;
  }
  // This thread's values of a level, Threads apart.
  __device__ float* values(int level) const { return memory_.values(level, deep_) + thread_; }

  FoldMemory<S, Threads, Columns, Near>& memory_;
  float* deep_;
  int thread_, column_, first_;
  unsigned waiting_ = 0;
};

}  // namespace rooftile::gpu
