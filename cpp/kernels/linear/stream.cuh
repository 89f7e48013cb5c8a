// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 16 bits, for few tokens on GPUs that are no Hopper, and for any
// number wherever the others cannot be used.
//   x [M, K]   W [N, K]   y, residual [M, N]   bias [N]   any strides
//
// W is the register A operand of mma m16n8k16, tokens are its N: 1 to 16 of them cost the same. A CTA takes row_tiles x
// 16 rows of W, 16 tokens and one chunk of K; `slices` warps share 16 rows, and of every 64 slices of K each has its
// own 64. A step is 16 rows x 64 k.
//   W   global -> the warp's own ring in shared memory (cp.async, `linear_stages` steps) -> registers; a lane reads
//       what it copied
//   x   global -> registers, a step ahead; the other warps of the CTA find it in L1
// A lane takes 8 neighbours of every 32 k, of W and of x alike: its words are k 8t .. 8t + 7 where an mma asks for k 2t
// and 2t + 8, which changes the order of the sum and nothing else. The sums of a CTA's slices, then of the chunks of K
// (products/finish.cu), are added in order. A row's bits depend on N, K and the device alone.
//
// Cost: 2 N K bytes of W, 2 M N K flop: M flop a byte, so up to 16 tokens bandwidth is the roof and the floor 2 N K /
// bandwidth (25.5 us for K = 4096, N = 14336 at 4.6 TB/s). A warp spends some 90 issue slots on the 2 KB of a step and
// has 10 KB under way, a multiprocessor 70 to 80. x is read from L2 once a CTA or a little more: M / (16 row_tiles) of
// W's bytes.
// Sync: ring: a lane waits for its own copies and for nobody else. W may start on its way to L2 while the kernel before
// still runs; nothing is read before that has ended. One __syncthreads: the sums of all warps lie in shared memory,
// where the rings were.
#pragma once

#include "kernels/linear/params.h"
#include "kernels/products/finish.cuh"
#include "tile/copy.cuh"
#include "tile/cta_sync.cuh"
#include "tile/mma.cuh"

namespace rooftile::gpu {

// pieces: rows of W and of x are whole pieces of 16 bytes at multiples of them, and rows of x lie evenly.
template <class Element, int token_tiles_, bool pieces_>
struct LinearConfig {
  using T = Element;
  static constexpr int token_tiles = token_tiles_;  // of 8 tokens
  static constexpr bool pieces = pieces_;
};

// Eight elements of a row, 0 from the `left`th on.
template <class T>
__device__ __forceinline__ uint4 gather(const T* from, std::int64_t step, int left) {
  std::uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < left) words[i / 2] |= std::uint32_t{reinterpret_cast<const std::uint16_t*>(from)[i * step]} << 16 * (i % 2);
  return {words[0], words[1], words[2], words[3]};
}

// This lane's share of x, one step after another: of tokens g and g + 8, 8 neighbours of each half of a step.
template <class Cfg>
class Tokens {
  using T = typename Cfg::T;

 public:
  struct Step {
    uint4 at[Cfg::token_tiles][2];
  };
  // k: of the first step; stride: k from step to step.
  __device__ __forceinline__ Tokens(const LinearParams& p, std::int64_t token0, int tokens, std::int64_t k, int stride)
      : step_(Cfg::pieces ? 1 : p.x.last_stride), left_(static_cast<int>(p.k - k)), stride_(stride) {
#pragma unroll
    for (int nt = 0; nt < Cfg::token_tiles; ++nt) {
      const int token = static_cast<int>(threadIdx.x % 32) / 4 + 8 * nt;
      there_[nt] = token < tokens;  // the columns of those that are not there are not stored
      const std::int64_t row = token0 + (there_[nt] ? token : 0);
      from_[nt] = static_cast<const T*>(p.x.data) + (Cfg::pieces ? row * p.x_stride : p.x.offset(row)) + k * step_;
    }
  }
  __device__ __forceinline__ Step next() {
    Step x;
#pragma unroll
    for (int nt = 0; nt < Cfg::token_tiles; ++nt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint4& to = x.at[nt][half];
        to = {};
        if (!there_[nt] || left_ <= 32 * half) continue;
        if constexpr (Cfg::pieces) to = *reinterpret_cast<const uint4*>(from_[nt] + 32 * half);
        else to = gather(from_[nt] + 32 * half * step_, step_, left_ - 32 * half);
      }
      from_[nt] += stride_ * step_;
    }
    left_ -= stride_;
    return x;
  }

 private:
  const T* from_[Cfg::token_tiles];
  bool there_[Cfg::token_tiles];
  const std::int64_t step_;  // elements between neighbours
  int left_;                 // of K, from the next step's first element of this lane on
  const int stride_;
};

// This lane's share of W on its way to shared memory: [half of 32 k][rows g, g + 8][lane] 16 bytes a step.
template <class Cfg>
class Weights {
  using T = typename Cfg::T;

 public:
  // row: the warp's first; past the end of N the last one is read again.
  __device__ __forceinline__ Weights(const LinearParams& p, std::int64_t row, std::int64_t k, int stride)
      : step_(Cfg::pieces ? 1 : p.w_last_stride), left_(static_cast<int>(p.k - k)), stride_(stride) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      from_[r] = static_cast<const T*>(p.w) +
                 min(row + static_cast<int>(threadIdx.x % 32) / 4 + 8 * r, p.n - 1) * p.w_stride + k * step_;
  }
  // Starts the copies of the next step.
  __device__ __forceinline__ void copy(std::uint8_t* slot) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint8_t* const to = slot + (2 * half + r) * 512 + threadIdx.x % 32 * 16;
        if constexpr (Cfg::pieces) tile::cp_async_16_zfill(to, from_[r] + 32 * half, left_ > 32 * half);
        else *reinterpret_cast<uint4*>(to) = gather(from_[r] + 32 * half * step_, step_, left_ - 32 * half);
      }
      from_[r] += stride_ * step_;
    }
    left_ -= stride_;
  }

 private:
  const T* from_[2];
  const std::int64_t step_;
  int left_;
  const int stride_;
};

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
  const std::int64_t row0 = std::int64_t{row_block} * p.row_tiles * linear_rows,
                     row = row0 + (warp >> p.slice_shift) * linear_rows;
  const int first = split * p.chunk_steps, all = min(p.chunk_steps, p.steps - first);
  // the last CTA may have warps without rows
  const int steps = row < p.n ? (all - slice + slices - 1) >> p.slice_shift : 0;
  const int stride = linear_step_k << p.slice_shift;  // k from step to step
  std::uint8_t* const ring = shared + warp * (S * linear_step_bytes);

  if constexpr (Cfg::pieces) {  // as much as the ring takes: S steps of all slices lie one behind the other
    const std::int64_t from = (std::int64_t{first} + slice * S) * linear_step_k,
                       end = min(p.k, (std::int64_t{first} + all) * linear_step_k);
    if (lane < linear_rows && row + lane < p.n && from < end)
      tile::prefetch_l2_bulk(static_cast<const T*>(p.w) + (row + lane) * p.w_stride + from,
                             static_cast<int>(min(end - from, std::int64_t{S * linear_step_k})) * 2);
  }
  const std::int64_t k = (std::int64_t{first} + slice) * linear_step_k + 8 * t;  // of this lane, in its first step
  Weights<Cfg> weights(p, row, k, stride);
  Tokens<Cfg> x(p, p.first_token + local_token0, tokens, k, stride);
  tile::wait_for_previous_kernel();

#pragma unroll
  for (int s = 0; s < S - 1; ++s) {
    if (s < steps) weights.copy(ring + s * linear_step_bytes);
    cute::cp_async_fence();
  }
  typename Tokens<Cfg>::Step next = x.next();

  float acc[NT][4] = {};  // rows g, g + 8 x tokens 2t, 2t + 1
  int stage = 0;
  for (int step = 0; step < steps; ++step) {
    cute::cp_async_wait<S - 2>();  // this lane's copies of the step have come
    if (step + S - 1 < steps) weights.copy(ring + (stage == 0 ? S - 1 : stage - 1) * linear_step_bytes);
    cute::cp_async_fence();
    const typename Tokens<Cfg>::Step here_x = next;
    if (step + 1 < steps) next = x.next();
    const std::uint8_t* const here = ring + stage * linear_step_bytes + lane * 16;
    stage = stage == S - 1 ? 0 : stage + 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 upper = *reinterpret_cast<const uint4*>(here + 2 * half * 512),
                  lower = *reinterpret_cast<const uint4*>(here + (2 * half + 1) * 512);
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
        const uint4 b = here_x.at[nt][half];
        tile::mma<T>(acc[nt], {{upper.x, lower.x, upper.y, lower.y}}, {{b.x, b.y}});
        tile::mma<T>(acc[nt], {{upper.z, lower.z, upper.w, lower.w}}, {{b.z, b.w}});
      }
    }
  }

  // [warp][token][16 rows], each where the warp's ring was
  cute::cp_async_wait<0>();
  __syncwarp();  // all lanes have read their last step
  float* const sums = reinterpret_cast<float*>(ring);
#pragma unroll
  for (int nt = 0; nt < NT; ++nt)
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[(nt * 8 + 2 * t + i % 2) * linear_rows + g + i / 2 * 8] = acc[nt][i];
  __syncthreads();  // the sums of all warps are there
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
      Outputs<T>(p, n).store(p.first_token + local_token0 + token, sum, {});
    } else if (n < p.n) {  // the padding of N has room
      *reinterpret_cast<float4*>(p.partial + (split * p.tokens + local_token0 + token) * p.padded_n() + n) = sum;
    }
  }
}

}  // namespace rooftile::gpu
