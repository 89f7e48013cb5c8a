// SPDX-License-Identifier: Apache-2.0
// What tiles.cuh needs of x beforehand, in the workspace: a launch before it, only where there is something to do.
//   copy [token][K, padded to 8]   x in the order of the codes, where the copy engine cannot bring x as it lies: rows that are no whole
//                                  16 bytes or lie unevenly, act-order
//   sums [block of tokens][step][span][token], fp32: of x / unit over every span, for minima
//
// A CTA has one token, or every `parts`-th 2048 columns of it if there are few tokens; a thread eight columns at a time. A sum is
// that of the eight in order, then of neighbouring threads by twos: what other tokens hold or how many there are does not enter it.
//
// Cost: x read and written once; with an order of columns from a row that stays in L1 while threads jump about in it. The next
// kernel brings up its barriers and asks for codes in the meantime.
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
  std::uint16_t* const copy = params.copy ? params.copy + token * w4_padded_row(p.k) : nullptr;
  const unsigned all_k = static_cast<unsigned>(p.k), columns = static_cast<unsigned>(p.steps) * w4_step_k, spans = columns / 32 >> p.span_shift;
  const unsigned threads_of_span = 4u << p.span_shift;
  tile::wait_for_previous_kernel();
  for (unsigned run = part * w4_prepare_columns; run < columns; run += params.parts * w4_prepare_columns) {
    const unsigned k = run + threadIdx.x * 8;
    uint4 eight = {};   // 0 past the end of K
    if (there && k < all_k) {
      if (p.x_in_pieces) {
        eight = tile::load_once(row + k);
      } else {
        unsigned column[8];
        std::uint32_t bits[8];
#pragma unroll
        for (unsigned i = 0; i < 8; ++i) column[i] = min(k + i, all_k - 1);
        if (p.w.perm)
#pragma unroll
          for (unsigned& c : column) c = static_cast<unsigned>(p.w.perm[c]);
#pragma unroll
        for (unsigned i = 0; i < 8; ++i) bits[i] = row[(column[i] < all_k ? column[i] : 0) * p.x.last_stride];
#pragma unroll
        for (unsigned i = 0; i < 8; ++i)   // an order that leaves the row reads as NaN
          bits[i] = k + i >= all_k ? 0 : column[i] < all_k ? bits[i] : 0x7fff;
        eight = {bits[0] | bits[1] << 16, bits[2] | bits[3] << 16, bits[4] | bits[5] << 16, bits[6] | bits[7] << 16};
      }
      if (copy) tile::store(copy + k, eight);
    }
    if (!params.sums) continue;
    float sum = 0.0f;
#pragma unroll
    for (const std::uint32_t pair : {eight.x, eight.y, eight.z, eight.w}) {
      const float2 two = tile::unpack<T>(pair);
      sum = fmaf(two.x, 1 / tile::W4Decode<T>::unit, sum);
      sum = fmaf(two.y, 1 / tile::W4Decode<T>::unit, sum);
    }
    for (unsigned other = 1; other < threads_of_span; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
    if (threadIdx.x % threads_of_span == 0 && k < columns)
      params.sums[(std::size_t{block} * spans + (k / 32 >> p.span_shift)) * params.block_tokens + token % params.block_tokens] = sum;
  }
}

}  // namespace rooftile::gpu
