// SPDX-License-Identifier: Apache-2.0
// A copy of x for tiles.cuh, in the workspace: a launch before it, only where TMA cannot load x as it lies: rows that
// are no whole 16 bytes or lie unevenly, act-order.
//   copy [token][K, padded to 8]   x in the order of the codes
//
// A CTA has one token, or every `parts`-th 2048 columns of it if there are few tokens. x goes through shared memory:
// threads load neighbouring columns one by one, then each takes eight neighbours. With act-order and many tokens the
// whole row comes first, so that threads gather from shared memory and not from lines of L1.
//
// Cost: x read and written once. The next kernel initialises its barriers and prefetches codes in the meantime.
// Sync: __syncthreads: with act-order, a row has landed; a run of columns has landed, and has been read.
#pragma once

#include "kernels/w4a16/params.h"
#include "tile/copy.cuh"
#include "tile/grid.cuh"

namespace rooftile::gpu {

__global__ void __launch_bounds__(w4_prepare_threads) w4a16_prepare(const __grid_constant__ W4PrepareParams params) {
  const W4MatmulParams& p = params.product;
  tile::let_next_kernel_start();
  const unsigned part = blockIdx.x % params.parts, token = blockIdx.x / params.parts;
  const auto* const row = static_cast<const std::uint16_t*>(p.x.data) + p.x.offset(p.first_token + token);
  const unsigned all_k = static_cast<unsigned>(p.k);
  __shared__ __align__(16) std::uint16_t run_copy[w4_prepare_columns];
  extern __shared__ std::uint16_t row_copy[];
  tile::wait_for_previous_kernel();
  if (params.row_in_shared) {
#pragma unroll 8
    for (unsigned c = threadIdx.x; c < all_k; c += w4_prepare_threads) row_copy[c] = row[c * p.x.last_stride];
    __syncthreads();
  }
  for (unsigned run = part * w4_prepare_columns; run < all_k; run += params.parts * w4_prepare_columns) {
    const unsigned first = run + threadIdx.x, k = run + threadIdx.x * 8;
    unsigned column[8];
    std::uint16_t bits[8];
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
    for (unsigned i = 0; i < 8; ++i) {  // a column outside of the row reads as NaN
      const std::uint16_t inside = column[i] < all_k ? bits[i] : 0x7fff;
      run_copy[i * w4_prepare_threads + threadIdx.x] = first + i * w4_prepare_threads < all_k ? inside : 0;
    }
    __syncthreads();
    const uint4 eight = *reinterpret_cast<const uint4*>(run_copy + threadIdx.x * 8);
    __syncthreads();
    if (k < all_k) tile::store(params.copy + token * w4_padded_row(p.k) + k, eight);
  }
}

}  // namespace rooftile::gpu
