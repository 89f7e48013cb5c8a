// SPDX-License-Identifier: Apache-2.0
// The epilogue of the weight-streaming kernel (stream_codes.cuh): sums of the warps -> partial sums in the workspace,
// or, by way of shared memory, y.
#pragma once

#include "kernels/gemm/epilogue.cuh"
#include "kernels/gemm/stream_codes_mainloop.cuh"

namespace rooftile::gpu {

// Writes the warp's sums to the workspace, (16 rows, tokens) of (padded N, tokens, splits).
template <class Traits, class Acc>
__device__ __forceinline__ void w4_store_partial(const CodesParams& p, const W4StreamWorkTile& work, const Acc& rAcc) {
  using namespace cute;
  if (work.row >= p.tile_rows) return;  // past the end of N
  const std::int64_t padded_n = std::int64_t{p.tile_rows} * w4_tile_n;
  float* const partial =
      p.partial + (work.split * p.tokens + work.local_token0) * padded_n + std::int64_t{work.row} * w4_tile_n;
  Tensor gP = make_tensor(make_gmem_ptr(partial), Shape<_16, typename Traits::BLK_N>{},
                          make_stride(_1{}, padded_n));  // (row, BLK_N)
  auto lane_mma = typename Traits::TiledMma{}.get_slice(threadIdx.x % 32);
  Tensor tCgP = lane_mma.partition_C(gP);                               // (MMA, 1, MMA_N)
  Tensor tCcP = lane_mma.partition_C(make_identity_tensor(shape(gP)));  // (MMA, 1, MMA_N)
  CUTE_UNROLL
  for (int i = 0; i < size(rAcc); ++i)  // the workspace has room for the padding of N
    if (get<1>(tCcP(i)) < work.tokens) tCgP(i) = rAcc(i);
}

// Sums in shared memory: (16 rows, BLK_N, warps whose sums this CTA reduces, splits of the cluster). Each warp writes
// its sums to the CTA of the cluster whose epilogue handles them.
template <class Traits, class Acc>
__device__ __forceinline__ void w4_stream_epilogue(const CodesParams& p, const W4StreamWorkTile& work,
                                                   std::uint8_t* shared, const Acc& rAcc) {
  using namespace cute;
  constexpr int n_tokens = 8 * Traits::n_tiles;
  const int warp = threadIdx.x / 32;
  const bool gated = p.gate_tiles > 0;
  const int cluster = w4_cluster_size<Traits>(p), cta_rank = cluster > 1 ? static_cast<int>(work.split) : 0,
            out_tile = gated ? warp % (w4_warps / 2) : warp;
  const W4EpilogueTiles epilogue = w4_epilogue_tiles(gated, cluster);
  const auto sums_at = Traits::sums_of_warps(epilogue.warps);  // (sums of a warp, split) -> offset
  float* const sums = recast_ptr<float>(shared + p.sums_offset);
  const int sum_index = out_tile % epilogue.tiles + (gated && warp >= w4_warps / 2 ? epilogue.tiles : 0);
  float* to = sums + sums_at(sum_index, cta_rank);
  if (cluster > 1) {
    tile::wait_for_cluster();  // all peer CTAs have started: their shared memory may be written
    to = tile::map_shared_rank(to, out_tile / epilogue.tiles);
  } else {
    __syncthreads();  // all warps have read their codes: the sums overlay the ring
  }
  auto lane_mma = typename Traits::TiledMma{}.get_slice(threadIdx.x % 32);
  Tensor sSum = make_tensor(to, typename Traits::SmemLayoutSum{});  // (row, BLK_N), of this CTA or a peer
  copy(rAcc, lane_mma.partition_C(sSum));
  if (cluster > 1) {
    tile::sync_cluster();  // all sums of this CTA have landed
  } else {
    __syncthreads();
  }
  for (int vec = threadIdx.x; vec < epilogue.tiles * n_tokens * 4; vec += w4_warps * 32) {
    // A thread takes 4 neighbouring rows of W (columns of y) of one token.
    const int rows = vec % 4, token = vec / 4 % n_tokens, at = vec / (4 * n_tokens);
    if (token >= work.tokens || cta_rank * epilogue.tiles + at >= (gated ? w4_warps / 2 : w4_warps)) continue;
    const auto sum_of = [&](int sum_index) {
      return sum_in_order(cluster, [&](int split) -> float4 {
        Tensor sVecs = recast<float4>(make_tensor(make_smem_ptr(sums + sums_at(sum_index, split)),
                                                  typename Traits::SmemLayoutSum{}));  // (row / 4, BLK_N)
        return sVecs(rows, token);
      });
    };
    const Epilogue<typename Traits::T> out(
        p, std::int64_t{p.tile_row<w4_warps>(work.n_block, cta_rank * epilogue.tiles + at)} * w4_tile_n + rows * 4);
    out.store(p.first_token + work.local_token0 + token, sum_of(at), gated ? sum_of(epilogue.tiles + at) : float4{});
  }
}

}  // namespace rooftile::gpu
