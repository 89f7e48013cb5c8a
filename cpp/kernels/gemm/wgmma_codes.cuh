// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 4 or 8 bits, on Hopper's wgmma: for more tokens than
// stream_codes.cuh is fast for. Persistent, warp-specialised CTAs.
//   x [M, K]   y, residual [M, N]   bias [N]   W in tiles of 16 n x 64 k (core/w4_layout.h)
//
// W is the register A operand, tokens are wgmma's N. A work tile is 128 rows of W x `tokens` tokens x K, or one K split
// of it, or (stream-K) the part of K in the CTA's work range. Two consumer warp groups run the MMAs, one tile row of W
// a warp; the four warps of a producer warp group load for them, `stages` steps of 128 k ahead and on into the next
// work tile:
//   codes, scales   global -> one stage of each consumer warp (cp.async), as in stream_codes.cuh; a producer warp loads
//                   for two consumer warps
//   x               global -> shared memory by TMA, 128-byte swizzle. The CTAs of a cluster have different rows of W
//                   and the same tokens: each loads its part of the tokens and multicasts it to all of them.
// Consumers decode codes into A fragments, a k-block of 32 at a time: as soon as a wgmma batch has read its registers,
// while the batches after it still run.
//   scale blocks of 128 k and more, no minima   operands (u - zero) / unit, exact; scales act in fp32 on the sum over a
//                                               step:
//                                               acc += scale * sum of (u - zero) / unit * x,   times unit at the end
//   blocks of 64 k, 4 bits, up to 64 tokens     the same, with two sums a step
//   others (`rounded`)                          operands (u - zero) * scale + minimum, rounded to T; one accumulator
//                                               over K. Scaling four sums a step in fp32 would cost more issue slots
//                                               than the tensor cores have cycles.
//
// Cost of a step, 128 tokens: 4 Mflop, 1024 cycles of the tensor cores; 8 KB of codes of 4 bits, 32 KB of x, of which
// the CTA loads 32 / cluster. A consumer warp issues some 220 instructions, with rounded operands some 240 (32 tokens:
// 170 and 244); what one warp group cannot overlap with its own MMAs overlaps with the other's. Tensor cores are the
// roof from 128 tokens on, the bytes of W below.
// Sync: producer -> full[stage] (TMA bytes and cp.async copies have landed) -> consumers -> empty[stage] (all consumer
// warps of the cluster have read the stage) -> producers of all CTAs. A named barrier of the consumer warps guards the
// epilogue's tile. A CTA stays alive until its peer's last multicast write and arrival have landed in its shared
// memory. Stream-K: a CTA writes its fix-up sums after its first work tile, then releases its semaphore in global
// memory. The CTA of the next work range, later in the grid, waits for that semaphore before its last work tile.
// Files: wgmma_codes_traits.cuh has layouts, atoms and shared memory; wgmma_codes_scheduler.cuh the work tiles and
// fix-up sums; wgmma_codes_producer.cuh the loads, with code_loader.cuh; wgmma_codes_mainloop.cuh, with
// stage_reader.cuh, and wgmma_codes_epilogue.cuh what consumers do.
#pragma once

#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include "kernels/gemm/wgmma_codes_epilogue.cuh"
#include "kernels/gemm/wgmma_codes_mainloop.cuh"
#include "kernels/gemm/wgmma_codes_producer.cuh"
#include "tile/wgmma.cuh"

namespace rooftile::gpu {

// Runs the consumer warps.
template <class Traits>
__device__ __forceinline__ void w4_wgmma_consumer(const WgmmaParams& params, typename Traits::SharedStorage& smem,
                                                  int cta_rank) {
  using namespace cute;
  W4TileScheduler<Traits> scheduler(params, cta_rank);
  W4WgmmaWorkTile work = scheduler.next();
  W4WgmmaMainloop<Traits> mainloop(params, smem, cta_rank);
  Tensor rAcc =
      partition_fragment_C(typename Traits::TiledMma{},
                           Shape<typename Traits::BLK_M, typename Traits::BLK_N>{});  // ((2, 2, BLK_N / 8), 1, 1)
  mainloop.start();
  for (;;) {
    const bool last = !scheduler.has_next();
    // Only the last tile reads fix-up sums. Exact operands: the first step's MMAs write rSum, so loads overlap them.
    if (scheduler.reads_fixup(work)) w4_read_fixup<Traits>(params, scheduler.fixup_cta(), rAcc);
    else clear(rAcc);
    mainloop.run(work.steps, last, rAcc);
    if (scheduler.writes_fixup(work)) w4_write_fixup<Traits>(params, rAcc);  // only the first tile, never the last one
    else w4_wgmma_epilogue<Traits>(params, work, smem, rAcc);
    if (last) break;
    work = scheduler.next();
  }
  // All warps have passed the semaphore; clear it, so that a graph replay with the same value waits again.
  if (scheduler.reads_fixup(work) && threadIdx.x == 0) params.semaphores[scheduler.fixup_cta()] = 0;
}

template <class Traits>
__global__ void __launch_bounds__(Traits::config.threads(), Traits::ctas_per_sm)
    w4a16_wgmma([[maybe_unused]] const __grid_constant__ WgmmaParams params) {
#ifdef ROOFTILE_WGMMA
  constexpr int warps = Traits::warps;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  auto& smem = *reinterpret_cast<typename Traits::SharedStorage*>(shared);
  const int warp = cutlass::canonical_warp_idx_sync(), cluster = 1 << params.cluster_shift,
            cta_rank = blockIdx.x & (cluster - 1);
  if (threadIdx.x == 0) {
    for (int s = 0; s < Traits::stages; ++s) {
      // one thread's TMA bytes, and the cp.async copies of every producer lane
      smem.full[s].init(1 + Traits::producer_warps * 32);
      smem.empty[s].init(warps * (32 + cluster - 1));  // own lanes, and one lane of each peer warp
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncwarp();
  tile::arrive_at_cluster();
  if (warp >= warps) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::producer_registers>();
    w4_wgmma_producer<Traits>(params, smem, cta_rank, warp - warps);
  } else {
    cutlass::arch::warpgroup_reg_alloc<Traits::consumer_registers>();
    tile::wait_for_cluster();  // all CTAs of the cluster have initialised their barriers
    tile::wait_for_previous_kernel();
    w4_wgmma_consumer<Traits>(params, smem, cta_rank);
  }
#endif
}

}  // namespace rooftile::gpu
