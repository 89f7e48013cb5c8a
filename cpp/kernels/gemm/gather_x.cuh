// SPDX-License-Identifier: Apache-2.0
// A copy of x for wgmma_codes.cuh, in the workspace. Launched before it where TMA cannot load x: rows that are not a
// multiple of 16 bytes, not aligned to 16 bytes, not evenly strided or overlapping; act-order.
//   x [M, K], any strides   to [token of this launch][K, padded to 8]   columns in the order of the codes
//
// A CTA copies one token, or (few tokens) every `ctas_per_token`-th 2048 columns of one. Threads load neighbouring
// columns one by one into shared memory, then store eight neighbours as one 16-byte vector. With act-order and many
// tokens the whole row is copied to shared memory first, so that threads gather from there and not from lines of L1.
//
// Cost: x read and written once, 4 M K bytes: bound by memory, few tokens by latency. The next kernel initialises its
// barriers and prefetches codes in the meantime.
// Sync: __syncthreads: the row has landed; the 2048 columns have landed; all threads have read them.
#pragma once

#include "kernels/gemm/params.h"
#include "tile/copy.cuh"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {

__global__ void __launch_bounds__(w4_gather_threads) w4a16_gather_x(const __grid_constant__ GatherParams params) {
  const CodesParams& p = params.product;
  tile::let_next_kernel_start();
  const unsigned cta = blockIdx.x % params.ctas_per_token, token = blockIdx.x / params.ctas_per_token;
  const auto* const row = static_cast<const std::uint16_t*>(p.x.data) + p.x.offset(p.first_token + token);
  const unsigned all_k = static_cast<unsigned>(p.k);
  __shared__ __align__(16) std::uint16_t tile_copy[w4_gather_columns];  // (2048 columns)
  extern __shared__ std::uint16_t row_copy[];                           // (K)
  tile::wait_for_previous_kernel();
  if (params.row_in_smem) {
#pragma unroll 8
    for (unsigned c = threadIdx.x; c < all_k; c += w4_gather_threads) row_copy[c] = row[c * p.x.last_stride];
    __syncthreads();
  }
  for (unsigned k0 = cta * w4_gather_columns; k0 < all_k; k0 += params.ctas_per_token * w4_gather_columns) {
    const unsigned first = k0 + threadIdx.x, k = k0 + threadIdx.x * 8;
    unsigned column[8];     // (8 columns, 256 apart): where x has them
    std::uint16_t bits[8];  // (8 columns)
#pragma unroll
    for (unsigned i = 0; i < 8; ++i) column[i] = min(first + i * w4_gather_threads, all_k - 1);
    if (p.w.perm)
#pragma unroll
      for (unsigned& c : column) c = static_cast<unsigned>(p.w.perm[c]);
#pragma unroll
    for (unsigned i = 0; i < 8; ++i) {
      const unsigned c = column[i] < all_k ? column[i] : 0;
      bits[i] = params.row_in_smem ? row_copy[c] : row[c * p.x.last_stride];
    }
#pragma unroll
    for (unsigned i = 0; i < 8; ++i)  // a column number outside of [0, K) reads as NaN; TMA reads none past K
      tile_copy[i * w4_gather_threads + threadIdx.x] = column[i] < all_k ? bits[i] : 0x7fff;
    __syncthreads();
    const uint4 vec = tile::load_vec_at<uint4>(tile_copy + threadIdx.x * 8);
    __syncthreads();
    if (k < all_k) tile::store(params.to + token * w4_padded_k(p.k) + k, vec);
  }
}

}  // namespace rooftile::gpu
