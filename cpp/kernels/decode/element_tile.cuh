// SPDX-License-Identifier: Apache-2.0
// KV tiles of 16 tokens in 16 bits.
//   S^T [16 tokens, 8 N packed rows] = K [16 tokens, D] Q^T       K is the A operand, tokens are its rows
//   O^T [D, 8 N packed rows]        += V^T [D, 16 tokens] P^T     V^T is the A operand, channels are its rows
#pragma once

#include <cute/tensor.hpp>

#include "kernels/decode/queries.cuh"
#include "tile/mma.cuh"

namespace rooftile::gpu {

// mma m16n8k16 of one warp.
template <class T>
using ElementTiledMma = decltype(cute::make_tiled_mma(tile::Mma16816<T>{}));

// A KV tile in shared memory.
template <class T, int D>
struct ElementTile {
  alignas(128) tile::MmaType<T> k[16 * D], v[16 * D];  // SmemRows<D, 16>: (16 tokens, D)
};

// Copies 16 token rows, `stride` bytes apart, into a tile, by Threads threads. Rows that `wanted` rejects are
// zero-filled and not read.
template <class T, int D, int Threads, class Wanted>
__device__ __forceinline__ void copy_rows_async(tile::MmaType<T>* to, int thread, const std::byte* from,
                                                std::int64_t stride, const Wanted& wanted) {
  constexpr int vecs = D / 8, rows = Threads / vecs;  // 16-byte vectors of a row; rows at once
  static_assert(16 % rows == 0);
  if (rows * vecs < Threads && thread >= rows * vecs) return;
  const int row = thread / vecs, vec = thread % vecs;
  const SmemVectors<D, 16> at(row, vec);
  from += row * stride + 16 * vec;
  CUTE_UNROLL
  for (int i = 0; i < 16; i += rows, from += rows * stride)
    tile::cp_async_16_zfill(to + at(i, 0), from, wanted(i + row));
}

// Loads the matrices of an ldmatrix, whose row of this lane is at `row`, into a fragment.
template <class Ldmatrix, class Element, class Fragment>
__device__ __forceinline__ void load_matrices(const Element* row, Fragment& fragment) {
  cute::copy(cute::Copy_Atom<Ldmatrix, Element>{}, cute::make_tensor(cute::make_smem_ptr(row), cute::Shape<cute::_8>{}),
             fragment);
}

// The packed query rows of N n-tiles as B operands: (MMA, N, D / 16). The shape is written down: to derive it from
// QueryLayout takes the compiler a second for every config.
template <class T, int D, int N>
using QueryFragments = decltype(cute::make_tensor<tile::MmaType<T>>(
    cute::Shape<cute::Shape<cute::_2, cute::_2>, cute::Int<N>, cute::Int<D / 16>>{}));
template <class T, int D, int N>
__device__ __forceinline__ void load_query_fragments(const tile::MmaType<T>* q, int lane,
                                                     QueryFragments<T, D, N>& tSrQ) {
  const SmemVectors<D, 8 * N> at(lane % 8, lane / 8 % 2);
  CUTE_UNROLL
  for (int n = 0; n < N; ++n) CUTE_UNROLL
  for (int kt = 0; kt < D / 16; ++kt) {
    auto fragment = tSrQ(cute::_, n, kt);
    load_matrices<cute::SM75_U32x2_LDSM_N>(q + at(8 * n, 2 * kt), fragment);
  }
}

// S^T of one tile: two sums, of even and odd k-tiles, halve the dependency chain of MMAs.
template <class T, int D, int N>
__device__ __forceinline__ void qk16(float (&s)[N][1][4], const tile::MmaType<T>* k,
                                     const QueryFragments<T, D, N>& tSrQ, int lane) {
  using namespace cute;
  ElementTiledMma<T> mma;
  const SmemVectors<D, 16> at(lane % 16, lane / 16);
  Tensor rS = make_tensor<float>(Shape<_4, Int<N>, _2>{});  // (MMA, N, chain)
  clear(rS);
  CUTE_UNROLL
  for (int kt = 0; kt < D / 16; ++kt) {
    Tensor tSrK = make_tensor<tile::MmaType<T>>(Shape<_8>{});  // (MMA)
    load_matrices<SM75_U32x4_LDSM_N>(k + at(0, 2 * kt), tSrK);
    CUTE_UNROLL
    for (int n = 0; n < N; ++n) {
      Tensor chain = rS(_, n, kt % 2);
      gemm(mma, tSrK, tSrQ(_, n, kt), chain);
    }
  }
  CUTE_UNROLL
  for (int n = 0; n < N; ++n) CUTE_UNROLL
  for (int i = 0; i < 4; ++i) s[n][0][i] = rS(i, n, 0) + rS(i, n, 1);
}

// V^T of 16 tokens: load(m) loads channels 16 m .. 16 m + 15 as the A operand.
template <class T, int D>
struct VtOperand {
  const tile::MmaType<T>* v;
  SmemVectors<D, 16> at;
  __device__ __forceinline__ VtOperand(const tile::MmaType<T>* v, int lane)
      : v(v), at(lane % 8 + lane / 16 * 8, lane / 8 % 2) {}
  __device__ __forceinline__ auto load(int m) const {
    auto tOrV = cute::make_tensor<tile::MmaType<T>>(cute::Shape<cute::_8>{});  // (MMA)
    load_matrices<cute::SM75_U16x8_LDSM_T>(v + at(0, 2 * m), tOrV);
    return tOrV;
  }
};
// The weights of an n-tile as the B operand, and a tile of the output.
__device__ __forceinline__ auto weights_tensor(const tile::FragmentB& weights) {
  return cute::make_tensor(cute::make_rmem_ptr(weights.r), cute::Shape<cute::_2>{});  // (MMA), pairs
}
__device__ __forceinline__ auto output_tensor(float (&o)[4]) {
  return cute::make_tensor(cute::make_rmem_ptr(o), cute::Shape<cute::_4>{});  // (MMA)
}

// Adds weight x V of 16 tokens to C tiles of 16 channels, from channel tile `first` on: o[n * C + i] is tile i of
// n-tile n.
template <class T, int D, int C, int N>
__device__ __forceinline__ void pv16(float (*o)[4], const tile::FragmentB (&weights)[N], const tile::MmaType<T>* v,
                                     int first, int lane) {
  ElementTiledMma<T> mma;
  const VtOperand<T, D> vt(v, lane);
  CUTE_UNROLL
  for (int i = 0; i < C; ++i) {
    const auto tOrV = vt.load(first + i);
    CUTE_UNROLL
    for (int n = 0; n < N; ++n) {
      auto rO = output_tensor(o[n * C + i]);
      cute::gemm(mma, tOrV, weights_tensor(weights[n]), rO);
    }
  }
}

// The same for one n-tile where some packed rows do not see all of the tokens. A weight of 0 does not stop a NaN or an
// infinity, so every new token gets an MMA of its own over the values that it sees, and takes only its own packed rows
// from the result.
template <class T, int D, int C>
__device__ __forceinline__ void pv16_masked(float (*o)[4], const tile::FragmentB& weights, const tile::MmaType<T>* v,
                                            const Visible& see, int token, int first, int lane) {
  ElementTiledMma<T> mma;
  const VtOperand<T, D> vt(v, lane);
  int last = max(see.query[0], see.query[1]);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) last = max(last, __shfl_xor_sync(0xffffffffu, last, step));
#pragma unroll 1
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
    CUTE_UNROLL
    for (int i = 0; i < C; ++i) {
      auto tOrV = vt.load(first + i);
      auto pairs = cute::recast<std::uint32_t>(tOrV);
      CUTE_UNROLL
      for (int r = 0; r < 4; ++r) pairs(r) &= seen[r / 2];
      float sum[4] = {o[i][0], o[i][1], o[i][2], o[i][3]};  // (4) as o[i]
      auto rSum = output_tensor(sum);
      cute::gemm(mma, tOrV, weights_tensor(weights), rSum);
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) o[i][e] = own[e % 2] ? sum[e] : o[i][e];
    }
  }
}

}  // namespace rooftile::gpu
