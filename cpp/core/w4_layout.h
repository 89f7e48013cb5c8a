// SPDX-License-Identifier: Apache-2.0
// The kernel form of a 4-bit weight [N, K]: one layout for every number of rows and both backends.
//
// The weight is the A operand of mma m16n8k16 (and of one warp of wgmma m64), from registers. A tile is 16 rows of N x
// 64 of K = 512 bytes: 32 lanes x 16 bytes, a lane's 16 bytes being its A fragments of four k-steps of 16. Word w of a
// lane is k-step w; the pair of nibbles r and r + 4 of a word is fragment register r, so one mask makes a 16-bit pair.
// Tiles lie as [N / 16][K / 64]; N and K are padded with code 0.  Scales (and zeros or minima) lie as
// [N / 16][group][16 rows]: the sixteen of a tile row are neighbours; padded rows have scale 0.
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace rooftile {

inline constexpr int w4_tile_n = 16, w4_tile_k = 64, w4_tile_bytes = 512;

ROOFTILE_HD constexpr std::int64_t w4_tiles_n(std::int64_t n) { return (n + w4_tile_n - 1) / w4_tile_n; }
ROOFTILE_HD constexpr std::int64_t w4_tiles_k(std::int64_t k) { return (k + w4_tile_k - 1) / w4_tile_k; }

// Index in nibbles (byte = index / 2, low nibble first) of element (n, k).
ROOFTILE_HD constexpr std::int64_t w4_code_index(std::int64_t padded_tiles_k, std::int64_t n, std::int64_t k) {
  const std::int64_t tile = (n / 16) * padded_tiles_k + k / 64;
  const int lane = static_cast<int>(n % 8) * 4 + static_cast<int>(k % 8) / 2;
  const int word = static_cast<int>(k / 16) % 4;
  const int nibble = static_cast<int>(n / 8) % 2 + 2 * (static_cast<int>(k / 8) % 2) + 4 * static_cast<int>(k % 2);
  return tile * (w4_tile_bytes * 2) + lane * 32 + word * 8 + nibble;
}

ROOFTILE_HD constexpr std::int64_t w4_scale_index(std::int64_t groups, std::int64_t n, std::int64_t g) {
  return ((n / 16) * groups + g) * 16 + n % 16;
}

}  // namespace rooftile
