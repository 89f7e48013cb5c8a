// SPDX-License-Identifier: Apache-2.0
// Loads of wgmma.cuh's producer warps: codes and quantisation parameters, global memory -> stages of consumer warps.
#pragma once

#include "core/w4_layout.h"
#include "kernels/w4a16/params.h"
#include "tile/copy.cuh"

namespace rooftile::gpu {

// Copies the codes and quantisation parameters of two tile rows from global memory to the stages of two consumer warps,
// which are neighbours, a step at a time.
// A stage of one tile row: codes (fragment blocks, 32 lanes, 16 bytes), scales (up to 4 groups, 16 rows) of 2 bytes,
// offsets (up to 4 groups, 16 rows): zero points of 1 byte or minima of 2. Every lane copies 16 bytes of each fragment
// block; some lanes copy 16 bytes of scales or offsets as well. The argument `stage` is the lane's own 16 bytes of the
// first fragment block.
template <int bits>
struct CodeLoader {
  static constexpr int tile_bytes = w4_tile_bytes(bits), stage_bytes = w4_stage_bytes(bits);
  const std::uint8_t* codes;           // this lane's 16 bytes of the next step's first fragment block
  const std::byte* qparams = nullptr;  // this lane's 16 bytes of the next step's scales or offsets; null: no copy
  std::int64_t second_row_bytes = 0;   // from the first tile row's codes to the second's; 0: there is no second
  int qparams_offset = 0;              // from `stage` to where this lane puts its 16 bytes of scales or offsets
  int qparams_per_step = 0;            // bytes
  int group_bytes;                     // scales or offsets of one group: 16 rows
  int groups_left, groups_per_step;    // groups_left: from `qparams` to the end of K
  int tiles_left;                      // from the next step to the end of K

  // first: the first step of the K range. A tile row past the end of W loads row 0; a second tile row past the end
  // loads the first one again.
  __device__ __forceinline__ CodeLoader(const W4MatmulParams& p, int row, int first)
      : tiles_left(p.row_tiles - 2 * first) {
    if (row >= p.tile_rows) row = 0;
    const bool second = row + 1 < p.tile_rows;
    const int lane = threadIdx.x % 32, groups_in_step = 4 >> p.scale_k_shift, vec = lane % 8;
    codes = p.w.codes + (std::int64_t{row} * p.row_tiles + 2 * first) * tile_bytes + lane * 16;
    if (second) second_row_bytes = std::int64_t{p.row_tiles} * tile_bytes;
    const bool is_offset = lane % 16 >= 8, bytes = is_offset && p.w.zeros == W4Zeros::integer;
    const int shift = bytes ? 0 : 1;  // log2 of the 16-byte vectors of a group
    group_bytes = bytes ? 16 : 32;
    groups_per_step = p.scale_k < p.group && p.groups == 1 ? 0 : groups_in_step;  // 0: one group for all of K
    const int first_group = first * groups_per_step + (vec >> shift);
    groups_left = p.groups - first_group;
    qparams_per_step = groups_per_step * group_bytes;
    qparams_offset =
        lane / 16 * stage_bytes + 2 * tile_bytes + (is_offset ? w4_qparam_bytes : 0) + vec * 16 - lane * 16;
    if (vec >= groups_in_step << shift || (is_offset && p.w.zeros == W4Zeros::symmetric)) return;
    qparams = (is_offset ? p.w.offsets : p.w.scales) +
              (std::int64_t{row + (second && lane >= 16 ? 1 : 0)} * p.groups + first_group) * group_bytes +
              (vec & shift) * 16;
  }

  // Prefetches the next `steps` steps into L2. Safe before the previous kernel has ended, which may still write them: a
  // prefetch reads nothing into the SM.
  __device__ __forceinline__ void prefetch(int steps) const {
    const int lane = threadIdx.x % 32;
    if (lane % 16 == 0)
      tile::prefetch_l2_bulk(codes + lane / 16 * second_row_bytes - lane * 16, min(2 * steps, tiles_left) * tile_bytes);
    if (qparams && lane % 8 == 0)
      tile::prefetch_l2_bulk(qparams, min(max(steps * groups_per_step, 1), groups_left) * group_bytes);
  }

  // Issues the cp.async copies of the next step and advances to the step after it.
  __device__ __forceinline__ void load(std::uint8_t* stage) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const std::uint8_t* const from = codes + row * second_row_bytes;
      std::uint8_t* const to = stage + row * stage_bytes;
#pragma unroll
      for (int at = 0; at < tile_bytes; at += w4_fragment_bytes) tile::cp_async_16(to + at, from + at);
      if (tiles_left > 1)
#pragma unroll
        for (int at = tile_bytes; at < 2 * tile_bytes; at += w4_fragment_bytes) tile::cp_async_16(to + at, from + at);
    }
    if (qparams)  // zero-filled past the end of K
      cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<cute::uint128_t>::copy(
          *reinterpret_cast<const cute::uint128_t*>(qparams),
          *reinterpret_cast<cute::uint128_t*>(stage + qparams_offset), groups_left > 0);
    codes += 2 * tile_bytes;
    qparams += qparams ? qparams_per_step : 0;
    groups_left -= groups_per_step;
    tiles_left -= 2;
  }
};

// The 16-bit scale, or minimum, of row `row` of a group in shared memory: (16 rows).
__device__ __forceinline__ float load_scale(const std::uint8_t* shared, int row, bool is_half) {
  const std::uint32_t bits = reinterpret_cast<const std::uint16_t*>(shared)[row];
  return is_half ? __half2float(__ushort_as_half(static_cast<unsigned short>(bits))) : __uint_as_float(bits << 16);
}

}  // namespace rooftile::gpu
