// SPDX-License-Identifier: Apache-2.0
// Many rows of bf16 x times weights rounded to bf16 on AMX's tile registers: tdpbf16ps adds a product of 16 rows x 16
// pairs of k with 16 pairs x 16 n to 16 x 16 accumulators.
//   x [M, K] bf16   y [M, 16 n] of a tile of W
// x and the strip of W are in memory as for vdpbf16ps (bf16_rows.h): a tile register's lines are 64 bytes of a row of
// x, or a pair of k and its 16 n. Each line of x comes from L2 once for every tile of W: that is what bounds the loop.
//
// Include isa.h, vec.h, activation.h and product.h first.
#pragma once

#include "cpu/simd/amx_tiles.h"
#include "cpu/simd/bf16_rows.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

// acc (16 Tiles rows, 16 n) = or += x (rows, pairs) strip (pairs, 16 n). Registers: 0 to 3 acc, 4 and 5 x, 6 strip.
template <int Tiles>
ROOFTILE_INLINE void multiply_tiles(const std::uint32_t* x, std::int64_t x_row, const std::uint32_t* strip, int pairs,
                                    bool first, F32* acc) {
  constexpr int lines = TileRegisters::lines;
  memory_is_read();
  const std::int64_t x_bytes = x_row * 4, tile = lines * x_row;
  if (first) {
    _tile_zero(0);
    if constexpr (Tiles > 1) _tile_zero(1);
    if constexpr (Tiles > 2) _tile_zero(2);
    if constexpr (Tiles > 3) _tile_zero(3);
  } else {
    _tile_loadd(0, acc, 64);
    if constexpr (Tiles > 1) _tile_loadd(1, acc + lines, 64);
    if constexpr (Tiles > 2) _tile_loadd(2, acc + 2 * lines, 64);
    if constexpr (Tiles > 3) _tile_loadd(3, acc + 3 * lines, 64);
  }
  for (int p = 0; p < pairs; p += lines) {
    _tile_loadd(6, strip + p * tile_n, 64);
    _tile_loadd(4, x + p, x_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (Tiles > 1) {
      _tile_loadd(5, x + p + tile, x_bytes);
      _tile_dpbf16ps(1, 5, 6);
    }
    if constexpr (Tiles > 2) {
      _tile_loadd(4, x + p + 2 * tile, x_bytes);
      _tile_dpbf16ps(2, 4, 6);
    }
    if constexpr (Tiles > 3) {
      _tile_loadd(5, x + p + 3 * tile, x_bytes);
      _tile_dpbf16ps(3, 5, 6);
    }
  }
  _tile_stored(0, acc, 64);
  if constexpr (Tiles > 1) _tile_stored(1, acc + lines, 64);
  if constexpr (Tiles > 2) _tile_stored(2, acc + 2 * lines, 64);
  if constexpr (Tiles > 3) _tile_stored(3, acc + 3 * lines, 64);
}

// Products of many rows in bf16 with AMX: acc [rows] of vectors of 16 n.
struct AmxRows : PairRows {
  static constexpr int step_rows = TileRegisters::lines;  // whole tiles: acc has room for the last one's other rows
  static constexpr std::int64_t block_rows = 1024;        // rows against one strip
  // Words behind packed x: the last tile of x reads rows that are not there, for rows of acc that nobody reads.
  static constexpr std::int64_t padding = (TileRegisters::lines - 1) * x_row;

  // One tile of W against `rows` rows of x from m0 on, into acc.
  template <class Weights>
  static void multiply(const Weights& w, std::int64_t tile, const MBlock& p, std::int64_t m0, int rows, float* strip,
                       F32* acc) {
    const TileRegisters registers;
    for_strips(w, tile, p, strip, [&](std::int64_t begin, int blocks, const std::uint32_t* pairs) {
      for (int m = 0; m < rows; m += 4 * TileRegisters::lines) {
        const std::uint32_t* const x = strip_of_x(p, begin, m0 + m);
        const int count = blocks * block_pairs, left = rows - m;
        const bool first = begin == 0;
        if (left > 48) multiply_tiles<4>(x, x_row, pairs, count, first, acc + m);
        else if (left > 32) multiply_tiles<3>(x, x_row, pairs, count, first, acc + m);
        else if (left > 16) multiply_tiles<2>(x, x_row, pairs, count, first, acc + m);
        else multiply_tiles<1>(x, x_row, pairs, count, first, acc + m);
      }
    });
  }
};

}  // namespace
}  // namespace rooftile::cpu::ROOFTILE_ISA
