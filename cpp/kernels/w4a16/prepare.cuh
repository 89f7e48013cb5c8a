// SPDX-License-Identifier: Apache-2.0
// What tiles.cuh needs of x beforehand, in the workspace: a launch before it, only where there is something to do.
//   copy [token][K, padded to 8]   x in the order of the codes, where the copy engine cannot bring x as it lies: rows that are no whole
//                                  16 bytes or lie unevenly, act-order
//   sums [block of tokens][step][span][token], fp32: of x / unit over every span, for minima
//
// A CTA has one token, or every `parts`-th 2048 columns of it if there are few tokens. What is copied goes through shared memory:
// threads bring neighbouring columns one by one, then each takes eight neighbours. With act-order and many tokens the row comes first,
// whole, so that threads jump about in shared memory and not in lines of L1. A sum is that of eight neighbours in order, then of neighbouring
// threads by twos: what other tokens hold or how many there are does not enter it.
//
// Cost: x read and written once. The next kernel brings up its barriers and asks for codes in the meantime.
// Sync: __syncthreads: with act-order, a row has come; a run of columns has come, and has been taken.
#pragma once

#include "kernels/w4a16/params.h"
#include "tile/copy.cuh"
#include "tile/grid.cuh"
#include "tile/w4.cuh"

namespace rooftile::gpu {

template <class T>
__global__ void __launch_bounds__(w4_prepare_threads) w4a16_prepare(const __grid_constant__ W4PrepareParams params) {
  const W4MatmulParams& p = params.product;
  tile::let_next_kernel_start();
  const unsigned part = blockIdx.x % params.parts, token = blockIdx.x / params.parts, block = token / params.block_tokens;
  const bool there = token < p.tokens;   // the last block of tokens may have room for more
  const auto* const row = static_cast<const std::uint16_t*>(p.x.data) + (there ? p.x.offset(p.first_token + token) : 0);
  const unsigned all_k = static_cast<unsigned>(p.k), columns = static_cast<unsigned>(p.steps) * w4_step_k, spans = columns / 32 >> p.span_shift;
  const unsigned threads_of_span = 4u << p.span_shift;
  __shared__ __align__(16) std::uint16_t run_copy[w4_prepare_columns];
  extern __shared__ std::uint16_t row_copy[];
  tile::wait_for_previous_kernel();
  if (params.row_in_shared && there) {
#pragma unroll 8
    for (unsigned c = threadIdx.x; c < all_k; c += w4_prepare_threads) row_copy[c] = row[c * p.x.last_stride];
    __syncthreads();
  }
  for (unsigned run = part * w4_prepare_columns; run < columns; run += params.parts * w4_prepare_columns) {
    const unsigned k = run + threadIdx.x * 8;
    uint4 eight = {};   // 0 past the end of K
    if (p.x_in_pieces) {
      if (there && k < all_k) eight = tile::load_once(row + k);
    } else if (there) {
      unsigned column[8];
      std::uint16_t bits[8];
      const unsigned first = run + threadIdx.x;
#pragma unroll
      for (unsigned i = 0; i < 8; ++i) column[i] = min(first + i * w4_prepare_threads, all_k - 1);
      if (p.w.perm)
#pragma unroll
        for (unsigned& c : column) c = static_cast<unsigned>(p.w.perm[c]);
#pragma unroll
      for (unsigned i = 0; i < 8; ++i) {
        const unsigned c = column[i] < all_k ? column[i] : 0;
        bits[i] = params.row_in_shared ? row_copy[c] : row[c * p.x.last_stride];
      }
#pragma unroll
      for (unsigned i = 0; i < 8; ++i) {   // an order that leaves the row reads as NaN
        const std::uint16_t inside = column[i] < all_k ? bits[i] : 0x7fff;
        run_copy[i * w4_prepare_threads + threadIdx.x] = first + i * w4_prepare_threads < all_k ? inside : 0;
      }
      __syncthreads();
      eight = *reinterpret_cast<const uint4*>(run_copy + threadIdx.x * 8);
      __syncthreads();
    }
    if (params.copy && there && k < all_k) tile::store(params.copy + token * w4_padded_row(p.k) + k, eight);
    if (!params.sums) continue;
    float sum = 0.0f;
#pragma unroll
    for (const std::uint32_t pair : {eight.x, eight.y, eight.z, eight.w}) {
      const float2 two = tile::unpack<T>(pair);
      sum = fmaf(two.x, 1 / tile::CodeDecode<T, 4>::unit, sum);
      sum = fmaf(two.y, 1 / tile::CodeDecode<T, 4>::unit, sum);
    }
    for (unsigned other = 1; other < threads_of_span; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (threadIdx.x % threads_of_span == 0 && k < columns)
      params.sums[(std::size_t{block} * spans + (k / 32 >> p.span_shift)) * params.block_tokens + token % params.block_tokens] = sum;
  }
}

}  // namespace rooftile::gpu
