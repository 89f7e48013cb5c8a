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
// 128 rows x 128 k is 32 KB: some 1700 cycles of one SM's share of the bandwidth (4.5 TB/s over 132 SMs at 1.755 GHz:
// 19.4 bytes a cycle), at most 512 cycles of its tensor cores (64 tokens). x adds 256 bytes a token and step, from L2.
// Bandwidth is the roof as long as each SM has 40 KB in flight; the ring has 90 KB or more.
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

// The ring of a CTA: (S, [2 tiles of W (R, 64) | 2 tiles of x (N, 64)]) of T, then full and empty barriers (S) each. R
// and S are run-time numbers, which neither CuTe's TMA atoms nor CUTLASS's pipelines take.
template <class Cfg>
class TmaRing {
 public:
  using T = typename Cfg::T;
  using Full = cutlass::arch::ClusterTransactionBarrier;
  using Empty = cutlass::arch::ClusterBarrier;
  static constexpr int k_tiles = linear_tma_tiles_per_step, x_bytes = linear_tma_tile_bytes(Cfg::tokens);

  __device__ __forceinline__ TmaRing(std::uint8_t* memory, const TmaParams& params)
      : stages(params.stages),
        w_bytes(linear_tma_tile_bytes(params.rows)),
        stage_bytes(k_tiles * linear_tma_tile_bytes(params.rows + Cfg::tokens)),
        memory_(memory),
        full_(cute::recast_ptr<std::uint64_t>(memory + stages * stage_bytes)) {}

  __device__ __forceinline__ T* w(int stage, int k_tile) const {  // (R, 64), 128-byte swizzle
    return cute::recast_ptr<T>(memory_ + stage * stage_bytes + k_tile * w_bytes);
  }
  __device__ __forceinline__ T* x(int stage, int k_tile) const {  // (N, 64), 128-byte swizzle
    return cute::recast_ptr<T>(memory_ + stage * stage_bytes + k_tiles * w_bytes + k_tile * x_bytes);
  }
  __device__ __forceinline__ std::uint64_t* full(int stage) const { return full_ + stage; }
  __device__ __forceinline__ std::uint64_t* empty(int stage) const { return full_ + stages + stage; }
  __device__ __forceinline__ void init_barriers(int consumer_warps) const {
    for (int s = 0; s < stages; ++s) {
      Full::init(full(s), 1);
      Empty::init(empty(s), consumer_warps);
    }
    cutlass::arch::fence_barrier_init();
  }

  const int stages, w_bytes, stage_bytes;

 private:
  std::uint8_t* const memory_;
  std::uint64_t* const full_;
};
// The stage of a step, and the parity of the phase that is waited for.
struct TmaStage {
  int index = 0, parity;
  __device__ __forceinline__ void advance(int stages) {
    if (++index == stages) index = 0, parity ^= 1;
  }
};

// The work of a CTA: rows [row0, row0 + R) of W x tokens [token0, token0 + N) x one split of K.
struct TmaWorkTile {
  int split, row0, token0, first_step, steps;
  __device__ __forceinline__ explicit TmaWorkTile(const TmaParams& params, int tokens) {
    const Bits16Params& p = params;
    split = static_cast<int>(blockIdx.x) & ((1 << params.cluster_log2) - 1);
    // Neighbouring clusters read the same rows of W and other tokens, so W comes from memory once.
    const int cluster = static_cast<int>(blockIdx.x >> params.cluster_log2), n_block = divide(cluster, p.by_m_blocks);
    row0 = n_block * params.rows;
    token0 = (cluster - n_block * p.by_m_blocks.value) * tokens;
    first_step = split * p.split_steps;
    steps = max(0, min(p.split_steps, p.steps - first_step));
  }
};

// Loads the steps' tiles of W and x. One thread.
template <class Cfg>
__device__ __forceinline__ void tma_producer(const TmaParams& params, const TmaRing<Cfg>& ring,
                                             const TmaWorkTile& work) {
  using Ring = TmaRing<Cfg>;
  using TmaLoad = cute::SM90_TMA_LOAD_2D;
  constexpr auto hint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
  // Prefetch half a ring of W into L2. A whole ring would compete with the previous kernel for bandwidth.
  for (int k_tile = 0; k_tile < Ring::k_tiles * min(ring.stages / 2, work.steps); ++k_tile)
    TmaLoad::PREFETCH::copy(&params.w_map, (work.first_step * Ring::k_tiles + k_tile) * linear_tma_tile_k, work.row0);
  tile::wait_for_previous_kernel();
  TmaStage at{.parity = 1};  // a new barrier counts as one whose phase 1 has completed
#pragma unroll 1
  for (int step = 0, k = work.first_step * linear_tma_step_k; step < work.steps; ++step, k += linear_tma_step_k) {
    const int s = at.index;
    Ring::Empty::wait(ring.empty(s), at.parity);  // consumers -> producer: all warps have read this stage
    Ring::Full::arrive_and_expect_tx(ring.full(s), ring.stage_bytes);
#pragma unroll
    for (int k_tile = 0; k_tile < Ring::k_tiles; ++k_tile) {
      const int tile_k = k + k_tile * linear_tma_tile_k;
      TmaLoad::copy(&params.w_map, ring.full(s), hint, ring.w(s, k_tile), tile_k, work.row0);
      TmaLoad::copy(&params.x_map, ring.full(s), hint, ring.x(s, k_tile), tile_k, work.token0);
    }
    at.advance(ring.stages);
  }
  tile::let_next_kernel_start();
}

// Adds W x^T of all steps to acc: 64 rows of W for each consumer warp group.
template <class Cfg, class Acc>
__device__ __forceinline__ void tma_mainloop(const TmaRing<Cfg>& ring, int steps, Acc& acc) {
  using Ring = TmaRing<Cfg>;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  // The operands of the first stage's first tiles: this warp group's rows of W, and x
  const auto sW = cute::make_tensor(
      cute::make_smem_ptr(ring.w(0, 0) + thread / 128 * (linear_tma_tile_bytes(64) / sizeof(typename Cfg::T))),
      typename Cfg::LayoutW{});                                                                   // (BLK_M, BLK_K)
  const auto sX = cute::make_tensor(cute::make_smem_ptr(ring.x(0, 0)), typename Cfg::LayoutX{});  // (BLK_N, BLK_K)
  typename Cfg::TiledMma mma;
  const auto thr = mma.get_slice(thread % 128);
  const auto tCrW = thr.partition_fragment_A(sW);          // (MMA, MMA_M, MMA_K) descriptors
  const auto tCrX = thr.partition_fragment_B(sX);          // (MMA, MMA_N, MMA_K) descriptors
  const auto tile_at = [](const auto& first, int bytes) {  // the same operand, `bytes` behind the first
    return cute::make_tensor(first.data() + bytes / 16, first.layout());
  };
  TmaStage at{.parity = 0};
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    const int s = at.index;
    Ring::Full::wait(ring.full(s), at.parity);  // producer -> consumers: W and x of this stage are in shared memory
    cute::warpgroup_fence_operand(acc);
    cute::warpgroup_arrive();
#pragma unroll
    for (int k_tile = 0; k_tile < Ring::k_tiles; ++k_tile)
      cute::gemm(mma, tile_at(tCrW, s * ring.stage_bytes + k_tile * ring.w_bytes),
                 tile_at(tCrX, s * ring.stage_bytes + k_tile * Ring::x_bytes), acc);
    cute::warpgroup_commit_batch();
    cute::warpgroup_wait<0>();
    cute::warpgroup_fence_operand(acc);
    if (lane == 0) Ring::Empty::arrive(ring.empty(s));  // consumers -> producer: this stage may be overwritten
    at.advance(ring.stages);
  }
}

// Sums the splits of K and stores y: every CTA of the cluster reduces R / splits rows. All threads; those of consumers
// hold acc. memory: the ring, which now takes the partial sums of the rows that this CTA stores.
template <class Cfg, class Acc>
__device__ __forceinline__ void tma_epilogue(const TmaParams& params, const TmaWorkTile& work, std::uint8_t* memory,
                                             const Acc& acc, int consumer_warps) {
  constexpr int N = Cfg::tokens;
  const Bits16Params& p = params;
  const int R = params.rows, cluster = 1 << params.cluster_log2, rows = R >> params.cluster_log2, pitch = rows + 4;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  tile::arrive_at_cluster();
  float* const sums = cute::recast_ptr<float>(memory);  // fp32 (splits, N, rows), row pitch rows + 4
  tile::wait_for_previous_kernel();                     // which may write bias and residual, or still read y
  tile::wait_for_cluster();                             // every CTA of the cluster has read its last stage
  if (warp < consumer_warps) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + 8 * half;
      if (row >= R) break;  // R is no multiple of 64: the last warps have fewer rows
      float* const to = tile::map_shared_rank(sums, row / rows) + (work.split * N + 2 * t) * pitch + row % rows + g;
#pragma unroll
      for (int i = 0; i < N / 4; ++i) to[(i / 2 * 8 + i % 2) * pitch] = acc(i / 2 * 4 + 2 * half + i % 2);
    }
  }
  tile::sync_cluster();  // all CTAs -> all CTAs: the partial sums are written
  const int vecs = rows / 4, tokens = static_cast<int>(min(std::int64_t{N}, p.tokens - work.token0));
  // (vecs, N, splits) vectors of 4 neighbouring rows of W
  const auto sVecs = cute::make_tensor(
      cute::make_smem_ptr<float4>(memory),
      cute::make_layout(cute::make_shape(vecs, N, cluster), cute::make_stride(cute::_1{}, pitch / 4, N * pitch / 4)));
  for (int i = threadIdx.x; i < tokens * vecs; i += static_cast<int>(blockDim.x)) {
    const int token = i / vecs, vec = i % vecs;
    const float4 total = sum_in_order(cluster, [&](int peer) { return sVecs(vec, token, peer); });  // in the order of K
    Epilogue<typename Cfg::Element>(p, work.row0 + work.split * rows + 4 * vec).store(work.token0 + token, total, {});
  }
}

template <class Cfg>
__global__ void __launch_bounds__(linear_tma_threads(linear_tma_max_rows), 2)
    linear_tma_tiles([[maybe_unused]] const __grid_constant__ TmaParams params) {
#ifdef ROOFTILE_WGMMA
  extern __shared__ __align__(1024) std::uint8_t shared[];
  const TmaRing<Cfg> ring(shared, params);
  const TmaWorkTile work(params, Cfg::tokens);
  const int consumer_warps = static_cast<int>(blockDim.x) / 32 - 1, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) ring.init_barriers(consumer_warps);
  __syncthreads();  // thread 0 -> all threads: the barriers are initialised
  // (MMA, 1, 1) fp32, MMA = (2, 2, N / 8): tokens 2t, 2t + 1 x rows g, g + 8 of each 8 tokens
  auto acc =
      cute::partition_fragment_C(typename Cfg::TiledMma{}, cute::Shape<typename Cfg::BlkM, typename Cfg::BlkN>{});
  cute::clear(acc);
  if (warp == consumer_warps) {
    if (cute::elect_one_sync()) tma_producer(params, ring, work);
    __syncwarp();
  } else {
    tma_mainloop(ring, work.steps, acc);
  }
  tma_epilogue<Cfg>(params, work, shared, acc, consumer_warps);
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
