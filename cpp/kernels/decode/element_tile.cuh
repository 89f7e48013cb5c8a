// SPDX-License-Identifier: Apache-2.0
// KV tiles of 16 tokens in 16 bits.
//   S^T [16 tokens, 8 N packed rows] = K [16 tokens, D] Q^T       K is the A operand, tokens are its rows
//   O^T [D, 8 N packed rows]        += V^T [D, 16 tokens] P^T     V^T is the A operand, channels are its rows
#pragma once

#include <bit>
#include <cute/tensor.hpp>

#include "kernels/decode/queries.cuh"
#include "tile/mma.cuh"

namespace rooftile::gpu {

// mma m16n8k16 of one warp.
template <class T>
using ElementTiledMma = decltype(cute::make_tiled_mma(tile::Mma16816<T>{}));

template <class T, int D>
struct ElementTraits {
  using LayoutKv = SmemRows<D, 16>;  // (16 tokens, D)

  // cp.async by `Threads` threads: copy_rows rows at once, a 16-byte vector a thread.
  template <int Threads>
  static constexpr int copy_rows = Threads / (D / 8);
  template <int Threads>
  using GmemCopy = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>, tile::MmaType<T>>{},
      cute::Layout<cute::Shape<cute::Int<copy_rows<Threads>>, cute::Int<D / 8>>,
                   cute::Stride<cute::Int<D / 8>, cute::_1>>{},
      cute::Layout<cute::Shape<cute::_1, cute::_8>>{}));
};

// A KV tile in shared memory.
template <class T, int D>
struct ElementTile {
  alignas(128) tile::MmaType<T> k[16 * D], v[16 * D];  // LayoutKv
};

// Copies 16 token rows, `stride` bytes apart, into a tile, by Threads threads. Rows that `wanted` rejects are
// zero-filled and not read.
template <class T, int D, int Threads, class Wanted>
__device__ __forceinline__ void copy_rows_async(tile::MmaType<T>* to, int thread, const std::byte* from,
                                                std::int64_t stride, const Wanted& wanted) {
  using namespace cute;
  using Traits = ElementTraits<T, D>;
  constexpr int rows = Traits::template copy_rows<Threads>, vecs = D / 8;
  if (rows * vecs < Threads && thread >= rows * vecs) return;
  const std::int64_t row_elements = stride / static_cast<int>(sizeof(T));
  typename Traits::template GmemCopy<Threads> gmem_copy;
  const auto thr_copy = gmem_copy.get_slice(thread);
  Tensor sRows = make_tensor(make_smem_ptr(to), typename Traits::LayoutKv{});  // (16, D)
  Tensor gRows = make_tensor(make_gmem_ptr(reinterpret_cast<const tile::MmaType<T>*>(from)),
                             make_layout(Shape<Int<rows>, Int<D>>{}, make_stride(row_elements, _1{})));  // (rows, D)
  Tensor tRsR = thr_copy.partition_D(sRows);  // (CPY, 16 / rows, 1)
  Tensor tRgR = thr_copy.partition_S(gRows);  // (CPY, 1, 1)
  CUTE_UNROLL
  for (int i = 0; i < 16 / rows; ++i) {
    copy(gmem_copy.with(wanted(rows * i + thread / vecs)), tRgR(_, 0, 0), tRsR(_, i, 0));
    tRgR.data() = tRgR.data() + rows * row_elements;
  }
}

// Loads the matrices of an ldmatrix, whose row of this lane is at `row`, into a fragment.
template <class Ldmatrix, class Element, class Fragment>
__device__ __forceinline__ void load_matrices(const Element* row, Fragment& fragment) {
  cute::copy(cute::Copy_Atom<Ldmatrix, Element>{}, cute::make_tensor(cute::make_smem_ptr(row), cute::Shape<cute::_8>{}),
             fragment);
}

// The rows that a lane passes to ldmatrix, of queries (B operand), K and V^T (A operands). v: first vector of a row.
template <int D, int N>
CUTE_HOST_DEVICE SmemVectors<D, N * mma_n> query_vectors(int lane) {
  return {lane % 8, lane / 8 % 2};
}
template <int D>
CUTE_HOST_DEVICE SmemVectors<D, 16> k_vectors(int lane) {
  return {lane % 16, lane / 16};
}
template <int D>
CUTE_HOST_DEVICE SmemVectors<D, 16> vt_vectors(int lane, int v) {
  return {lane % 8 + lane / 16 * 8, v + lane / 8 % 2};
}

// The packed query rows of N n-tiles as B operands: (MMA, N, D / 16). The shape is written down: to derive it from
// QueryLayout takes the compiler a second for every config.
template <class T, int D, int N>
using QueryFragments = decltype(cute::make_tensor<tile::MmaType<T>>(
    cute::Shape<cute::Shape<cute::_2, cute::_2>, cute::Int<N>, cute::Int<D / 16>>{}));
template <class T, int D, int N>
__device__ __forceinline__ void load_query_fragments(const tile::MmaType<T>* q, int lane,
                                                     QueryFragments<T, D, N>& tSrQ) {
  const auto at = query_vectors<D, N>(lane);
  const auto load = [&](int n, int kt) {
    auto fragment = tSrQ(cute::_, n, kt);
    load_matrices<cute::SM75_U32x2_LDSM_N>(q + at(n * mma_n, 2 * kt), fragment);
  };
  CUTE_UNROLL
  for (int n = 0; n < N; ++n) {
    if constexpr (D > 256) {  // nvcc would not unroll the loop, and q would go to local memory
      cute::for_each(cute::make_int_sequence<D / 16>{}, [&](auto kt) { load(n, kt); });
    } else {  // the sequence makes ptxas spill with 16 packed rows (sm_80)
      CUTE_UNROLL
      for (int kt = 0; kt < D / 16; ++kt) load(n, kt);
    }
  }
}

// S^T of one tile: two sums, of even and odd k-tiles, halve the dependency chain of MMAs.
template <class T, int D, int N>
__device__ __forceinline__ void qk16(float (&s)[N][1][4], const tile::MmaType<T>* k,
                                     const QueryFragments<T, D, N>& tSrQ, int lane) {
  using namespace cute;
  ElementTiledMma<T> mma;
  const auto at = k_vectors<D>(lane);
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

// V^T of 16 tokens, from channel tile `first` on, a multiple of C: load(i), i < C, loads the 16 channels of tile
// first + i as the A operand.
template <class T, int D, int C>
class VtOperand {
 public:
  __device__ __forceinline__ VtOperand(const tile::MmaType<T>* v, int first, int lane)
      : v_(v), at_(vt_vectors<D>(lane, in_own ? 2 * first : 0)), first_(in_own ? 0 : first) {}
  __device__ __forceinline__ auto load(int i) const {
    auto tOrV = cute::make_tensor<tile::MmaType<T>>(cute::Shape<cute::_8>{});  // (MMA)
    load_matrices<cute::SM75_U16x8_LDSM_T>(v_ + at_(0, 2 * (first_ + i)), tOrV);
    return tOrV;
  }

 private:
  // Whether 2 first is part of the own vector, which makes 2 i, a constant, all that is added: no bit in common. In
  // kernels of 128 channels, where warps that share channels have C = 2, it saves no register.
  static constexpr bool in_own = D > 128 && std::has_single_bit(unsigned{C});
  const tile::MmaType<T>* v_;
  SmemVectors<D, 16> at_;
  int first_;
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
  const VtOperand<T, D, C> vt(v, first, lane);
  CUTE_UNROLL
  for (int i = 0; i < C; ++i) {
    const auto tOrV = vt.load(i);
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
  const VtOperand<T, D, C> vt(v, first, lane);
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
      auto tOrV = vt.load(i);
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
