// SPDX-License-Identifier: Apache-2.0
// The query columns of one task: what each may see, their operands, and where their results go.
#pragma once

#include "kernels/decode/params.h"
#include "kernels/decode/schedule.h"
#include "tile/mma.cuh"
#include "tile/softmax.cuh"

namespace rooftile::gpu {

__device__ __forceinline__ RowWork row_work_of(const DecodeParams& p, int b) {
  const KvCacheView& c = p.cache;
  const int row = p.rows ? p.rows[b] : b;
  const bool inside = row >= 0 && row < c.max_rows;
  return row_work(c.format, c.capacity(), row, c.max_rows, inside ? c.lengths[row] : 0,
                  p.counts ? p.counts[b] : p.tokens, p.tokens,
                  inside && c.raw_from ? c.raw_from[row] : 0, p.window);
}

// One task: 8 columns of a (batch entry, KV head). Column c of the head is query c / q_per_kv of head c % q_per_kv.
struct Task {
  int b, kv_head, pass;
};
struct Column {
  int token, head;     // token: -1 where the column is padding
  int position;        // of the query in its row; below 0 where it sees nothing
};
__device__ __forceinline__ Column column_of(const DecodeParams& p, const Task& task, const RowWork& w, int column) {
  const unsigned c = task.pass * columns + column, per_kv = p.q_per_kv;
  const int token = static_cast<int>(c / per_kv);
  if (token >= p.tokens) return {-1, 0, -1};
  return {token, task.kv_head * p.q_per_kv + static_cast<int>(c % per_kv), token < w.count ? w.length - w.count + token : -1};
}

// The tokens that the two columns of a lane see, and bounds for the whole task: [outer_begin, outer_end) holds all that
// any column sees, [inner_begin, inner_end) is seen by all of them. Padding columns see everything; nobody reads them.
struct Visible {
  int begin[2], end[2];
  int outer_begin, outer_end, inner_begin, inner_end;
};
// raw: the part of a kivi row that is read raw, else the part that lies in pages.
__device__ __forceinline__ Visible visible(const DecodeParams& p, const Task& task, const RowWork& w, int lane, bool raw) {
  Visible v{{0, 0}, {0, 0}, 0x7fffffff, 0, 0, 0x7fffffff};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const Column c = column_of(p, task, w, lane % 4 * 2 + j);
    if (c.token < 0) {
      v.end[j] = 0x7fffffff;
      continue;
    }
    const int first = p.window > 0 && c.position >= p.window ? c.position + 1 - static_cast<int>(p.window) : 0;
    int begin = first, end = c.position + 1;
    if (is_kivi(p.cache.format)) {
      const int boundary = max(c.position, 0) & ~(kv_group - 1);
      if (raw) begin = boundary > begin ? boundary : begin;
      else end = boundary < end ? boundary : end;
    }
    if (end < begin) end = begin;
    v.begin[j] = begin;
    v.end[j] = end;
    if (begin < end) {
      v.outer_begin = min(v.outer_begin, begin);
      v.outer_end = max(v.outer_end, end);
    }
    v.inner_begin = max(v.inner_begin, begin);
    v.inner_end = min(v.inner_end, end);
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    v.outer_begin = min(v.outer_begin, __shfl_xor_sync(0xffffffffu, v.outer_begin, step));
    v.outer_end = max(v.outer_end, __shfl_xor_sync(0xffffffffu, v.outer_end, step));
    v.inner_begin = max(v.inner_begin, __shfl_xor_sync(0xffffffffu, v.inner_begin, step));
    v.inner_end = min(v.inner_end, __shfl_xor_sync(0xffffffffu, v.inner_end, step));
  }
  return v;
}

// N neighbouring query elements from d0 on; zeros for padding. Any strides.
template <class T, int N>
__device__ __forceinline__ void load_query(const DecodeParams& p, const Task& task, const Column& c, int d0, T (&x)[N]) {
  const TensorView& q = p.q;
  const T* from = static_cast<const T*>(q.data) + task.b * q.stride[0] + c.token * q.stride[1] + c.head * q.stride[2] + d0 * q.stride[3];
  constexpr int bytes = N * sizeof(T) < 16 ? N * sizeof(T) : 16;
  struct alignas(bytes) Piece {
    T x[bytes / sizeof(T)];
  };
  if (c.token < 0) {
#pragma unroll
    for (T& e : x) e = T(0.0f);
  } else if (q.stride[3] == 1 && reinterpret_cast<std::uintptr_t>(from) % bytes == 0) {
#pragma unroll
    for (int i = 0; i < N; i += bytes / sizeof(T)) {
      const Piece piece = *reinterpret_cast<const Piece*>(from + i);
#pragma unroll
      for (int j = 0; j < static_cast<int>(bytes / sizeof(T)); ++j) x[i + j] = piece.x[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) x[i] = from[i * q.stride[3]];
  }
}

// The same columns as operands B of the products with 16-bit keys: fragment k covers head_dim 16 k .. 16 k + 15.
template <class T, int D>
__device__ __forceinline__ void load_query_fragments(const DecodeParams& p, const Task& task, const RowWork& w, int lane,
                                                     tile::FragmentB (&q)[D / 16]) {
  const Column c = column_of(p, task, w, lane / 4);
#pragma unroll
  for (int k = 0; k < D / 16; ++k)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      T x[2];
      load_query<T>(p, task, c, 16 * k + 8 * half + lane % 4 * 2, x);
      q[k].r[half] = tile::pack<T>(tile::to_float(x[0]), tile::to_float(x[1]));
    }
}

// Writes S values from d0 on of a column's finished row; `first`: this thread writes the log-sum-exp too.
template <class T, int S>
__device__ __forceinline__ void write_result(const DecodeParams& p, const Task& task, const RowWork& w, int column, int d0,
                                             bool first, float m, float l, const float (&o)[S]) {
  const Column c = column_of(p, task, w, column);
  if (c.token < 0) return;
  float sink = -INFINITY;
  if (p.sinks.given()) {
    const std::int64_t at = c.head * p.sinks.stride[0];
    sink = tile::log2_e * (p.sinks.dtype == DType::f32 ? p.sinks.as<const float>()[at] : tile::to_float(p.sinks.as<const T>()[at]));
  }
  const bool real = c.token < w.count;
  const tile::SoftmaxResult r = real ? tile::finish_softmax(m, l, sink) : tile::SoftmaxResult{0.0f, -INFINITY};
  T* to = p.out.as<T>() + task.b * p.out.stride[0] + c.token * p.out.stride[1] + c.head * p.out.stride[2];
  alignas(S * sizeof(T)) T values[S];
#pragma unroll
  for (int i = 0; i < S; ++i) values[i] = tile::from_float<T>(real && l != 0.0f ? o[i] * r.factor : 0.0f);
  struct alignas(S * sizeof(T)) Piece {
    T x[S];
  };
  if (p.out.stride[3] == 1 && reinterpret_cast<std::uintptr_t>(to) % sizeof(Piece) == 0) {
    *reinterpret_cast<Piece*>(to + d0) = *reinterpret_cast<const Piece*>(values);
  } else {
#pragma unroll
    for (int i = 0; i < S; ++i) to[(d0 + i) * p.out.stride[3]] = values[i];
  }
  if (first && p.lse.given())
    p.lse.as<float>()[task.b * p.lse.stride[0] + c.token * p.lse.stride[1] + c.head * p.lse.stride[2]] = r.lse;
}

}  // namespace rooftile::gpu
