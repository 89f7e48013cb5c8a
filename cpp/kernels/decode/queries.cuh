// SPDX-License-Identifier: Apache-2.0
// The packed query rows of one work tile: their positions, the tokens that each row sees, their copy to shared memory.
#pragma once

#include "kernels/decode/params.h"
#include "kernels/decode/scheduler.h"
#include "kernels/decode/smem_layouts.cuh"
#include "tile/copy.cuh"
#include "tile/mma.cuh"
#include "tile/softmax.cuh"

namespace rooftile::gpu {

__device__ __forceinline__ int first_bit(unsigned x) { return __ffs(static_cast<int>(x)) - 1; }

// read: loads an int32. format: the cache's format, a constant where the kernel knows it.
template <class Read>
__device__ __forceinline__ RowWork row_work_of(const DecodeParams& p, KvFormat format, int b, const Read& read) {
  const KvCacheView& c = p.cache;
  const int row = p.rows ? read(p.rows + b) : b;
  const bool inside = row >= 0 && row < c.max_rows;
  return row_work(format, p.block_m, p.capacity, row, c.max_rows, inside ? read(c.lengths + row) : 0,
                  p.counts ? read(p.counts + b) : p.tokens, p.tokens, inside && c.raw_from ? read(c.raw_from + row) : 0,
                  p.window);
}

// One work tile: the packed query rows of a (batch entry, KV head) from n-tile first_n_tile on. Packed row r of the
// head is query head r % q_per_kv of new token r / q_per_kv.
struct WorkTile {
  int b, kv_head, first_n_tile;  // n-tiles have mma_n packed rows
};
struct QueryRow {
  int token, head;  // token: -1 for a padding row
  int position;     // of the query in its cache row; < 0: it sees nothing
};
__device__ __forceinline__ QueryRow query_row(const DecodeParams& p, const WorkTile& tile, const RowWork& w,
                                              int m_row) {
  const int row = tile.first_n_tile * mma_n + m_row, token = divide(row, p.by_q_per_kv);
  if (token >= p.tokens) return {-1, 0, -1};
  return {token, tile.kv_head * p.q_per_kv + row - token * p.q_per_kv,
          token < w.count ? w.length - w.count + token : -1};
}

// The tokens that the two packed rows of a lane see, and bounds for the whole work tile: [outer_begin, outer_end)
// covers every token that any row sees; every row sees all of [inner_begin, inner_end). Padding rows see every token;
// their results are not read.
struct Visible {
  int begin[2], end[2], query[2];  // (packed rows 2t, 2t + 1); query: the row's new token, -1 for padding
  int outer_begin, outer_end, inner_begin, inner_end;
};
// The tokens that the query at `position` sees; none if position < 0. raw: of the raw part of a kivi row, otherwise of
// the part in pages.
struct TokenRange {
  int begin, end;
};
template <bool Kivi>
__device__ __forceinline__ TokenRange visible_tokens(const DecodeParams& p, int position, bool raw) {
  int begin = p.window > 0 && position >= p.window ? position + 1 - p.window : 0, end = position + 1;
  if constexpr (Kivi) {
    const int boundary = max(position, 0) & ~(kv_group - 1);
    if (raw) begin = max(begin, boundary);
    else end = min(end, boundary);
  }
  return {begin, max(begin, end)};
}
template <bool Kivi>
__device__ __forceinline__ Visible visible(const DecodeParams& p, const WorkTile& tile, const RowWork& w, int lane,
                                           bool raw) {
  if (p.tokens == 1) {  // one query: padding rows may see what it sees
    const TokenRange r = visible_tokens<Kivi>(p, w.length - 1, raw);
    return {{r.begin, r.begin}, {r.end, r.end}, {0, 0}, r.begin, r.end, r.begin, r.end};
  }
  Visible v{{0, 0}, {0, 0}, {-1, -1}, 0x7fffffff, 0, 0, 0x7fffffff};
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const QueryRow row = query_row(p, tile, w, lane % 4 * 2 + j);
    if (row.token < 0) {
      v.end[j] = 0x7fffffff;
      continue;
    }
    const TokenRange r = visible_tokens<Kivi>(p, row.position, raw);
    v.query[j] = row.token;
    v.begin[j] = r.begin;
    v.end[j] = r.end;
    if (r.begin < r.end) {
      v.outer_begin = min(v.outer_begin, r.begin);
      v.outer_end = max(v.outer_end, r.end);
    }
    v.inner_begin = max(v.inner_begin, r.begin);
    v.inner_end = min(v.inner_end, r.end);
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

// Byte offset of `token` of a cache row in the kivi cache's ring of raw tokens (of K or of V).
template <class T, int D>
__device__ __forceinline__ std::int64_t ring_offset(const DecodeParams& p, const WorkTile& tile, const RowWork& w,
                                                    int token) {
  return ((std::int64_t{w.row} * p.cache.kv_heads + tile.kv_head) * kv_ring + token % kv_ring) * (D * sizeof(T));
}

// Starts the copies of N n-tiles of 8 packed query rows, from the work tile's first row on, into `to` (QueryLayout), by
// Threads threads. Padding rows become zeros. q may have any strides.
template <class T, int D, int N, int Threads>
__device__ __forceinline__ void copy_queries_async(const DecodeParams& p, const WorkTile& tile, const RowWork& w,
                                                   int thread, tile::MmaType<T>* to) {
  using Element = tile::MmaType<T>;
  const TensorView& q = p.q;
  const Element* const entry = static_cast<const Element*>(q.data) + tile.b * q.stride[0];
  const auto sQ = cute::make_tensor(cute::make_smem_ptr(to), QueryLayout<D, N>{});  // (8 N, D)
  const auto data_of = [&](const QueryRow& row) {
    return entry + (row.token >= 0 ? row.token * q.stride[1] + row.head * q.stride[2] : 0);
  };
  constexpr int vecs = D / 8;  // 16-byte vectors of a row
  if (p.vector_queries) {
#pragma unroll
    for (int i = 0; i < (N * D + Threads - 1) / Threads; ++i) {
      const int vec = i * Threads + thread, m_row = vec / vecs, d = vec % vecs * 8;
      if (N * D % Threads != 0 && vec >= N * D) break;
      const QueryRow row = query_row(p, tile, w, m_row);
      tile::cp_async_16_zfill(&sQ(m_row, d), data_of(row) + d, row.token >= 0);
    }
  } else {
#pragma unroll 1
    for (int vec = thread; vec < N * D; vec += Threads) {
      const int m_row = vec / vecs, d0 = vec % vecs * 8;
      const QueryRow row = query_row(p, tile, w, m_row);
      for (int d = d0; d < d0 + 8; ++d) sQ(m_row, d) = row.token >= 0 ? data_of(row)[d * q.stride[3]] : Element(0.0f);
    }
  }
}

}  // namespace rooftile::gpu
