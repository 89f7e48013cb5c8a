// SPDX-License-Identifier: Apache-2.0
// A tile of W, 16 n x 64 k, decoded to fp32 (core/w4_layout.h).
//
// A 64-byte load of a fragment block holds rows g and g + 8: each nibble (4 bits) or byte (8 bits) position of its 16
// words holds 16 positions of k of one row. Include isa.h, vec.h, activation.h and product.h first.
#pragma once

#include <algorithm>
#include <cstddef>

#include "core/w4_layout.h"
#include "rooftile/gemm.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

static_assert(tile_n == w4_tile_n && block_k == w4_tile_k);

// Lane 4 t + word of vector q is k = 16 word + 8 (q / 2) + 2 t + q % 2 of its block; in 8 bits 8 word + 32 (q / 2) + 2
// t + q % 2.
template <int bits>
constexpr int k_of(int q, int lane) {
  return (bits == 4 ? 16 * (lane % 4) + 8 * (q / 2) : 8 * (lane % 4) + 32 * (q / 2)) + 2 * (lane / 4) + q % 2;
}

// Every kind of weight is w = (u - zero_point) * scale + min_term. zero_point is 0 for minima, else 8 or 128. min_term
// is the minimum, 0, or (zero_point - zero) * scale, which is exact. TileScales holds the sixteen rows of a tile; with
// groups of 32 the two halves of a k-block of 64 have different scales.
struct TileScales {
  float scale[2][tile_n], min_term[2][tile_n];  // (halves, 16 rows)
};
ROOFTILE_INLINE float zero_point(const W4View& w) {
  return w.zeros == W4Zeros::minima ? 0.0f : static_cast<float>(w4_zero_point(w.bits));
}

// Groups are 32, 64, 128 or all of k. A division by a variable would cost as much as a k-block.
ROOFTILE_INLINE std::int64_t group_count(const W4View& w) {
  return w.group == w.k ? 1 : w.group == 32 ? w.k / 32 : w.group == 64 ? w.k / 64 : w.k / 128;
}

// Loads the scales of a tile's k-blocks, one after the other. What does not change from block to block is found once: a
// k-block takes some hundred cycles. With groups of 32 (Split) a k-block has two.
template <bool Split>
class ScaleReader {
 public:
  [[gnu::always_inline]] ScaleReader(const W4View& w, std::int64_t tile)
      : scale_is_half_(w.scale_dtype == DType::f16),
        zeros_(w.zeros),
        zero_point_(zero_point(w)),
        last_(group_count(w) - 1),
        shift_(Split            ? 0
               : w.group == w.k ? 62
               : w.group == 64  ? 0
                                : 1) {
    const std::int64_t first = w4_scale_index(last_ + 1, tile * tile_n, 0);
    scales_ = w.scales + 2 * first;
    if (w.offsets) offsets_ = w.offsets + (zeros_ == W4Zeros::integer ? 1 : 2) * first;
  }

  // The scales of k-block `block`.
  [[gnu::always_inline]] void load(std::int64_t block, TileScales& to) {
    const std::int64_t group = Split ? 2 * block : block >> shift_;
    if (loaded_ == group) return;
    loaded_ = group;
    for (int half = 0; half < (Split ? 2 : 1); ++half) {
      const std::int64_t at = tile_n * std::min(group + half, last_);  // the last half may lie past K
      const F32 scale = sixteen(scales_, at);
      F32 min_term{};
      if (zeros_ == W4Zeros::minima) min_term = sixteen(offsets_, at);
      if (zeros_ == W4Zeros::integer) {
        const U8 zeros = load_raw<U8>(offsets_ + at);
        min_term = (zero_point_ - __builtin_convertvector(widen(zeros), F32)) * scale;
      }
      store(to.scale[half], scale);
      store(to.min_term[half], min_term);
    }
    // forces `to` into memory: a broadcast from memory is free, a broadcast from a register takes the permutes' port
    asm("" : "+m"(to));
  }

 private:
  [[gnu::always_inline]] F32 sixteen(const std::byte* data, std::int64_t at) const {
    __builtin_prefetch(data + 2 * at + 2048);  // as for codes
    return scale_is_half_ ? rooftile::cpu::ROOFTILE_ISA::load(reinterpret_cast<const Half*>(data) + at)
                          : rooftile::cpu::ROOFTILE_ISA::load(reinterpret_cast<const BFloat16*>(data) + at);
  }
  const std::byte *scales_, *offsets_ = nullptr;
  bool scale_is_half_;
  W4Zeros zeros_;
  float zero_point_;
  std::int64_t last_;  // group
  int shift_;          // a group has 2^shift k-blocks
  std::int64_t loaded_ = -1;
};

// The codes of rows g and g + 8 of a tile: one 64-byte load per fragment block.
template <int bits>
using Codes = U32[bits / 4];

// Decodes one row of a tile. Vector q of row g (High = 0) or g + 8 (High = 1) is nibble High + 2 (q / 2) + 4 (q % 2) of
// the words in 4 bits, byte High + 2 (q % 2) of load q / 2 in 8 bits. So the second 32 k are the lanes of words 2 and 3
// in 4 bits, vectors 2 and 3 in 8 bits.
template <int bits, bool Split>
class RowDecoder {
 public:
  [[gnu::always_inline]] RowDecoder(const TileScales& s, int row, float zero_point) : zero_point_(zero_point) {
    for (int half = 0; half < halves; ++half) {
      scale_[half] = by_half(s.scale, row, half);
      min_term_[half] = by_half(s.min_term, row, half);
    }
  }
  template <int High>
  [[gnu::always_inline]] void decode(const Codes<bits>& codes, F32 (&w)[k_vecs]) const {
    for (int q = 0; q < k_vecs; ++q) {
      const int half = halves == 2 ? q / 2 : 0, shift = bits * High + 16 * (q % 2) + (bits == 4 ? 8 * (q / 2) : 0);
      const I32 u = (I32)((codes[bits == 4 ? 0 : q / 2] >> shift) & ((1 << bits) - 1));
      w[q] = fma(__builtin_convertvector(u, F32) - zero_point_, scale_[half], min_term_[half]);
    }
  }

 private:
  static constexpr int halves = Split && bits == 8 ? 2 : 1;
  [[gnu::always_inline]] static F32 by_half(const float (&v)[2][tile_n], int row, int half) {
    if constexpr (!Split || bits == 8) return splat(v[half][row]);
    const I32 second = {0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1};
    return select(second, splat(v[1][row]), splat(v[0][row]));
  }
  float zero_point_;
  F32 scale_[halves], min_term_[halves];
};

#ifdef ROOFTILE_AVX512
template <bool Split>
class RowDecoder<4, Split> {
 public:
  [[gnu::always_inline]] RowDecoder(const TileScales& s, int row, float zero_point) {
    const F32 codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int half = 0; half < (Split ? 2 : 1); ++half)
      table_[half] = (__m512)fma(codes - zero_point, splat(s.scale[half][row]), splat(s.min_term[half][row]));
  }
  template <int High>
  [[gnu::always_inline]] void decode(const Codes<4>& words, F32 (&w)[k_vecs]) const {
    const __m512i codes = (__m512i)words[0];
    if constexpr (Split) {  // bit 4 of an index selects the table; it is set in the lanes of words 2 and 3
      const __m512i nibble = _mm512_set1_epi8(15);
      const __m512i second = _mm512_maskz_set1_epi32(0xcccc, 0x10101010);
      const __m512i bytes = High ? _mm512_srli_epi32(codes, 4) : codes;
      const __m512i index = _mm512_ternarylogic_epi32(bytes, nibble, second, 0xea);  // (bytes & nibble) | second
      for (int q = 0; q < k_vecs; ++q)
        w[q] = (F32)_mm512_permutex2var_ps(table_[0], _mm512_srli_epi32(index, 8 * (q / 2) + 16 * (q % 2)), table_[1]);
    } else {  // a permute uses only the low four bits of an index
      for (int q = 0; q < k_vecs; ++q)
        w[q] = (F32)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * High + 8 * (q / 2) + 16 * (q % 2)), table_[0]);
    }
  }

 private:
  __m512 table_[2];  // (halves): the values of the sixteen codes
};
#endif

ROOFTILE_INLINE const std::uint8_t* tile_codes(const W4View& w, std::int64_t tile, std::int64_t block) {
  return w.codes + (tile * w4_tiles_k(w.k) + block) * w4_tile_bytes(w.bits);
}

// Asks for the cache line of codes 3 KB on. Tasks have some 32 KB of codes each, and the memory's own prefetch begins
// anew with every one.
ROOFTILE_INLINE void prefetch(const std::uint8_t* codes) { __builtin_prefetch(codes + 3072); }

// Decodes rows g and g + 8 of one tile, g in 0 .. 7, to fp32.
template <int bits, bool Split>
ROOFTILE_INLINE void decode_rows(const std::uint8_t* codes, int g, const TileScales& scales, float zero_point,
                                 F32 (&low)[k_vecs], F32 (&high)[k_vecs]) {
  Codes<bits> c;
  for (int i = 0; i < w4_tile_fragments(bits); ++i) c[i] = load_raw<U32>(codes + i * w4_fragment_bytes + g * 64);
  RowDecoder<bits, Split>(scales, g, zero_point).template decode<0>(c, low);
  RowDecoder<bits, Split>(scales, g + 8, zero_point).template decode<1>(c, high);
}

// Decodes one tile to fp32 [16 rows][4 vectors][16 lanes]; positions past K are 0 for any scale.
template <int bits, bool Split>
void decode_tile(const W4View& w, std::int64_t tile, std::int64_t block, float* to) {
  TileScales scales;
  ScaleReader<Split>(w, tile).load(block, scales);
  const std::uint8_t* codes = tile_codes(w, tile, block);
  const float zero = zero_point(w);
  for (int g = 0; g < 8; ++g) {
    F32 low[k_vecs], high[k_vecs];
    decode_rows<bits, Split>(codes, g, scales, zero, low, high);
    for (int q = 0; q < k_vecs; ++q) {
      store(to + g * row_floats + q * lanes, low[q]);
      store(to + (g + 8) * row_floats + q * lanes, high[q]);
    }
  }
  const std::int64_t left = w.k - block * block_k;
  if (left >= block_k) return;
  for (int row = 0; row < tile_n; ++row)
    for (int q = 0; q < k_vecs; ++q)
      for (int lane = 0; lane < lanes; ++lane)
        if (k_of<bits>(q, lane) >= left) to[row * row_floats + q * lanes + lane] = 0;
}

}  // namespace
}  // namespace rooftile::cpu::ROOFTILE_ISA
