// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 16 bits, for few tokens, and for any where tiles cannot be used.
//   x [M, K]   W [N, K]   y, residual [M, N]   bias [N]   any strides
//
// W is the register A operand of mma m16n8k16, tokens are its N: 1 to 16 of them cost the same. A CTA takes row_tiles x 16 rows of W,
// 16 tokens and one chunk of K; `slices` warps share 16 rows, and of every 64 slices of K each has its own 64. A step is 16 rows x 64 k.
//   W   global -> the warp's own ring in shared memory (cp.async, `linear_stages` steps) -> registers; a lane reads what it copied
//   x   global -> registers, a step ahead; the other warps of the CTA find it in L1
// A lane takes 8 neighbours of every 32 k, of W and of x alike: its words are k 8t .. 8t + 7 where an mma asks for k 2t and 2t + 8, which
// changes the order of the sum and nothing else. The sums of a CTA's slices, then of the chunks of K (products/finish.cu), are added in
// order. A row's bits depend on N, K and the device alone.
//
// Cost: 2 N K bytes of W, 2 M N K flop: M flop a byte, so up to 16 tokens bandwidth is the roof and the floor 2 N K / bandwidth (25.5 us
// for K = 4096, N = 14336 at 4.6 TB/s). A warp spends some 40 issue slots on the 2 KB of a step, a multiprocessor has 12 KB of every warp
// under way. x is read from L2 once a CTA or a little more: M / (16 row_tiles) of W's bytes.
// Sync: ring: a lane waits for its own copies and for nobody else. W may start on its way to L2 while the kernel before still runs; nothing
// is read before that has ended. One __syncthreads: the sums of all warps lie in shared memory, where the rings were.
#pragma once

#include "kernels/linear/params.h"
#include "kernels/products/finish.cuh"
#include "tile/copy.cuh"
#include "tile/grid.cuh"
#include "tile/mma.cuh"

namespace rooftile::gpu {

// pieces: rows of W and of x are whole pieces of 16 bytes at multiples of them, and rows of x lie evenly.
template <class Element, int token_tiles_, bool pieces_>
struct LinearConfig {
  using T = Element;
  static constexpr int token_tiles = token_tiles_;   // of 8 tokens
  static constexpr bool pieces = pieces_;
};

// Eight elements of a row from k on, 0 past its end.
template <class T>
__device__ __forceinline__ uint4 gather(const T* row, std::int64_t step, std::int64_t k, std::int64_t end) {
  std::uint32_t words[4] = {};
  for (int i = 0; i < 8; ++i)
    if (k + i < end) words[i / 2] |= std::uint32_t{reinterpret_cast<const std::uint16_t*>(row)[(k + i) * step]} << 16 * (i % 2);
  return {words[0], words[1], words[2], words[3]};
}

// This lane's share of x: tokens g and g + 8, 8 neighbours of each half of a step.
template <class Cfg>
struct TokenPieces {
  uint4 at[Cfg::token_tiles][2];
};
template <class Cfg>
class TokenLoader {
  using T = typename Cfg::T;

 public:
  __device__ __forceinline__ TokenLoader(const LinearParams& p, std::int64_t token0, int tokens) : p_(p) {
#pragma unroll
    for (int nt = 0; nt < Cfg::token_tiles; ++nt) {
      const int token = static_cast<int>(threadIdx.x % 32) / 4 + 8 * nt;
      if (token >= tokens) continue;   // no such token: its column of the product is not stored
      const std::int64_t offset = Cfg::pieces ? (token0 + token) * p.x_stride : p.x.offset(token0 + token);
      row_[nt] = static_cast<const T*>(p.x.data) + offset;
    }
  }
  __device__ __forceinline__ TokenPieces<Cfg> load(std::int64_t k) const {
    TokenPieces<Cfg> x;
#pragma unroll
    for (int nt = 0; nt < Cfg::token_tiles; ++nt)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const std::int64_t from = k + 32 * half;
        uint4& to = x.at[nt][half];
        to = {};
        if (!row_[nt] || from >= p_.k) continue;
        if constexpr (Cfg::pieces) to = *reinterpret_cast<const uint4*>(row_[nt] + from);
        else to = gather(row_[nt], p_.x.last_stride, from, p_.k);
      }
    return x;
  }

 private:
  const LinearParams& p_;
  const T* row_[Cfg::token_tiles] = {};
};

// Starts the copies of this lane's 64 bytes of one step: [half of 32 k][rows g, g + 8][lane] 16 bytes.
template <class Cfg>
__device__ __forceinline__ void copy_step(const LinearParams& p, const typename Cfg::T* const (&rows)[2], std::int64_t k, std::uint8_t* slot) {
#pragma unroll
  for (int half = 0; half < 2; ++half)
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const std::int64_t from = k + 32 * half;
      std::uint8_t* const to = slot + (2 * half + r) * 512 + threadIdx.x % 32 * 16;
      if constexpr (Cfg::pieces) tile::cp_async_16_or_zeros(to, rows[r] + from, from < p.k);
      else *reinterpret_cast<uint4*>(to) = gather(rows[r], p.w_last_stride, from, p.k);
    }
}

template <class Cfg>
__global__ void __launch_bounds__(linear_warps * 32, 2) linear_stream(const __grid_constant__ LinearParams p) {
  using T = typename Cfg::T;
  constexpr int NT = Cfg::token_tiles, S = linear_stages;
  extern __shared__ __align__(128) std::uint8_t shared[];
  tile::let_next_kernel_start();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int slices = 1 << p.slice_shift, slice = warp & (slices - 1);
  // neighbouring CTAs share rows of W
  const unsigned rest = blockIdx.x / p.token_blocks, row_block = rest % p.row_blocks, split = rest / p.row_blocks;
  const std::int64_t local_token0 = std::int64_t{blockIdx.x % p.token_blocks} * linear_stream_tokens;
  const int tokens = static_cast<int>(min(std::int64_t{8 * NT}, p.tokens - local_token0));
  const std::int64_t row0 = std::int64_t{row_block} * p.row_tiles * linear_rows, row = row0 + (warp >> p.slice_shift) * linear_rows;
  const int first = split * p.chunk_steps, all = min(p.chunk_steps, p.steps - first);
  // the last CTA may have warps without rows; past the end of N the last row is read again
  const int steps = row < p.n ? (all - slice + slices - 1) >> p.slice_shift : 0;
  const T* const w = static_cast<const T*>(p.w);
  const T* const rows[2] = {w + min(row + g, p.n - 1) * p.w_stride, w + min(row + g + 8, p.n - 1) * p.w_stride};
  const int stride = linear_step_k << p.slice_shift;                                     // k from step to step
  std::int64_t k = (std::int64_t{first} + slice) * linear_step_k + 8 * t;               // of this lane, in the step that is read
  std::uint8_t* const ring = shared + warp * (S * linear_step_bytes);

  if constexpr (Cfg::pieces) {   // as much as the ring takes: S steps of all slices lie one behind the other
    const std::int64_t from = (std::int64_t{first} + slice * S) * linear_step_k, end = min(p.k, (std::int64_t{first} + all) * linear_step_k);
    if (steps > 0 && lane < linear_rows && row + lane < p.n && from < end)
      tile::prefetch(w + (row + lane) * p.w_stride + from, static_cast<int>(min(end - from, std::int64_t{S * linear_step_k})) * 2);
  }
  tile::wait_for_previous_kernel();

#pragma unroll
  for (int s = 0; s < S - 1; ++s) {
    if (s < steps) copy_step<Cfg>(p, rows, k + s * stride, ring + s * linear_step_bytes);
    cute::cp_async_fence();
  }
  const TokenLoader<Cfg> loader(p, p.first_token + local_token0, tokens);
  TokenPieces<Cfg> next;
  if (steps > 0) next = loader.load(k);

  float acc[NT][4] = {};   // rows g, g + 8 x tokens 2t, 2t + 1
  int stage = 0;
  for (int step = 0; step < steps; ++step, k += stride) {
    cute::cp_async_wait<S - 2>();   // this lane's copies of the step have come
    if (step + S - 1 < steps) copy_step<Cfg>(p, rows, k + (S - 1) * stride, ring + (stage == 0 ? S - 1 : stage - 1) * linear_step_bytes);
    cute::cp_async_fence();
    const TokenPieces<Cfg> x = next;
    if (step + 1 < steps) next = loader.load(k + stride);
    const std::uint8_t* const here = ring + stage * linear_step_bytes + lane * 16;
    stage = stage == S - 1 ? 0 : stage + 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 upper = *reinterpret_cast<const uint4*>(here + 2 * half * 512), lower = *reinterpret_cast<const uint4*>(here + (2 * half + 1) * 512);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const uint4 b = x.at[nt][half];
        tile::mma<T>(acc[nt], {{upper.x, lower.x, upper.y, lower.y}}, {{b.x, b.y}});
        tile::mma<T>(acc[nt], {{upper.z, lower.z, upper.w, lower.w}}, {{b.z, b.w}});
      }
    }
  }

  // [warp][token][16 rows], each where the warp's ring was
  cute::cp_async_wait<0>();
  __syncwarp();   // all lanes have read their last step
  float* const sums = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int nt = 0; nt < NT; ++nt)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[(nt * 8 + 2 * t + i % 2) * linear_rows + g + i / 2 * 8] = acc[nt][i];
  __syncthreads();   // the sums of all warps are there
  const int fours = 4 * p.row_tiles;
  for (int i = threadIdx.x; i < fours * tokens; i += blockDim.x) {
    const int token = i / fours, four = i % fours;
    const std::int64_t n = row0 + 4 * four;
    float4 sum = {};
    for (int s = 0; s < slices; ++s) {
      const std::uint8_t* const of_warp = shared + ((four / 4 << p.slice_shift) + s) * (S * linear_step_bytes);
      const float4 part = reinterpret_cast<const float4*>(of_warp)[token * 4 + four % 4];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    if (p.splits == 1) {
      Outputs<T>(p, n).store(p.first_token + local_token0 + token, sum);
    } else if (n < p.n) {   // the padding of N has room
      *reinterpret_cast<float4*>(p.partial + (split * p.tokens + local_token0 + token) * p.padded_n() + n) = sum;
    }
  }
}

}  // namespace rooftile::gpu
