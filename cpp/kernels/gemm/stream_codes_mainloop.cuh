// SPDX-License-Identifier: Apache-2.0
// The main loop of the weight-streaming kernel (stream_codes.cuh).
#pragma once

#include "kernels/gemm/code_ring.cuh"
#include "kernels/gemm/stream_scheduler.cuh"
#include "kernels/gemm/x_tiles.cuh"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {

// CTAs of the cluster: 1, a constant, where the variant or the architecture has none.
template <class Traits>
__device__ __forceinline__ int w4_cluster_size(const CodesParams& p) {
  return Traits::clusters && tile::has_clusters ? p.cluster : 1;
}

// The work tile of a CTA. The CTAs of a cluster take the K splits of the same rows of W and of all tokens; without
// clusters: stream_work_tile.
struct W4StreamWorkTile {
  std::int64_t local_token0;  // first token, from the first one of this launch
  unsigned n_block, split;
  int row, tokens;  // row: this warp's tile row of W; tokens: up to BLK_N
};
template <class Traits>
__device__ __forceinline__ W4StreamWorkTile w4_stream_work_tile(const CodesParams& p) {
  W4StreamWorkTile at;
  unsigned m_block = 0;
  if (w4_cluster_size<Traits>(p) > 1) {
    const tile::ClusterCoord coord = tile::cluster_coord();
    at.split = coord.rank;
    at.n_block = coord.cluster;
  } else {
    const StreamWorkTile cta = stream_work_tile(static_cast<int>(blockIdx.x), p.by_m_blocks, p.by_n_blocks);
    m_block = cta.m_block;
    at.split = cta.split;
    at.n_block = cta.n_block;
  }
  at.local_token0 = std::int64_t{m_block} * w4_stream_block_m;
  at.row = p.tile_row<w4_warps>(at.n_block, threadIdx.x / 32);
  at.tokens = static_cast<int>(min(static_cast<std::int64_t>(8 * Traits::n_tiles), p.tokens - at.local_token0));
  return at;
}

// acc (MMA, 1, MMA_N) += scale * sum; scale: of rows g and g + 8, sum as acc.
template <class Acc>
__device__ __forceinline__ void add_scaled(const float2& scale, const Acc& sum, Acc& acc) {
  CUTE_UNROLL
  for (int i = 0; i < cute::size(acc); ++i) acc(i) = fmaf(i % 4 < 2 ? scale.x : scale.y, sum(i), acc(i));
}

// rAcc (MMA, 1, MMA_N), zero before: this warp's 16 rows of W times the tokens of the work tile, over the CTA's K
// split; in units of CodeDecode::unit.
template <class Traits, class Acc>
__device__ __forceinline__ void w4_stream_mainloop(const CodesParams& p, const W4StreamWorkTile& work,
                                                   typename Traits::SharedStorage& smem, Acc& rAcc) {
  using namespace cute;
  using Decode = tile::CodeDecode<typename Traits::T, Traits::bits>;
  constexpr int S = Traits::stages, XS = Traits::x_tile_steps;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = work.split * p.split_steps;
  int steps = min(p.split_steps, p.steps - first);  // steps left, from the current tile of x on

  W4CodeRing<Traits> ring(p, smem.ring[warp], work.row, first, steps);
  const W4StageReader<Traits> reader(smem.ring[warp], p.scale_k_shift);
  const W4XTiles<Traits> x(p, smem.x(), p.first_token + work.local_token0, work.tokens, first);
  ring.prefetch(S - 1);
  tile::wait_for_previous_kernel();
  x.load(0);
  CUTE_UNROLL
  for (int s = 0; s < S - 1; ++s) {
    ring.load(s, s);
    cp_async_fence();
  }
  ring.advance(S - 1);

  typename Traits::TiledMma mma;
  auto lane_mma = mma.get_slice(lane);
  Tensor sX = x.smem();                                                                  // (BLK_N, BLK_K, buffer)
  Tensor rA = lane_mma.partition_fragment_A(make_tensor(sX.data(), Shape<_16, _32>{}));  // (MMA, 1, 2 k-steps)
  Tensor rX = lane_mma.partition_fragment_B(make_tensor(sX.data(), Shape<_8, _32>{}));   // (MMA, 1, 2 k-steps)
  // A tile of x with fewer than 8 tokens repeats its last one in the remaining n of the MMA, which the epilogue drops.
  typename Traits::SmemCopyX smem_x;
  Tensor tBsX = smem_x.get_slice(min(lane % 8, p.x_tile_tokens - 1) + lane / 8 * 8)
                    .partition_S(sX);                 // (CPY, MMA_N, k-block, buffer)
  Tensor tBrX = smem_x.get_slice(lane).retile_D(rX);  // (CPY, 1, 1)

  Tensor rCodes =
      make_tensor<std::uint32_t>(Shape<Int<Traits::bits / 4>, Shape<_2, _4>>{});  // (WORD, (k-step, k-block))
  // (2 scale blocks): 16-bit scales of rows g and g + 8 in each scale block
  Tensor rScales = make_tensor<std::uint16_t>(Int<2 * Traits::scale_blocks>{});
  Tensor rMinima = make_fragment_like(rScales);     // the same
  Tensor rZero = make_tensor<std::uint32_t>(_2{});  // (row g, row g + 8): -zero / unit in both halves
  rZero(0) = rZero(1) = Traits::minima ? Decode::no_zero : Decode::symmetric_zero;
  Tensor rSum = make_fragment_like(rAcc);   // (MMA, 1, MMA_N): of the current scale block
  Tensor rXSum = make_fragment_like(rAcc);  // (MMA, 1, MMA_N): sums of x / unit, the same in every row; minima
  Tensor rInverseUnit = make_fragment_like(rA(_, _, _0{}));  // (MMA, 1)
  fill(rInverseUnit, typename Traits::MmaT(1 / Decode::unit));

  // stage0: stage of the first step of the current tile of x
  for (int x_tile = 0, stage0 = 0;; ++x_tile) {
    cp_async_wait<S - 2>();
    __syncthreads();  // all copies of this tile of x have landed; all warps have read the tile before
    if (steps > XS) x.load(x_tile + 1);
    CUTE_UNROLL
    for (int step = 0; step < XS; ++step) {
      const int stage = (stage0 + step) % S;
      if (step > 0) {
        cp_async_wait<S - 2>();
        __syncwarp();  // all lanes' copies of this stage have landed; all lanes have read the stage before
      }
      reader.read_codes(stage, rCodes);
      reader.read_scales(stage, rScales);
      if constexpr (Traits::minima) reader.read_minima(stage, rMinima);
      ring.load(step, (stage + S - 1) % S);
      cp_async_fence();

      CUTE_UNROLL
      for (int k_block = 0; k_block < 4; ++k_block) {
        if (k_block % Traits::k_blocks_per_sum == 0) clear(rSum), clear(rXSum);
        if (Traits::has_zero_points(p.w) && (Traits::small_groups || k_block == 0)) {
          const uint2 zeros = reader.read_zeros(stage, k_block);
          Decode::set_zeros(rZero, zeros.x, zeros.y);
        }
        Decode::dequant(rCodes(_, make_coord(_, k_block)), rZero, rA);
        CUTE_UNROLL
        for (int n = 0; n < Traits::n_tiles; ++n) {
          copy(smem_x, tBsX(_, n, 4 * step + k_block, x_tile % 2), tBrX(_, _0{}, _0{}));
          CUTE_UNROLL
          for (int k = 0; k < 2; ++k) {
            gemm(mma, rA(_, _0{}, k), rX(_, _0{}, k), rSum(_, _0{}, n));
            if constexpr (Traits::minima) gemm(mma, rInverseUnit(_, _0{}), rX(_, _0{}, k), rXSum(_, _0{}, n));
          }
        }
        if (k_block % Traits::k_blocks_per_sum != Traits::k_blocks_per_sum - 1) continue;
        const int block = Traits::small_groups ? k_block : 0;
        add_scaled(Traits::scale_pair(p.w.scale_dtype == DType::f16, recast<std::uint32_t>(rScales)(block)), rSum,
                   rAcc);
        if constexpr (Traits::minima)
          add_scaled(Traits::scale_pair(p.w.scale_dtype == DType::f16, recast<std::uint32_t>(rMinima)(block)), rXSum,
                     rAcc);
      }
      if (step + 1 >= steps) return;
    }
    steps -= XS;
    ring.advance(XS);
    if constexpr (XS % S != 0) stage0 = (stage0 + XS) % S;
  }
}

}  // namespace rooftile::gpu
