// SPDX-License-Identifier: Apache-2.0
// Many rows of bf16 x times weights rounded to bf16 (bf16_pairs.h).
//   x [M, K] bf16   y [M, 16 n] of a tile
//
// Lanes are rows of W:
//   strip of W (pair, 16 n)   x (row, pair)   acc (row, 16 n): one accumulator an output
// Each instruction multiplies 32 weights; in fp32 it is 16. The order of the sum is the same for any number of rows.
// Which two k a pair holds does not matter as long as x and W agree: those of neighbouring vectors of a k-block as
// Weights::pack_row and Weights::tile leave them, lane by lane.
//
// Include isa.h, vec.h, activation.h and product.h first.
#pragma once

#include "cpu/simd/bf16_pairs.h"
#include "cpu/simd/transpose.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

constexpr int block_pairs = block_k / 2;

// A k-block of x -> 32 pairs.
ROOFTILE_INLINE void to_pairs(const float* x, std::uint32_t* to) {
  for (int h = 0; h < 2; ++h)
    store_raw(to + h * lanes, to_pairs(load(x + 2 * h * lanes), load(x + (2 * h + 1) * lanes)));
}

// A tile of W in fp32 (16 rows, 64 k) -> (32 pairs, 16 n).
inline void to_strip(const float* tile, std::uint32_t* to) {
  for (int h = 0; h < 2; ++h, to += lanes * tile_n) {
    alignas(64) float pairs[tile_n * lanes];  // (n, pair): words of 32 bits
    for (int n = 0; n < tile_n; ++n) {
      const float* const row = tile + n * row_floats + 2 * h * lanes;
      store_raw(pairs + n * lanes, to_pairs(load(row), load(row + lanes)));
    }
    transpose16(pairs, lanes, reinterpret_cast<float*>(to), tile_n);
  }
}

// x and strips of W as pairs: what Bf16Rows and AmxRows share.
struct PairRows {
  static constexpr bool one_row_apart = false;  // a block's last row may be alone, and keeps its order of sums
  static constexpr int pack_rows = 2;           // rows of floats that pack() takes as a buffer: one in each order
  static constexpr int acc_vecs = 1;            // of a row
  static constexpr int strip_blocks = strip_bytes / 2 / (block_pairs * tile_n * 4);  // k-blocks of 64; x is in L1, too

  // Words of a row of a strip of x: an odd number of cache lines, so that rows do not meet in one set of L1.
  static constexpr std::int64_t x_row = strip_blocks * block_pairs + lanes;

  // x in memory as (strip, row, pair). Words of one row of all strips.
  static std::int64_t row_size(std::int64_t blocks) { return (blocks + strip_blocks - 1) / strip_blocks * x_row; }
  static std::uint32_t* strip_of_x(const MBlock& p, std::int64_t block, std::int64_t row) {
    return reinterpret_cast<std::uint32_t*>(p.x) + (block / strip_blocks * p.rows + row) * x_row;
  }
  // Packs row `m` of the block.
  template <class Weights>
  static void pack(const Weights& w, const TensorView& x, const MBlock& p, std::int64_t m, float* buffer) {
    float* const floats = buffer + p.k();
    w.pack_row(x, p.first_row + m, p.k(), buffer, floats);
    for (std::int64_t b = 0; b < p.blocks; ++b)
      to_pairs(floats + b * block_k, strip_of_x(p, b, m) + b % strip_blocks * block_pairs);
  }
  // Calls multiply_strip(first k-block, k-blocks, strip) for every strip of a tile of W.
  template <class Weights, class MultiplyStrip>
  static void for_strips(const Weights& w, std::int64_t tile, const MBlock& p, float* strip,
                         const MultiplyStrip& multiply_strip) {
    auto* const to = reinterpret_cast<std::uint32_t*>(strip);
    alignas(64) float decoded[tile_floats];
    for (std::int64_t begin = 0; begin < p.blocks; begin += strip_blocks) {
      const int here = static_cast<int>(std::min<std::int64_t>(strip_blocks, p.blocks - begin));
      for (int b = 0; b < here; ++b) {
        w.tile(tile, begin + b, decoded);
        to_strip(decoded, to + b * block_pairs * tile_n);
      }
      multiply_strip(begin, here, to);
    }
  }
  static constexpr std::int64_t padding = 0;  // words behind packed x

  static F32 outputs(const F32* acc, std::int64_t row) { return acc[row]; }  // of 16 n
};

// Products of many rows in bf16: acc [rows] of vectors of 16 n.
struct Bf16Rows : PairRows {
  static constexpr int micro_rows = 28;            // accumulators of the inner kernel: 28 of 32 registers
  static constexpr int step_rows = 1;              // blocks of rows have any number of them
  static constexpr std::int64_t block_rows = 336;  // rows against one strip

  // One tile of W against `rows` rows of x from m0 on, into acc.
  template <class Weights>
  static void multiply(const Weights& w, std::int64_t tile, const MBlock& p, std::int64_t m0, int rows, float* strip,
                       F32* acc) {
    const int parts = (rows + micro_rows - 1) / micro_rows;  // of as many rows each as can be
    for_strips(w, tile, p, strip, [&](std::int64_t begin, int blocks, const std::uint32_t* pairs) {
      for (int part = 0; part < parts; ++part) {
        const int m = rows * part / parts;
        micro_of<micro_rows>(rows * (part + 1) / parts - m, pairs, strip_of_x(p, begin, m0 + m), blocks * block_pairs,
                             begin == 0, acc + m);
      }
    });
  }

 private:
  template <int Rows>
  static void micro_of(int rows, const std::uint32_t* strip, const std::uint32_t* x, int pairs, bool first, F32* acc) {
    if constexpr (Rows > 1)
      if (rows < Rows) return micro_of<Rows - 1>(rows, strip, x, pairs, first, acc);
    multiply_pairs<Rows, 1>(x, x_row, strip, tile_n, pairs, reinterpret_cast<float*>(acc), lanes, !first);
  }
};

// From how many rows of bf16 weights are rounded to bf16. Hopper's kernel rounds from as many on, where it does.
constexpr std::int64_t least_bf16_rows = 17;

}  // namespace
}  // namespace rooftile::cpu::ROOFTILE_ISA
