// SPDX-License-Identifier: Apache-2.0
// The fold of schedule.h on the device: leaves of one task arrive in order, full nodes are merged as soon as they are
// complete, and what a run can merge no further leaves through `emit`.
#pragma once

#include "kernels/decode/scheduler.h"
#include "tile/softmax.cuh"

namespace rooftile::gpu {

// A thread's share of a softmax state: (m, l) of K columns and S values of them. One column: pieces of four channels.
// More: tiles in the layout of a product (tile/mma.cuh), two columns each, rows being channels.
template <int K, int S>
struct Partial {
  float m[K], l[K], o[S];
  // Which column value i belongs to.
  static constexpr int row_of_value(int i) { return K == 1 ? 0 : i / (2 * S / K) * 2 + i % 2; }
};

template <int K, int S>
__device__ __forceinline__ Partial<K, S> merge(const Partial<K, S>& a, const Partial<K, S>& b) {
  Partial<K, S> r;
  tile::MergeWeights w[K];
#pragma unroll
  for (int k = 0; k < K; ++k) {
    w[k] = tile::merge_weights(a.m[k], b.m[k]);
    r.m[k] = w[k].m;
    r.l[k] = tile::merge_values(a.l[k], b.l[k], w[k]);
  }
#pragma unroll
  for (int i = 0; i < S; ++i) r.o[i] = tile::merge_values(a.o[i], b.o[i], w[Partial<K, S>::row_of_value(i)]);
  return r;
}

// Left halves that wait for their right ones: at most one a level. Threads of a warp that share columns share a place
// for their (m, l). The last levels are touched once in some leaves: the values of all but the first `Near` wait in the
// workspace.
template <int K, int S, int Threads, int RowSets, int SmemLevels>
struct ReductionStorage {
  static constexpr int smem_levels = SmemLevels, gmem_levels = reduction_levels - SmemLevels;
  float o[smem_levels][S][Threads];
  float m[reduction_levels][K][RowSets], l[reduction_levels][K][RowSets];
  __device__ float* values(int level, float* gmem) {
    return level < smem_levels ? o[level][0] : gmem + (level - smem_levels) * S * Threads;
  }
};

template <int K, int S, int Threads, int RowSets, int SmemLevels>
class PartialReduction {
 public:
  // deep: [fold_levels - Near][S][Threads] floats of the block. first: the run's first leaf; only: it is all of the
  // run, but not of its task. thread: this one; place: of its columns.
  __device__ PartialReduction(ReductionStorage<K, S, Threads, RowSets, SmemLevels>& smem, float* gmem, int thread,
                              int row_set, int first, bool single)
      : smem_(smem), gmem_(gmem), thread_(thread), row_set_(row_set), first_(first), single_(single) {}

  // The node of leaf `at`, the next in order.
  template <class Emit>
  __device__ void push(Partial<K, S> partial, int at, const Emit& emit) {
    int level = 0;
    while (level + 1 < reduction_levels && (at >> level) % 2 == 1 && at - (1 << level) >= first_) {
      partial = merge(load(level), partial);
      waiting_ &= ~(1u << level);
      at -= 1 << level;
      ++level;
    }
    if (single_ || (level + 1 < reduction_levels &&
                    (at >> level) % 2 == 1)) {  // its left half, or what follows, belongs to another block
      emit(partial);
      return;
    }
    __syncwarp();  // threads of one place have read what is overwritten here
#pragma unroll
    for (int k = 0; k < K; ++k) {
      smem_.m[level][k][row_set_] = partial.m[k];
      smem_.l[level][k][row_set_] = partial.l[k];
    }
#pragma unroll
    for (int i = 0; i < S; ++i) values(level)[i * Threads] = partial.o[i];
    waiting_ |= 1u << level;
    __syncwarp();
  }

  // The run ends inside its task: what waits, in order.
  template <class Emit>
  __device__ void flush(const Emit& emit) {
    for (int level = reduction_levels - 1; level >= 0; --level)
      if (waiting_ >> level & 1) emit(load(level));
    waiting_ = 0;
  }

  // The run was the whole task: its result.
  __device__ Partial<K, S> result() {
    Partial<K, S> whole;  // some level waits
    bool any = false;
    for (int level = 0; level < reduction_levels; ++level) {
      if (!(waiting_ >> level & 1)) continue;
      whole = any ? merge(load(level), whole) : load(level);
      any = true;
    }
    waiting_ = 0;
    return whole;
  }

 private:
  __device__ Partial<K, S> load(int level) const {
    Partial<K, S> partial;
#pragma unroll
    for (int k = 0; k < K; ++k) {
      partial.m[k] = smem_.m[level][k][row_set_];
      partial.l[k] = smem_.l[level][k][row_set_];
    }
#pragma unroll
    for (int i = 0; i < S; ++i) partial.o[i] = values(level)[i * Threads];
    return partial;
  }
  // This thread's values of a level, Threads apart.
  __device__ float* values(int level) const { return smem_.values(level, gmem_) + thread_; }

  ReductionStorage<K, S, Threads, RowSets, SmemLevels>& smem_;
  float* gmem_;
  int thread_, row_set_, first_;
  bool single_;
  unsigned waiting_ = 0;
};

}  // namespace rooftile::gpu
