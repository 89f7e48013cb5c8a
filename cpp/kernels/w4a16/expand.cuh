// SPDX-License-Identifier: Apache-2.0
// Rows of W in 4 or 8 bits -> the same rows in x's type, for the 16-bit product (linear/collective.cu): many tokens,
// small scale blocks or minima.
//   codes, scales, offsets: kernel form (core/w4_layout.h)   to [rows, K] of T, contiguous, K a multiple of 8
//
// A warp dequantises one step, 16 rows x 128 k, as tiles.cuh does (tile::WeightDecode: the same bits), and turns
// fragments into rows in shared memory, so that two rows of 256 bytes leave as 16-byte vectors at a time.
//
// Cost: N K bits / 8 bytes read, 2 N K written, into L2: a chunk of rows is at most 32 MB and is read from there. The
// writes are the roof.
// Sync: __syncwarp: fragments are in shared memory. Nothing is written before the previous kernel, which may read `to`,
// has ended.
#pragma once

#include "kernels/w4a16/params.h"
#include "tile/copy.cuh"
#include "tile/grid.cuh"
#include "tile/w4.cuh"

namespace rooftile::gpu {

template <class T, int bits, class Scale>
__global__ void __launch_bounds__(w4_expand_threads) w4a16_expand(const __grid_constant__ W4ExpandParams p) {
  constexpr int tile_bytes = w4_tile_bytes(bits), runs_of_tile = w4_tile_runs(bits),
                pitch = w4_step_k * 2 + 16;  // bytes; 16 more against bank conflicts
  __shared__ __align__(16) std::uint8_t rows_of_warps[w4_expand_threads / 32][w4_tile_n * pitch];
  tile::let_next_kernel_start();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const unsigned index = blockIdx.x * (w4_expand_threads / 32) + warp, row = divide(index, p.by_steps),
                 step = index - row * p.by_steps.value;
  if (row >= p.tile_rows) return;
  const std::int64_t tile_row = p.first_tile_row + row,
                     blocks = tile_row * p.groups;  // blocks: scale blocks before this tile row
  tile::wait_for_previous_kernel();

  uint4 runs[bits / 2];  // (2 tiles x runs of a tile); a tile past the end of K is 0
#pragma unroll
  for (int run = 0; run < bits / 2; ++run) {
    const unsigned tile = 2 * step + run / runs_of_tile;
    const auto* const from =
        p.w.codes + (tile_row * p.row_tiles + tile) * tile_bytes + run % runs_of_tile * w4_run_bytes + lane * 16;
    runs[run] = tile < p.row_tiles ? tile::load_once(from) : uint4{};
  }
  std::uint8_t* const shared_rows = rows_of_warps[warp];
#pragma unroll
  for (int k_block = 0; k_block < 4; ++k_block) {
    const std::int64_t block = blocks + min(static_cast<int>(step * 4 + k_block) >> p.group_shift, p.groups - 1);
    const auto pair = [&](const std::byte* values) {  // of rows g, g + 8
      const auto* const of_rows = reinterpret_cast<const std::uint16_t*>(values) + block * w4_tile_n;
      return std::uint32_t{of_rows[g]} | std::uint32_t{of_rows[g + 8]} << 16;
    };
    std::uint32_t zeros[2] = {w4_middle(bits), w4_middle(bits)};
    if (p.w.zeros == W4Zeros::minima) zeros[0] = zeros[1] = 0;
    if (p.w.zeros == W4Zeros::integer) {
      const auto* const of_rows = reinterpret_cast<const std::uint8_t*>(p.w.offsets) + block * w4_tile_n;
      zeros[0] = of_rows[g], zeros[1] = of_rows[g + 8];
    }
    tile::FragmentA a[2];  // 16 rows x 16 k each
    tile::WeightDecode<T, bits, Scale>(pair(p.w.scales), p.w.zeros == W4Zeros::minima ? pair(p.w.offsets) : 0, zeros)
        .decode(runs, k_block, a);
#pragma unroll
    for (int i = 0; i < 8; ++i)  // register r of a fragment: row g + 8 (r % 2), k 8 (r / 2) + 2 t
      *reinterpret_cast<std::uint32_t*>(shared_rows + (g + i % 2 * 8) * pitch +
                                        (k_block * 32 + i / 2 * 8 + 2 * t) * 2) = a[i / 4].r[i % 4];
  }
  __syncwarp();
  auto* const to = static_cast<std::uint16_t*>(p.to) + std::int64_t{row} * w4_tile_n * p.k + step * w4_step_k;
  const int left = p.rows - static_cast<int>(row) * w4_tile_n;  // rows of the chunk, from this tile row on
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int r = i * 2 + lane / 16, column = lane % 16 * 8;
    if (r < left && static_cast<int>(step) * w4_step_k + column < p.k)
      tile::store(to + std::int64_t{r} * p.k + column,
                  *reinterpret_cast<const uint4*>(shared_rows + r * pitch + column * 2));
  }
}

}  // namespace rooftile::gpu
