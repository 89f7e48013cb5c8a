// SPDX-License-Identifier: Apache-2.0
// Rows of W in 4 or 8 bits -> the same rows in x's type, for the 16-bit product (collective.cuh). For many
// tokens and small scale blocks or minima.
//   codes, scales, offsets: packed layout (core/w4_layout.h)   to [rows, K] of T, contiguous, K a multiple of 8
//
// A warp dequantises one step, 16 rows x 128 k, as wgmma_codes.cuh does (tile::WeightDecode: the same bits), and
// transposes its fragments through shared memory, so that a store instruction of the warp writes two rows of 256 bytes
// in 16-byte vectors.
//
// Cost: N K bits / 8 bytes read, 2 N K written, into L2: a chunk of rows is at most 32 MB, and the 16-bit product reads
// the chunk from L2. The writes are the roof.
// Sync: __syncwarp: the fragments of all lanes are in shared memory. The kernel writes nothing before the previous
// kernel, which may read `to`, has ended.
#pragma once

#include "kernels/gemm/params.h"
#include "tile/copy.cuh"
#include "tile/cta_sync.cuh"
#include "tile/dequant_weight.cuh"

namespace rooftile::gpu {

template <class T, int bits, class Scale>
__global__ void __launch_bounds__(w4_expand_threads) w4a16_expand(const __grid_constant__ ExpandParams p) {
  constexpr int tile_bytes = w4_tile_bytes(bits), blocks_of_tile = w4_tile_fragments(bits),
                pitch = w4_step_k + 8;  // elements of a row; 16 bytes more against bank conflicts
  __shared__ __align__(16) std::uint16_t rows_of_warps[w4_expand_threads / 32][w4_tile_n * pitch];
  tile::let_next_kernel_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const unsigned index = blockIdx.x * (w4_expand_threads / 32) + warp, row = divide(index, p.by_steps),
                 step = index - row * p.by_steps.value;
  if (row >= p.tile_rows) return;
  const std::int64_t tile_row = p.first_tile_row + row,
                     blocks = tile_row * p.groups;  // scale blocks before this tile row
  tile::wait_for_previous_kernel();

  // (WORD, (k-step, k-block)): this lane's words; 0 past the end of K
  cute::Tensor rCodes =
      cute::make_tensor<std::uint32_t>(cute::Shape<cute::Int<bits / 4>, cute::Shape<cute::_2, cute::_4>>{});
  cute::Tensor rVecs = cute::recast<uint4>(
      cute::make_tensor(rCodes.data(), cute::Shape<cute::_4, cute::Int<bits / 2>>{}));  // (1, fragment blocks)
  CUTE_UNROLL
  for (int f = 0; f < bits / 2; ++f) {
    const unsigned tile = 2 * step + f / blocks_of_tile;
    const auto* const from =
        p.w.codes + (tile_row * p.k_tiles + tile) * tile_bytes + f % blocks_of_tile * w4_fragment_bytes + lane * 16;
    rVecs(f) = tile < p.k_tiles ? tile::load_once(from) : uint4{};
  }
  cute::Tensor sRows = cute::make_tensor(
      cute::make_smem_ptr(&rows_of_warps[warp][0]),
      cute::Layout<cute::Shape<cute::Int<w4_tile_n>, cute::Int<w4_step_k>>,
                   cute::Stride<cute::Int<pitch>, cute::_1>>{});  // (row, k): this warp's step in x's type
  cute::Tensor sPairs = cute::recast<std::uint32_t>(sRows);       // (row, k / 2)
  cute::Tensor sVecs = cute::recast<uint4>(sRows);                // (row, k / 8)
#pragma unroll
  for (int k_block = 0; k_block < 4; ++k_block) {
    const std::int64_t block = blocks + min(static_cast<int>(step * 4 + k_block) >> p.group_shift, p.groups - 1);
    const auto pair = [&](const std::byte* values) {  // (row g, row g + 8)
      const auto* const of_rows = cute::recast_ptr<const std::uint16_t>(values) + block * w4_tile_n;
      return std::uint32_t{of_rows[g]} | std::uint32_t{of_rows[g + 8]} << 16;
    };
    std::uint32_t zeros[2] = {w4_zero_point(bits), w4_zero_point(bits)};  // (rows g, g + 8)
    if (p.w.zeros == W4Zeros::minima) zeros[0] = zeros[1] = 0;
    if (p.w.zeros == W4Zeros::integer) {
      const auto* const of_rows = cute::recast_ptr<const std::uint8_t>(p.w.offsets) + block * w4_tile_n;
      zeros[0] = of_rows[g], zeros[1] = of_rows[g + 8];
    }
    cute::Tensor rA = cute::make_tensor<T>(
        cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::_2>{});  // (MMA, 1, 2 k-steps)
    tile::WeightDecode<T, bits, Scale>(pair(p.w.scales), p.w.zeros == W4Zeros::minima ? pair(p.w.offsets) : 0, zeros)
        .dequant(rCodes(cute::_, cute::make_coord(cute::_, k_block)), rA);
    cute::Tensor rPairs = cute::recast<std::uint32_t>(rA);  // (MMA / 2, 1, 2 k-steps)
#pragma unroll
    for (int i = 0; i < 8; ++i)  // register r of a fragment: row g + 8 (r % 2), k 8 (r / 2) + 2 t
      sPairs(g + i % 2 * 8, k_block * 16 + i / 2 * 4 + t) = rPairs(i);
  }
  __syncwarp();
  auto* const to = static_cast<std::uint16_t*>(p.to) + std::int64_t{row} * w4_tile_n * p.k + step * w4_step_k;
  const int rows_left = p.rows - static_cast<int>(row) * w4_tile_n;  // rows from this tile row to the end of the chunk
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = i * 2 + lane / 16, column = lane % 16 * 8;
    if (r < rows_left && static_cast<int>(step) * w4_step_k + column < p.k)
      tile::store(to + std::int64_t{r} * p.k + column, sVecs(r, lane % 16));
  }
}

}  // namespace rooftile::gpu
