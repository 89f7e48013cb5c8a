// SPDX-License-Identifier: Apache-2.0
// KV tiles of 16 tokens in 16 bits.
//   S^T [16 tokens, 8 packed rows] = K [16 tokens, D] Q^T       K is the A operand, tokens are its rows
//   O^T [D, 8 packed rows]        += V^T [D, 16 tokens] P^T     V^T is the A operand, channels are its rows
#pragma once

#include "kernels/decode/queries.cuh"
#include "tile/mma.cuh"

namespace rooftile::gpu {

// A KV tile in shared memory.
template <class T, int D>
struct ElementTile {
  alignas(128) T k[16 * D], v[16 * D];  // [16 tokens, D], swizzled
};

// Copies 16 token rows, `stride` bytes apart, into a tile, by Lanes threads. Rows that `wanted` rejects are zero-filled
// and not read.
template <class T, int D, int Lanes, class Wanted>
__device__ __forceinline__ void copy_rows_async(T* to, int lane, const std::byte* from, std::int64_t stride,
                                                const Wanted& wanted) {
  constexpr int vecs = D / 8, rows = Lanes / vecs;  // 16-byte vectors of a row; rows that are copied at once
  const int first = lane / vecs, d = lane % vecs * 8;
  if (first >= rows) return;
  const std::byte* at = from + first * stride + d * sizeof(T);
#pragma unroll
  for (int row = 0; row < 16; row += rows, at += rows * stride) {
    const bool take = wanted(row + first);
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
        *reinterpret_cast<const cute::uint128_t*>(take ? at : from),
        *reinterpret_cast<cute::uint128_t*>(to + swizzled<D>(row + first, d)), take);
  }
}

// S^T of one tile: two sums, of even and odd k-tiles, halve the dependency chain of MMAs.
template <class T, int D, int N>
__device__ __forceinline__ void qk16(float (&s)[N][1][4], const T* k, const tile::FragmentB (&q)[N][D / 16], int lane) {
  float sum[N][2][4] = {};  // (n-tile, chain, 4)
#pragma unroll
  for (int ks = 0; ks < D / 16; ++ks) {
    const tile::FragmentA rows = tile::ldmatrix_x4(k + swizzled<D>(lane % 16, 16 * ks + lane / 16 * 8));
#pragma unroll
    for (int n = 0; n < N; ++n) tile::mma<T>(sum[n][ks % 2], rows, q[n][ks]);
  }
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) s[n][0][i] = sum[n][0][i] + sum[n][1][i];
}

// V^T of 16 tokens x channels 16 i .. 16 i + 15 as the A operand.
template <class T, int D>
__device__ __forceinline__ tile::FragmentA v_fragment(const T* v, int i, int lane) {
  return tile::ldmatrix_x4_trans(v + swizzled<D>(lane % 8 + lane / 16 * 8, 16 * i + lane / 8 % 2 * 8));
}
// Adds weight x V of 16 tokens to C tiles of 16 channels, from channel tile `first` on: o[n * C + i] is tile i of
// n-tile n.
template <class T, int D, int C, int N>
__device__ __forceinline__ void pv16(float (*o)[4], const tile::FragmentB (&weights)[N], const T* v, int first,
                                     int lane) {
#pragma unroll
  for (int i = 0; i < C; ++i) {
    const tile::FragmentA a = v_fragment<T, D>(v, first + i, lane);
#pragma unroll
    for (int n = 0; n < N; ++n) tile::mma<T>(o[n * C + i], a, weights[n]);
  }
}

// The same for one n-tile where some packed rows do not see all of the tokens. A weight of 0 does not stop a NaN or an
// infinity, so every new token gets an MMA of its own over the values that it sees, and takes only its own packed rows
// from the result.
template <class T, int D, int C>
__device__ __forceinline__ void pv16_masked(float (*o)[4], const tile::FragmentB& weights, const T* v,
                                            const Visible& see, int token, int first, int lane) {
  int last = max(see.query[0], see.query[1]);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) last = max(last, __shfl_xor_sync(0xffffffffu, last, step));
  for (int query = __shfl_sync(0xffffffffu, see.query[0], 0); query <= last; ++query) {
    // The visible range comes from a lane that holds a packed row of the query. This lane's tokens in the A operand are
    // 2t, 2t + 1, 2t + 8, 2t + 9.
    const bool own[2] = {see.query[0] == query, see.query[1] == query};
    const int from = first_bit(__ballot_sync(0xffffffffu, own[0] || own[1]));
    const int begin = __shfl_sync(0xffffffffu, own[0] ? see.begin[0] : see.begin[1], from) - token;
    const int end = __shfl_sync(0xffffffffu, own[0] ? see.end[0] : see.end[1], from) - token;
    std::uint32_t seen[2];  // masks of token pairs 2t and 2t + 8
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = lane % 4 * 2 + 8 * half;
      seen[half] = (at >= begin && at < end ? 0xffffu : 0u) | (at + 1 >= begin && at + 1 < end ? 0xffff0000u : 0u);
    }
#pragma unroll
    for (int i = 0; i < C; ++i) {
      tile::FragmentA a = v_fragment<T, D>(v, first + i, lane);
#pragma unroll
      for (int r = 0; r < 4; ++r) a.r[r] &= seen[r / 2];
      float sum[4] = {o[i][0], o[i][1], o[i][2], o[i][3]};
      tile::mma<T>(sum, a, weights);
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][e] = own[e % 2] ? sum[e] : o[i][e];
    }
  }
}

// The packed query rows of an n-tile, after they have arrived, as B operands for 16-bit keys: fragment k covers
// channels 16 k .. 16 k + 15.
template <class T, int D>
__device__ __forceinline__ void load_query_fragments(const T* q_rows, int lane, tile::FragmentB (&q)[D / 16]) {
#pragma unroll
  for (int k = 0; k < D / 16; k += 2) {
    const tile::FragmentA four = tile::ldmatrix_x4(q_rows + swizzled<D>(lane % 8, 16 * k + lane / 8 * 8));
    q[k] = {{four.r[0], four.r[1]}};
    q[k + 1] = {{four.r[2], four.r[3]}};
  }
}

}  // namespace rooftile::gpu
