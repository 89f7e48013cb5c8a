// SPDX-License-Identifier: Apache-2.0
// Which packed rows and channels of a partial (m, l, o) each thread of a CTA holds. RowVectors: whole vectors of one row
// (split_kv). RowFragments: accumulators of mma.m16n8k16 (step_kv). Both have the same members.
#pragma once

#include "kernels/decode/reduction.cuh"

namespace rooftile::gpu {

// The threads of a packed row share its D channels: a thread has S / N vectors of N channels, vec_stride apart.
template <int D, int Threads>
class RowVectors {
 public:
  static constexpr int row_threads = Threads / mma_n, S = D / row_threads, N = D % 64 == 0 ? 4 : 2,
                       vec_stride = N * row_threads;
  static constexpr int rows = mma_n, row_sets = mma_n;  // of the CTA; sets of threads that share (m, l)
  using ThreadPartial = Partial<1, S>;
  struct alignas(4 * N) Vec {
    float x[N];
  };

  int m_row, d0;  // packed row; first channel
  __device__ __forceinline__ RowVectors()
      : m_row(threadIdx.x / row_threads), d0(static_cast<int>(threadIdx.x) % row_threads * N) {}
  __device__ __forceinline__ int row_set() const { return m_row; }
  __device__ __forceinline__ bool writes_ml() const { return d0 == 0; }  // one thread a row
  // Whether the warp has a packed row that is not padding.
  __device__ __forceinline__ bool has_row(int rows_used) const {
    return static_cast<int>(threadIdx.x) / 32 * (32 / row_threads) < rows_used;
  }
  // visit(k, m_row): packed row m_row is row k of the thread's partial.
  template <class Visit>
  __device__ __forceinline__ void for_each_row(int, const Visit& visit) const {
    visit(0, m_row);
  }
  // visit(channel, values): values of neighbouring channels of row k.
  template <class Visit>
  __device__ __forceinline__ void for_each_vec(const float (&o)[S], int, const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < S / N; ++i) visit(d0 + i * vec_stride, *reinterpret_cast<const Vec*>(&o[i * N]));
  }
};

// Warp w has channels 16 C w .. 16 C (w + 1) - 1 of N n-tiles of 8 packed rows. Row (n, j) of a thread is row 2 n + j of
// its partial; value (n, i, e) of the accumulators is value (n * C + i) * 4 + e.
template <int N, int C, int Threads>
class RowFragments {
 public:
  static constexpr int S = N * C * 4, rows = N * mma_n, row_sets = Threads / 8;
  using ThreadPartial = Partial<2 * N, S>;
  struct Vec {
    float x[1];
  };

  int warp, lane;
  __device__ __forceinline__ RowFragments() : warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}
  __device__ __forceinline__ int row_set() const { return warp * 4 + lane % 4; }
  __device__ __forceinline__ bool writes_ml() const { return warp == 0 && lane < 4; }
  __device__ __forceinline__ bool has_row(int) const { return true; }
  template <class Visit>
  __device__ __forceinline__ void for_each_row(int rows_used, const Visit& visit) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (const int m_row = n * mma_n + lane % 4 * 2 + j; m_row < rows_used) visit(2 * n + j, m_row);
  }
  template <class Visit>
  __device__ __forceinline__ void for_each_vec(const float (&o)[S], int k, const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < C; ++i)
#pragma unroll
      for (int e = k % 2; e < 4; e += 2)
        visit(16 * (C * warp + i) + 8 * (e / 2) + lane / 4, Vec{{o[(k / 2 * C + i) * 4 + e]}});
  }
};

}  // namespace rooftile::gpu
