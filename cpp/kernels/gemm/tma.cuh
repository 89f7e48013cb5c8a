// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 16 bits, on Hopper, with TMA and wgmma. Serves up to 64 tokens, and
// more where the tensors do not meet the rules of collective.cuh.
//   x [M, K]   W [N, K]   rows are whole 16-byte vectors at one stride    y, residual [M, N]   bias [N]   any strides
//
// W's rows are the M of wgmma and tokens are its N: 8, 16, 32 or 64. A CTA computes R rows of W (16 to 128) x N tokens
// over one split of K. One producer thread loads TMA tiles of 64 k of W and of x (128-byte swizzle) into a ring of S
// stages; a stage holds two tiles of each. Each consumer warp group multiplies 64 rows, both operands from shared
// memory. Two splits of K form a cluster: the CTAs exchange partial sums through distributed shared memory, and each
// CTA reduces and stores half of the rows. There is no workspace.
//
// Cost: 2 N K bytes of W. The plan chooses R and the splits so that all SMs read the same number of bytes. A step of
// 128 rows x 128 k is 32 KB: 800 cycles of one SM's bandwidth, at most 512 cycles of its tensor cores (64 tokens). x
// adds 256 bytes a token and step, from L2. Bandwidth is the roof as long as each SM has 40 KB in flight; the ring has
// 90 KB or more.
// Sync: producer -> full[stage] -> consumer warps -> empty[stage] -> producer.
//   Cluster: a CTA writes its peer's shared memory only after the peer has read its last stage; a second cluster
//   barrier publishes the partial sums.
//   PDL: the producer prefetches W into L2 while the previous kernel runs and reads nothing before that kernel has
//   ended. The next kernel may start when this CTA has issued all of its loads.
#pragma once

#include <cutlass/arch/barrier.h>

#include "kernels/gemm/bits16_traits.cuh"
#include "kernels/gemm/epilogue.cuh"
#include "kernels/gemm/launch.cuh"
#include "tile/cta_sync.cuh"
#include "tile/wgmma.cuh"

namespace rooftile::gpu {

template <class Cfg>
__global__ void __launch_bounds__(linear_tma_threads(linear_tma_max_rows), 2)
    linear_tma_tiles([[maybe_unused]] const __grid_constant__ TmaParams params) {
#ifdef ROOFTILE_WGMMA
  using T = typename Cfg::T;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  using TmaLoad = cute::SM90_TMA_LOAD_2D;
  constexpr int N = Cfg::tokens, H = linear_tma_tiles_per_step, x_bytes = linear_tma_tile_bytes(N);
  constexpr auto hint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  const Bits16Params& p = params;
  const int R = params.rows, S = params.stages, w_bytes = linear_tma_tile_bytes(R),
            stage_bytes = H * linear_tma_tile_bytes(R + N);
  // (S, [2 tiles of W (R, 64) | 2 tiles of x (N, 64)]) of T, then full and empty barriers (S) each. R and S are
  // run-time numbers, which neither CuTe's TMA atoms nor CUTLASS's pipelines take.
  extern __shared__ __align__(1024) std::uint8_t shared[];
  std::uint64_t *const full = cute::recast_ptr<std::uint64_t>(shared + S * stage_bytes), *const empty = full + S;
  const int warps = static_cast<int>(blockDim.x) / 32 - 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32,
            g = lane / 4, t = lane % 4;
  const int cluster_log2 = params.cluster_log2, cluster = 1 << cluster_log2,
            split = static_cast<int>(blockIdx.x) & (cluster - 1);
  // Neighbouring clusters read the same rows of W and other tokens, so W comes from memory once.
  const int cluster_id = static_cast<int>(blockIdx.x >> cluster_log2), n_block = divide(cluster_id, p.by_m_blocks),
            row0 = n_block * R, token0 = (cluster_id - n_block * p.by_m_blocks.value) * N;
  const int first_step = split * p.split_steps, steps = max(0, min(p.split_steps, p.steps - first_step));

  if (threadIdx.x == 0) {
    for (int s = 0; s < S; ++s) {
      Full::init(full + s, 1);
      Empty::init(empty + s, warps);
    }
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();  // thread 0 -> all threads: the barriers are initialised

  typename Cfg::TiledMma mma;
  // (MMA, 1, 1) fp32, MMA = (2, 2, N / 8): tokens 2t, 2t + 1 x rows g, g + 8 of each 8 tokens
  auto acc = cute::partition_fragment_C(mma, cute::Shape<typename Cfg::BlkM, typename Cfg::BlkN>{});
  cute::clear(acc);
  if (warp == warps) {
    if (cute::elect_one_sync()) {
      // Prefetch half a ring of W into L2. A whole ring would compete with the previous kernel for bandwidth.
      for (int k_tile = 0; k_tile < H * min(S / 2, steps); ++k_tile)
        TmaLoad::PREFETCH::copy(&params.w_map, (first_step * H + k_tile) * linear_tma_tile_k, row0);
      tile::wait_for_previous_kernel();
#pragma unroll 1
      for (int step = 0, s = 0, parity = 1, k = first_step * linear_tma_step_k; step < steps;
           ++step, k += linear_tma_step_k) {
        Empty::wait(empty + s, parity);  // consumers -> producer: all warps have read this stage
        Full::arrive_and_expect_tx(full + s, stage_bytes);
        std::uint8_t* const to = shared + s * stage_bytes;  // (2, R, 64) of W, then (2, N, 64) of x
#pragma unroll
        for (int k_tile = 0; k_tile < H; ++k_tile) {
          const int tile_k = k + k_tile * linear_tma_tile_k;
          TmaLoad::copy(&params.w_map, full + s, hint, to + k_tile * w_bytes, tile_k, row0);
          TmaLoad::copy(&params.x_map, full + s, hint, to + H * w_bytes + k_tile * x_bytes, tile_k, token0);
        }
        if (++s == S) s = 0, parity ^= 1;
      }
      tile::let_next_kernel_start();
    }
    __syncwarp();
  } else {
    // The operands of the first stage's first tiles: this warp group's rows of W, and x
    const auto sW = cute::make_tensor(cute::make_smem_ptr<T>(shared + warp / 4 * linear_tma_tile_bytes(64)),
                                      typename Cfg::LayoutW{});  // (BLK_M, BLK_K)
    const auto sX =
        cute::make_tensor(cute::make_smem_ptr<T>(shared + H * w_bytes), typename Cfg::LayoutX{});  // (BLK_N, BLK_K)
    const auto thr = mma.get_slice(static_cast<int>(threadIdx.x) % 128);
    const auto tCrW = thr.partition_fragment_A(sW);          // (MMA, MMA_M, MMA_K) descriptors
    const auto tCrX = thr.partition_fragment_B(sX);          // (MMA, MMA_N, MMA_K) descriptors
    const auto tile_at = [](const auto& first, int bytes) {  // the same operand, `bytes` behind the first
      return cute::make_tensor(first.data() + bytes / 16, first.layout());
    };
#pragma unroll 1
    for (int step = 0, s = 0, parity = 0; step < steps; ++step) {
      Full::wait(full + s, parity);  // producer -> consumers: W and x of this stage are in shared memory
      cute::warpgroup_fence_operand(acc);
      cute::warpgroup_arrive();
#pragma unroll
      for (int k_tile = 0; k_tile < H; ++k_tile)
        cute::gemm(mma, tile_at(tCrW, s * stage_bytes + k_tile * w_bytes),
                   tile_at(tCrX, s * stage_bytes + k_tile * x_bytes), acc);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      cute::warpgroup_fence_operand(acc);
      if (lane == 0) Empty::arrive(empty + s);  // consumers -> producer: this stage may be overwritten
      if (++s == S) s = 0, parity ^= 1;
    }
  }

  // The ring's memory now holds the partial sums of the rows this CTA stores.
  tile::arrive_at_cluster();
  const int rows = R >> cluster_log2, pitch = rows + 4;
  float* const sums = cute::recast_ptr<float>(&shared[0]);  // fp32 (splits, N, rows), row pitch rows + 4
  tile::wait_for_previous_kernel();                         // which may write bias and residual, or still read y
  tile::wait_for_cluster();                                 // every CTA of the cluster has read its last stage
  if (warp < warps) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + 8 * half;
      if (row >= R) break;  // R is no multiple of 64: the last warps have fewer rows
      float* const to = tile::map_shared_rank(sums, row / rows) + (split * N + 2 * t) * pitch + row % rows + g;
#pragma unroll
      for (int i = 0; i < N / 4; ++i) to[(i / 2 * 8 + i % 2) * pitch] = acc(i / 2 * 4 + 2 * half + i % 2);
    }
  }
  tile::sync_cluster();  // all CTAs -> all CTAs: the partial sums are written
  const int vecs = rows / 4, tokens = static_cast<int>(min(std::int64_t{N}, p.tokens - token0));
  // (vecs, N, splits) vectors of 4 neighbouring rows of W
  const auto sVecs = cute::make_tensor(
      cute::make_smem_ptr<float4>(&shared[0]),
      cute::make_layout(cute::make_shape(vecs, N, cluster), cute::make_stride(cute::_1{}, pitch / 4, N * pitch / 4)));
  for (int i = threadIdx.x; i < tokens * vecs; i += static_cast<int>(blockDim.x)) {
    const int token = i / vecs, vec = i % vecs;
    const float4 total = sum_in_order(cluster, [&](int peer) { return sVecs(vec, token, peer); });  // in the order of K
    Epilogue<typename Cfg::Element>(p, row0 + split * rows + 4 * vec).store(token0 + token, total, {});
  }
#endif
}

// A row of the table.
template <DType dtype, int config>
GemmVariant tma_variant() {
  return VariantOf<TmaParams, linear_tma_tiles<LinearTma<tile::ElementOf<dtype>, config>>>::row(
      {.path = GemmPath::tma, .dtype = dtype, .config = config});
}
template <DType dtype>
std::span<const GemmVariant> tma_variants() {
  static const GemmVariant rows[] = {tma_variant<dtype, 0>(), tma_variant<dtype, 1>(), tma_variant<dtype, 2>(),
                                     tma_variant<dtype, 3>()};
  return rows;
}

}  // namespace rooftile::gpu
