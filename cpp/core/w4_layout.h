// SPDX-License-Identifier: Apache-2.0
// The packed layout of a weight [N, K] of 4 or 8 bits: one layout for every number of rows and both backends.
//
// The weight is the A operand of mma m16n8k16 (and of one warp of wgmma m64), read from registers. A tile is 16 rows of
// N x 64 of K. It consists of fragment blocks of 512 bytes, 32 lanes x 16 bytes: one of 64 k in 4 bits, two of 32 k
// each in 8 bits. A lane's 16 bytes hold its A fragments of the k-steps of 16 in the block. In 4 bits, word w of a lane
// is k-step w and nibbles r and r + 4 of a word are fragment register r. In 8 bits, two words are a k-step; bytes 0 and
// 2 of a word are one register, bytes 1 and 3 the next. So one mask makes a 16-bit pair in both cases.
// Tiles are [N / 16][K / 64]; N and K are padded with code 0. Scales (and zeros or minima) are [N / 16][group][16
// rows]: the sixteen scales of a tile row are neighbours; padded rows have scale 0.
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace rooftile {

inline constexpr int w4_tile_n = 16, w4_tile_k = 64, w4_fragment_bytes = 512;
ROOFTILE_HD constexpr int w4_tile_fragments(int bits) { return bits / 4; }
ROOFTILE_HD constexpr int w4_tile_bytes(int bits) { return w4_tile_fragments(bits) * w4_fragment_bytes; }

ROOFTILE_HD constexpr std::int64_t w4_tiles_n(std::int64_t n) { return (n + w4_tile_n - 1) / w4_tile_n; }
ROOFTILE_HD constexpr std::int64_t w4_tiles_k(std::int64_t k) { return (k + w4_tile_k - 1) / w4_tile_k; }

// The zero point of a symmetric weight: the code of the value 0.
ROOFTILE_HD constexpr int w4_zero_point(int bits) { return 1 << (bits - 1); }

// Index in codes (the lowest bits of a byte first) of element (n, k).
ROOFTILE_HD constexpr std::int64_t w4_code_index(int bits, std::int64_t padded_tiles_k, std::int64_t n,
                                                 std::int64_t k) {
  const std::int64_t tile = (n / 16) * padded_tiles_k + k / 64;
  const int row = static_cast<int>(n % 16), column = static_cast<int>(k % 64), lane = row % 8 * 4 + column % 8 / 2;
  if (bits == 4) return tile * 1024 + lane * 32 + column / 16 * 8 + column % 2 * 4 + column / 8 % 2 * 2 + row / 8;
  return tile * 1024 + column / 32 * 512 + lane * 16 + column / 8 % 4 * 4 + column % 2 * 2 + row / 8;
}

// The inverse within one tile: the element (n, k) of code `index`.
struct W4Element {
  int n, k;
};
ROOFTILE_HD constexpr W4Element w4_element_of_tile(int bits, int index) {
  const int lane = bits == 4 ? index / 32 : index / 16 % 32, in_word = index % (32 / bits),
            n = lane / 4 + in_word % 2 * 8;
  if (bits == 4) return {n, index / 8 % 4 * 16 + in_word / 2 % 2 * 8 + lane % 4 * 2 + in_word / 4};
  return {n, index / 512 * 32 + index / 4 % 4 * 8 + lane % 4 * 2 + in_word / 2};
}

// Code number `index` of a packed array.
ROOFTILE_HD constexpr int w4_code(const std::uint8_t* codes, int bits, std::int64_t index) {
  const int in_byte = 8 / bits;
  return codes[index / in_byte] >> (bits * static_cast<int>(index % in_byte)) & ((1 << bits) - 1);
}

ROOFTILE_HD constexpr std::int64_t w4_scale_index(std::int64_t groups, std::int64_t n, std::int64_t g) {
  return ((n / 16) * groups + g) * 16 + n % 16;
}

}  // namespace rooftile
