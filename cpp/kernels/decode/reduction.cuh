// SPDX-License-Identifier: Apache-2.0
// The reduction of scheduler.h on the device. Partials of one work tile's KV splits arrive in order. Two halves of a
// subtree are merged as soon as both are complete. Partials that a range of splits cannot merge further go to `emit`.
#pragma once

#include "kernels/decode/scheduler.h"
#include "tile/softmax.cuh"

namespace rooftile::gpu {

// A thread's part of a partial: (m, l) of Rows packed rows and Values values of o. Rows = 1: vectors of 4 (or 2)
// channels of one row. Rows > 1: C fragments of mma.m16n8k16 (tile/mma.cuh) with channels as rows, two packed rows
// each.
template <int Rows, int Values>
struct Partial {
  float m[Rows], l[Rows], o[Values];  // (Rows packed rows), (Rows packed rows), (Values values)
  // The packed row that o[i] belongs to.
  static constexpr int row_of_value(int i) { return Rows == 1 ? 0 : i / (2 * Values / Rows) * 2 + i % 2; }
};

template <int Rows, int Values>
__device__ __forceinline__ Partial<Rows, Values> merge(const Partial<Rows, Values>& a, const Partial<Rows, Values>& b) {
  Partial<Rows, Values> r;
  tile::MergeWeights w[Rows];  // (Rows packed rows)
#pragma unroll
  for (int k = 0; k < Rows; ++k) {
    w[k] = tile::merge_weights(a.m[k], b.m[k]);
    r.m[k] = w[k].m;
    r.l[k] = tile::merge_values(a.l[k], b.l[k], w[k]);
  }
#pragma unroll
  for (int i = 0; i < Values; ++i)
    r.o[i] = tile::merge_values(a.o[i], b.o[i], w[Partial<Rows, Values>::row_of_value(i)]);
  return r;
}

// Left halves that wait for their right halves, at most one per level. Threads that hold the same packed rows form a
// row set and share one (m, l). The upper levels are used at the end of few splits, so the values of all but the first
// SmemLevels wait in global memory.
template <int Rows, int Values, int Threads, int RowSets, int SmemLevels>
struct ReductionStorage {
  static constexpr int smem_levels = SmemLevels, gmem_levels = reduction_levels - SmemLevels;
  float o[smem_levels > 0 ? smem_levels : 1][Values][smem_levels > 0 ? Threads : 1];  // (level, value, thread)
  float m[reduction_levels][Rows][RowSets], l[reduction_levels][Rows][RowSets];  // (level, row of the set, row set)
  __device__ float* values(int level, float* gmem) {
    return level < smem_levels ? o[level][0] : gmem + (level - smem_levels) * Values * Threads;
  }
};

template <int Rows, int Values, int Threads, int RowSets, int SmemLevels>
class PartialReduction {
 public:
  // gmem: [reduction_levels - SmemLevels, Values, Threads] floats of this CTA. first: the range's first split. single:
  // the range is one split of a longer work tile. thread: this thread. row_set: the set of its packed rows.
  __device__ PartialReduction(ReductionStorage<Rows, Values, Threads, RowSets, SmemLevels>& smem, float* gmem,
                              int thread, int row_set, int first, bool single)
      : smem_(smem), gmem_(gmem), thread_(thread), row_set_(row_set), first_(first), single_(single) {}

  // Adds the partial of split `at`, the next in order.
  template <class Emit>
  __device__ void push(Partial<Rows, Values> partial, int at, const Emit& emit) {
    int level = 0;
    while (level + 1 < reduction_levels && (at >> level) % 2 == 1 && at - (1 << level) >= first_) {
      partial = merge(load(level), partial);
      waiting_ &= ~(1u << level);
      at -= 1 << level;
      ++level;
    }
    // single: combine merges it; else, the left half belongs to the CTA of an earlier range
    if (single_ || (level + 1 < reduction_levels && (at >> level) % 2 == 1)) {
      emit(partial);
      return;
    }
    __syncwarp();  // threads of the row set have read the (m, l) that is overwritten here
#pragma unroll
    for (int k = 0; k < Rows; ++k) {
      smem_.m[level][k][row_set_] = partial.m[k];
      smem_.l[level][k][row_set_] = partial.l[k];
    }
#pragma unroll
    for (int i = 0; i < Values; ++i) values(level)[i * Threads] = partial.o[i];
    waiting_ |= 1u << level;
    __syncwarp();
  }

  // The range ends inside its work tile: emits the waiting partials in order.
  template <class Emit>
  __device__ void flush(const Emit& emit) {
    for (int level = reduction_levels - 1; level >= 0; --level)
      if (waiting_ >> level & 1) emit(load(level));
    waiting_ = 0;
  }

  // The range was the whole work tile: returns its result.
  __device__ Partial<Rows, Values> result() {
    Partial<Rows, Values> whole;  // at least one level waits
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
  __device__ Partial<Rows, Values> load(int level) const {
    Partial<Rows, Values> partial;
#pragma unroll
    for (int k = 0; k < Rows; ++k) {
      partial.m[k] = smem_.m[level][k][row_set_];
      partial.l[k] = smem_.l[level][k][row_set_];
    }
#pragma unroll
    for (int i = 0; i < Values; ++i) partial.o[i] = values(level)[i * Threads];
    return partial;
  }
  // This thread's values of a level, at a stride of Threads.
  __device__ float* values(int level) const { return smem_.values(level, gmem_) + thread_; }

  ReductionStorage<Rows, Values, Threads, RowSets, SmemLevels>& smem_;
  float* gmem_;
  int thread_, row_set_, first_;
  bool single_;
  unsigned waiting_ = 0;  // bit i: a left half waits at level i
};

}  // namespace rooftile::gpu
