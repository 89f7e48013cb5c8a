// SPDX-License-Identifier: Apache-2.0
// q k and p v of decode attention over 4-bit codes in integers, on AMX's tile registers: tdpbsud and tdpbusd add
// products of 16 lines x 64 bytes with 64 x 16 columns of bytes.
//   q [rows][width]   K codes [token][width / 2]   V codes in tiles of 32 tokens x 32 channels (core/kv_layout.h)
//   s [rows][chunk] logits   p [rows][chunk] probabilities   acc [rows][width]
//
// Codes are bytes u from 0 to 15; a code's value is (u - 8) * scale + min_term. Against them stand rows of q and p in
// two planes of int8 (two_planes.h), times the scales of what the sum runs over: K's channels or V's tokens. So what is
// rounded that fp32 does not round is q times scale, by less than 1 / 32639 of its row's largest in a tile, and p times
// scale, by less than 1 / 32639 of its row's largest in a chunk.
//   K: codes are B, a column a token. Lines of A: (row, plane), 64 channels, the even ones before the odd ones.
//   V: codes are A, a line a channel d % 8 and one nibble of its 64 bytes, which have all 32 tokens; a token has two
//      bytes, of d / 8 % 4 < 2 and >= 2. Columns of B: (row, plane, which of the two), where the other byte meets 0.
// Tile registers wait for lines that are on their way to L1, so all operands of a chunk are made before the products.
// Registers 0, 4 and 6 are free for keep_awake() but between a product's zero and its store.
//
// Vector instructions a token of 64 channels, 3 query rows: some 26, where fp32 takes 70.
// Include isa.h, vec.h, kv_tile.h and attention_math.h first.
#pragma once

#include "cpu/simd/amx_tiles.h"
#include "cpu/simd/transpose.h"
#include "cpu/simd/two_planes.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

constexpr int words = 16;       // of 32 bits, of a line
constexpr int chunk_tiles = 4;  // of 32 tokens
constexpr int block_channels = 64;
constexpr int most_blocks = max_head_dim / block_channels;
constexpr int tile_bytes = 1024;          // of a tile register of 16 lines
constexpr int row_lines = 2 * row_block;  // (row, plane)

// Tile registers 2, 3 and 7 have the lines of rows, the others 16.
constexpr TileConfig attention_tiles{.lines = {16, 16, row_lines, row_lines, 16, 16, 16, row_lines}};

// The largest |x| of some vectors; infinity or NaN where one of them is that.
class Largest {
 public:
  void add(F32 x) { bits_ = _mm512_max_epi32(bits_, (__m512i)magnitude(x)); }
  float value() const {
    const int bits = _mm512_reduce_max_epi32(bits_);
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
  }

 private:
  __m512i bits_{};
};

// step of a row; NaN, which makes its sums NaN, where a number is not finite.
ROOFTILE_INLINE float step_or_nan(float largest) {
  return largest < std::numeric_limits<float>::infinity() ? step_of(largest) : std::numeric_limits<float>::quiet_NaN();
}

// 256 * high + low - 8 * sum of v: sixteen sums of (u - 8) v, from those with both planes.
ROOFTILE_INLINE F32 from_planes(const std::int32_t* high, const std::int32_t* low, std::int32_t sum_v) {
  return __builtin_convertvector((load_raw<I32>(high) << 8) + load_raw<I32>(low) - 8 * sum_v, F32);
}

// to [16][16] = from [16][16] transposed. Words are moved as they are.
ROOFTILE_INLINE void transpose_words(const std::int32_t* from, std::int32_t* to) {
  transpose16(reinterpret_cast<const float*>(from), words, reinterpret_cast<float*>(to), words);
}

// (nibble & 15) ^ flip of each byte. flip: 8 for two's complement, which makes u of it, or 0.
ROOFTILE_INLINE __m512i nibbles(__m512i bytes, __m512i flip) {
  return _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi8(15), flip, 0x6a);
}

// The coded tokens of a chunk of one KV head, in tiles [begin, end) of 32 tokens, for at most row_block query rows.
class IntegerChunk {
 public:
  static bool takes(const KvCacheView& c) {
    return code_bits(c.format) == 4 && c.dtype != DType::f32 && c.page_size % tile == 0 &&
           tile_width(c) % block_channels == 0;
  }

  // first: the chunk's first token. count: tokens of the chunk that are stored. codes: scratch, chunk * width bytes.
  IntegerChunk(const CachedHead& head, std::int64_t first, int begin, int end, int count, std::uint8_t* codes)
      : head_(head),
        cache_(*head.cache),
        first_(first),
        begin_(begin),
        end_(end),
        count_(count),
        width_(tile_width(*head.cache)),
        codes_(codes) {}

  int begin() const { return begin_; }
  int end() const { return end_; }
  // K's token scales of tile t [32]; 1 where channels have scales.
  void key_scales(int t, float* to) const {
    if (is_kivi(cache_.format)) std::fill_n(to, tile, 1.0f);
    else token_scales(head_, cache_.k, cache_.k.scale, first_ + t * tile, stored(t), to);
  }

  // s [rows][chunk] = q k, without K's token scales. q [rows][width] in paired order.
  void logits(const float* q, int rows, float* s) const {
    const int blocks = width_ / block_channels;
    alignas(64) std::int8_t a[chunk_tiles][most_blocks][row_lines][64];
    RowInts row[chunk_tiles][row_block];
    // one set of planes serves all tiles but where channels have scales of their own in each
    const int last = is_kivi(cache_.format) ? end_ - 1 : begin_;
    keep_awake();
    for (int t = begin_; t < end_; ++t) unpack_keys(t, codes_ + t * tile * width_);
    keep_awake();
    for (int t = begin_; t <= last; ++t) split_queries(t, q, rows, a[t], row[t]);
    alignas(64) std::int32_t c[chunk_tiles][2][row_lines][words];  // (line, token)
    memory_is_read();
    for (int t = begin_; t < end_; ++t) {
      const std::uint8_t* keys = codes_ + t * tile * width_;
      _tile_zero(2);
      _tile_zero(3);
      for (int block = 0; block < blocks; ++block, keys += 2 * tile_bytes) {
        _tile_loadd(7, a[std::min(t, last)][block], 64);
        _tile_loadd(4, keys, 64);
        _tile_dpbsud(2, 7, 4);
        _tile_loadd(5, keys + tile_bytes, 64);
        _tile_dpbsud(3, 7, 5);
      }
      _tile_stored(2, c[t][0], 64);
      _tile_stored(3, c[t][1], 64);
    }
    keep_awake();
    memory_is_read();
    for (int t = begin_; t < end_; ++t)
      for (int half = 0; half < 2; ++half)
        for (int i = 0; i < rows; ++i) {
          const RowInts& ints = row[std::min(t, last)][i];
          const F32 dots = from_planes(c[t][half][2 * i], c[t][half][2 * i + 1], ints.sum);
          store(s + i * chunk + t * tile + half * lanes, fma(dots, splat(ints.step), splat(ints.bias)));
        }
  }

  // acc [rows][width] += p v, and bias [rows] += what is to be added to all channels. p [rows][chunk], of which row i
  // takes tokens `coded`[i].
  void values(const float* p, const Range* coded, int rows, float* acc, float* bias) const {
    alignas(64) std::int32_t b[chunk_tiles][words * words];  // (word, column)
    RowInts row[row_block];
    keep_awake();
    for (int t = begin_; t < end_; ++t) unpack_values(t, codes_ + t * tile * width_);
    keep_awake();
    value_columns(p, coded, rows, b, row);
    for (int i = 0; i < rows; ++i) bias[i] += row[i].bias;
    for (int d = 0; d < width_; d += block_channels) {
      alignas(64) std::int32_t c[2][words * words];  // (line, column)
      memory_is_read();
      _tile_zero(0);
      _tile_zero(1);
      for (int t = begin_; t < end_; ++t) {
        const std::uint8_t* const from = codes_ + t * tile * width_ + d / 32 * tile_bytes;
        _tile_loadd(6, b[t], 64);
        _tile_loadd(4, from, 64);
        _tile_dpbusd(0, 4, 6);
        _tile_loadd(5, from + tile_bytes, 64);
        _tile_dpbusd(1, 5, 6);
      }
      _tile_stored(0, c[0], 64);
      _tile_stored(1, c[1], 64);
      memory_is_read();
      for (int half = 0; half < 2; ++half) {
        alignas(64) std::int32_t sums[words * words];  // (column, line)
        transpose_words(c[half], sums);
        for (int i = 0; i < rows; ++i)
          for (int which = 0; which < 2; ++which) {  // channels 16 which to 16 which + 15 of the 32
            const std::int32_t* const high = sums + (4 * i + which) * words;
            float* const to = acc + i * width_ + d + half * 32 + which * 16;
            store(to, fma(from_planes(high, high + 2 * words, row[i].sum), splat(row[i].step), load(to)));
          }
      }
    }
  }

 private:
  // What turns a row's integers into floats: (sum of (u - 8) v) * step + bias. sum: of v.
  struct RowInts {
    float step = 0, bias = 0;
    std::int32_t sum = 0;
    F32 inverse() const { return splat(1 / step); }
  };

  int stored(int t) const { return std::min(tile, count_ - t * tile); }  // tokens of a tile
  const std::byte* codes(const KvCacheView::Plane& plane, int t) const {
    const std::int64_t token = first_ + t * tile;
    return head_.at(plane.codes, plane, token) + token % cache_.page_size * width_ / 2;
  }
  __m512i flip() const { return _mm512_set1_epi8(has_min(cache_.format) ? 0 : 8); }

  // The keys of tile t as B: bytes [width / 64][2][16 lines][16 tokens][4 channels].
  void unpack_keys(int t, std::uint8_t* to) const {
    const std::byte* const from = codes(cache_.k, t);
    const int row_bytes = width_ / 2;
    for (int block = 0; block < width_ / block_channels; ++block)
      for (int half = 0; half < 2; ++half, to += tile_bytes) {
        const std::byte* const first = from + half * lanes * row_bytes + block * 32;
        __m512i lines[8];  // (words of 8 channels, 16 tokens)
        transpose_keys(first, row_bytes, lines);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          store_raw(to + i * 64, nibbles(lines[i], flip()));
          store_raw(to + (8 + i) * 64, nibbles(_mm512_srli_epi32(lines[i], 4), flip()));
        }
      }
  }

  // lines (word, token) of 16 tokens with 8 words each, `stride` bytes apart.
  static void transpose_keys(const std::byte* from, int stride, __m512i (&lines)[8]) {
    __m512i a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i)  // tokens i and i + 8
      a[i] = _mm512_inserti64x4(_mm512_castsi256_si512(load_raw<__m256i>(from + i * stride)),
                                load_raw<__m256i>(from + (i + 8) * stride), 1);
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {  // a[i + j]: words j and j + 4 of tokens i to i + 3, then of those 8 on
      a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
      a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
      a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
      a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 4, 5, 12, 13),
                  second = _mm512_setr_epi64(2, 3, 10, 11, 6, 7, 14, 15);
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      lines[j] = _mm512_permutex2var_epi64(a[j], first, a[4 + j]);
      lines[4 + j] = _mm512_permutex2var_epi64(a[j], second, a[4 + j]);
    }
  }

  // The values of tile t as bytes [width / 32][16 lines][64].
  void unpack_values(int t, std::uint8_t* to) const {
    const std::byte* from = codes(cache_.v, t);
    const __m512i flips = flip();
    for (int d = 0; d < width_; d += 32, to += tile_bytes)
      for (int line = 0; line < 8; ++line, from += 64) {
        const __m512i both = load_raw<__m512i>(from);
        store_raw(to + line * 64, nibbles(both, flips));
        store_raw(to + (8 + line) * 64, nibbles(_mm512_srli_epi32(both, 4), flips));
      }
  }

  // q times the channel scales of tile t, in planes.
  void split_queries(int t, const float* q, int rows, std::int8_t (*a)[row_lines][64], RowInts* row) const {
    float scale[max_head_dim], min_term[max_head_dim];  // (width), in paired order
    const bool by_channel = is_kivi(cache_.format), affine = has_min(cache_.format);
    if (by_channel) load_channel_scales(head_, first_ + t * tile, width_, scale, min_term);
    if (by_channel && affine) to_zero_point(scale, min_term, width_);
    for (int i = 0; i < rows; ++i) {
      Largest largest;
      F32 bias{};
      for (int d = 0; d < width_; d += lanes) {
        const F32 x = load(q + i * width_ + d);
        largest.add(by_channel ? x * load(scale + d) : x);
        if (by_channel && affine) bias = fma(x, load(min_term + d), bias);
      }
      row[i] = {step_or_nan(largest.value()), sum(bias), 0};
      const F32 inverse = row[i].inverse();
      I32 total{};
      for (int d = 0; d < width_; d += lanes) {  // even channels of 32, odd ones
        const F32 x = load(q + i * width_ + d);
        const I32 v = to_integers(by_channel ? x * load(scale + d) : x, inverse);
        const int block = d / block_channels, j = d % block_channels / lanes, at = (j % 2 * 2 + j / 2) * lanes;
        total += v;
        store_raw(a[block][2 * i] + at, lowest_bytes((v + 128) >> 8));
        store_raw(a[block][2 * i + 1] + at, lowest_bytes(v));
      }
      set_sum(row[i], total);
    }
  }

  // B of the values of each tile: p times V's scales.
  void value_columns(const float* p, const Range* coded, int rows, std::int32_t (*b)[words * words],
                     RowInts* row) const {
    float weight[row_block][chunk];
    Largest largest[row_block];
    F32 bias[row_block] = {};
    for (int t = begin_; t < end_; ++t) {
      float scale[tile], min_term[tile];
      token_scales(head_, cache_.v, cache_.v.scale, first_ + t * tile, stored(t), scale);
      const bool affine = has_min(cache_.format);
      if (affine) {
        token_scales(head_, cache_.v, cache_.v.min, first_ + t * tile, stored(t), min_term);
        to_zero_point(scale, min_term, tile);
      }
      for (int i = 0; i < rows; ++i)
        for (int h = 0; h < tile; h += lanes) {
          const int at = t * tile + h;
          const auto seen = [&](F32 x) { return select_range(x, at, coded[i].first, coded[i].last, F32{}); };
          const F32 x = load(p + i * chunk + at), weighted = seen(x * load(scale + h));
          store(weight[i] + at, weighted);
          largest[i].add(weighted);
          if (affine) bias[i] += seen(x * load(min_term + h));
        }
    }
    for (int i = 0; i < rows; ++i) row[i] = {step_or_nan(largest[i].value()), sum(bias[i]), 0};

    keep_awake();
    // Word w of a line of codes has tokens 8 (w % 4) + 2 (w / 4) and the next, two bytes each.
    const __m512i even = _mm512_setr_epi32(0, 8, 16, 24, 2, 10, 18, 26, 4, 12, 20, 28, 6, 14, 22, 30),
                  odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
    I32 sums[row_block] = {};
    alignas(64) std::int32_t columns[words * words] = {};  // (column, word)
    for (int t = begin_; t < end_; ++t) {
      for (int i = 0; i < rows; ++i) {
        const F32 inverse = row[i].inverse();
        const I32 v[2] = {to_integers(load(weight[i] + t * tile), inverse),
                          to_integers(load(weight[i] + t * tile + lanes), inverse)};
        sums[i] += v[0] + v[1];
        const I32 first = (I32)_mm512_permutex2var_epi32((__m512i)v[0], even, (__m512i)v[1]),
                  second = (I32)_mm512_permutex2var_epi32((__m512i)v[0], odd, (__m512i)v[1]);
        const U32 planes[2] = {high_byte(first) | high_byte(second) << 16, low_byte(first) | low_byte(second) << 16};
        for (int plane = 0; plane < 2; ++plane) {
          store_raw(columns + (4 * i + 2 * plane) * words, planes[plane]);
          store_raw(columns + (4 * i + 2 * plane + 1) * words, planes[plane] << 8);
        }
      }
      transpose_words(columns, b[t]);
    }
    for (int i = 0; i < rows; ++i) set_sum(row[i], sums[i]);
  }

  // v of a row with NaN or infinity are no numbers; its step is NaN.
  static void set_sum(RowInts& row, I32 v) { row.sum = row.step == row.step ? _mm512_reduce_add_epi32((__m512i)v) : 0; }

  CachedHead head_;
  const KvCacheView& cache_;
  std::int64_t first_;
  int begin_, end_, count_, width_;
  std::uint8_t* codes_;
};

}  // namespace
}  // namespace rooftile::cpu::ROOFTILE_ISA
