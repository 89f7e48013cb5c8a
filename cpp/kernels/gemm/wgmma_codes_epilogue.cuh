// SPDX-License-Identifier: Apache-2.0
// The epilogue of wgmma_codes.cuh: a work tile's sums -> y, or partial sums in the workspace.
#pragma once

#include "kernels/gemm/epilogue.cuh"
#include "kernels/gemm/wgmma_codes_scheduler.cuh"

namespace rooftile::gpu {

// Sums in fp32 go through shared memory, transposed to (rows of W, tokens), so that stores along N coalesce: 64 tokens
// at most at a time. A thread takes four neighbouring rows of W, or four pairs of gate and up; a warp stores
// `tokens_per_warp` tokens at once. All consumer warps; rAcc ((2, 2, BLK_N / 8), 1, 1).
template <class Traits, class Acc>
__device__ __forceinline__ void w4_wgmma_epilogue(const CodesParams& p, const W4WgmmaWorkTile& work,
                                                  typename Traits::SharedStorage& smem, const Acc& rAcc) {
  using namespace cute;
  using T = typename Traits::T;
  // values: sums of a thread in an epilogue tile
  constexpr int rows = typename Traits::BLK_M{}, warps = Traits::warps, values = Traits::epilogue_tokens / 2;
  static_assert(rows == 128 && Traits::epilogue_tiles <= 2);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int gated = p.gate_tiles > 0 && !p.partial ? 1 : 0, tokens_per_warp = 1 << gated;
  const int first_token = warp * tokens_per_warp + (gated ? lane / 16 : 0), vec = gated ? lane % 16 : lane;
  const std::int64_t n = std::int64_t{p.template tile_row<warps>(work.n_block, vec / (w4_tile_n / 4))} * w4_tile_n +
                         vec % (w4_tile_n / 4) * 4;
  const std::int64_t padded_n = std::int64_t{p.tile_rows} * w4_tile_n;

  Tensor sOut = make_tensor(make_smem_ptr(smem.out), typename Traits::SmemLayoutOut{});  // (BLK_M, BLK_N)
  Tensor tCsOut = typename Traits::TiledMma{}.get_slice(threadIdx.x).partition_C(sOut);  // ((2, 2, BLK_N / 8), 1, 1)
  Tensor sVecs = recast<float4>(sOut);                                                   // (BLK_M / 4, BLK_N)
  const auto write_tile = [&](int tile) {
    tile::sync_tile_warps<warps>(0);  // all consumers have read the epilogue tile before
    CUTE_UNROLL
    for (int i = 0; i < values; ++i) {
      float sum = rAcc(i);
      if constexpr (Traits::epilogue_tiles > 1) sum = tile == 0 ? sum : rAcc(values + i);
      tCsOut(i) = Traits::rounded ? sum : sum * tile::CodeDecode<T, Traits::bits>::unit;
    }
  };
  // store(token0, tokens): stores the epilogue tile of the launch's tokens token0, token0 + 1 ...
  const auto for_each_tile = [&](const auto& store) {
    // unrolled copies of the epilogue would not fit into the instruction cache
    CUTE_NO_UNROLL
    for (int tile = 0; tile < Traits::epilogue_tiles; ++tile) {
      write_tile(tile);
      tile::sync_tile_warps<warps>(0);  // all consumers have written this epilogue tile
      const std::int64_t token0 = std::int64_t{work.m_block} * Traits::tokens + tile * Traits::epilogue_tokens;
      store(token0, static_cast<int>(min(std::int64_t{Traits::epilogue_tokens}, p.tokens - token0)));
    }
  };
  if (p.partial) {
    for_each_tile([&](std::int64_t token0, int tokens) {
      if (n >= padded_n) return;
      float* to = p.partial + (work.split * p.tokens + token0 + first_token) * padded_n + n;
#pragma unroll 4  // four loads from shared memory at once
      for (int token = first_token; token < tokens; token += warps, to += warps * padded_n)
        *recast_ptr<float4>(to) = sVecs(vec, token);
    });
  } else {
    for_each_tile([&](std::int64_t token0, int tokens) {
      const Epilogue<T> out(p, n);  // only now: the bias takes registers that rAcc no longer needs
      CUTE_NO_UNROLL
      for (int token = first_token; token < tokens; token += warps * tokens_per_warp)
        // the up rows of a gated tile lie BLK_M / 2 rows, rows / 8 vectors, behind their gates
        out.store(p.first_token + token0 + token, sVecs(vec, token), sVecs(vec + gated * (rows / 8), token));
    });
  }
}

}  // namespace rooftile::gpu
