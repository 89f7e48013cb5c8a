// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 4 or 8 bits, on mma m16n8k16: the weight-streaming kernel for few
// tokens, and the only kernel of a GPU without wgmma.
// Gated: the rows of W are [gate | up], y = activation(gate) * up + residual.
//   x [M, K]   y, residual [M, N or N / 2]   bias [N]   W in tiles of 16 n x 64 k (core/w4_layout.h)
//
// W is the register A operand, tokens are the mma's N: 8 tokens an mma tile, so few tokens waste little. A CTA takes a
// work tile of up to 64 tokens x 8 tile rows of W (one a warp; gated: four of gate, four of up) x one K split. A step
// of the main loop is two tiles of W: 16 n x 128 k a warp.
//   codes, scales   global -> the warp's own ring in shared memory (cp.async, `stages` steps) -> registers. A lane
//                   reads back the 16 bytes of a fragment block that it copied itself; lanes share the warp's scales.
//   x               global -> shared memory in x's own order, double-buffered tiles of `x_tile_k` k (cp.async)
//                   -> ldmatrix, which gives the B fragments
// Codes become (u - zero) / unit in registers, exactly: zero = 8 or 128 (symmetric), the zero point (integer) or 0
// (minima); unit is a power of two. The sum over 64 k (32 k with minima or groups below 128) is scaled in fp32:
//   acc += scale * sum of (u - zero) / unit * x  [+ minimum * sum of x / unit],   times unit after the main loop
// so products of exactly representable data stay exact. The sum of x is one more mma, with A = 1 / unit. The warps'
// accumulators go through shared memory to the threads of the epilogue. Up to eight K splits of up to 16 tokens are a
// cluster, each of whose CTAs reduces a part of the rows. Other K splits write partial sums to the workspace, which a
// second kernel (split_k.cu) reduces in order.
//
// Cost: N K (bits / 8 + b / G) bytes of W (b: 2 to 4 bytes of scale and offset for a group of G), 2 M N K flop, some
// 120 instructions of a warp for 1 KB of codes (2 KB in 8 bits) up to 8 tokens. Bandwidth is the roof if the loads run
// ahead, with the issue slots close behind; beyond 32 tokens the rate of mma.sync is. Every CTA reads x from L2 once.
// Sync: ring: a lane waits for its own cp.async groups; __syncwarp makes the other lanes' scales visible, and after it
// the stage read before may be overwritten. x: one __syncthreads a tile: all threads' copies of this tile have landed,
// and all warps have read the tile before, whose buffer the next copies overwrite. Epilogue: without a cluster the
// sums overlay the ring, so all warps meet before they write; with one the sums lie behind the ring, and a CTA writes
// to its peers once they run. All threads meet again before they read sums.
// Files: code_traits.cuh has layouts, atoms and shared memory; code_ring.cuh, stage_reader.cuh and x_tiles.cuh the
// copies; stream_codes_mainloop.cuh and stream_codes_epilogue.cuh the two halves of the kernel.
#pragma once

#include "kernels/gemm/stream_codes_epilogue.cuh"

namespace rooftile::gpu {

template <class Traits>
__global__ void __launch_bounds__(w4_warps * 32, Traits::ctas_per_sm)
    w4a16_stream(const __grid_constant__ CodesParams p) {
  using namespace cute;
  extern __shared__ __align__(128) std::uint8_t shared[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(shared);
  tile::let_next_kernel_start();
  const W4StreamWorkTile work = w4_stream_work_tile<Traits>(p);
  if (w4_cluster_size<Traits>(p) > 1) tile::arrive_at_cluster();

  Tensor rAcc =
      partition_fragment_C(typename Traits::TiledMma{}, Shape<_16, typename Traits::BLK_N>{});  // (MMA, 1, MMA_N)
  clear(rAcc);
  w4_stream_mainloop<Traits>(p, work, smem, rAcc);
  CUTE_UNROLL
  for (int i = 0; i < size(rAcc); ++i) rAcc(i) *= tile::CodeDecode<typename Traits::T, Traits::bits>::unit;
  if (p.partial) w4_store_partial<Traits>(p, work, rAcc);
  else w4_stream_epilogue<Traits>(p, work, shared, rAcc);
}

}  // namespace rooftile::gpu
