// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 4 bits; gated: the rows of W are [gate | up], y = activation(gate) * up + residual.
//   x [M, K]   y, residual [M, N or N / 2]   bias [N]   W in tiles of 16 n x 64 k (core/w4_layout.h)
//
// A 64-byte load of a tile is row g and row g + 8: its 16 words hold, nibble by nibble, 16 positions of k of one row. So
// lanes are positions of k, x is put into the codes' order once a call, and every output has one accumulator of 16 lanes
// that adds blocks of 64 k in order; the lanes are summed at the end. That order is the only one, whatever M is:
//   M = 1: decode in registers, 16 accumulators a tile. Bound by the bytes of W.
//   M > 1: decode 16 rows x 256 k into L1 as fp32, then a block of rows of x against them. Bound by fused multiply-adds.
// Tasks are ranges of tiles (x blocks of rows); no two write the same output.
#include <algorithm>
#include <cstddef>

#include "core/w4_layout.h"
#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/scratch.h"
#include "rooftile/error.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/activation.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

constexpr int tile_n = w4_tile_n, block_k = w4_tile_k;
constexpr int quads = block_k / lanes;                  // vectors of k in a block
constexpr int row_floats = block_k;                     // one row of a decoded tile
constexpr int tile_floats = tile_n * block_k;
constexpr int strip_blocks = 4;                         // decoded at once: 16 KB, half an L1
constexpr std::int64_t block_rows = 96;                 // rows of x against one strip: their accumulators stay in L2
constexpr std::int64_t panel_bytes = std::int64_t{16} << 20;   // x in the codes' order, at most (one row at least)
constexpr std::int64_t worth_a_thread = 192 * 1024;     // multiply-adds: some 10 us
constexpr std::int64_t task_weights = 64 * 1024;

#ifdef ROOFTILE_AVX512
constexpr int micro_rows = 6, micro_n = 4;              // accumulators of the inner kernel: 24 of 32 registers
#else
constexpr int micro_rows = 2, micro_n = 2;              // 8 of 16
#endif

template <class T = float>
T* at(const Scratch& scratch, std::int64_t byte) { return reinterpret_cast<T*>(scratch.data() + byte); }

// ---- x in the codes' order ----------------------------------------------------------------------------------------------

// Lane 4 t + word of quad q is k = 16 word + 8 (q / 2) + 2 t + q % 2 of its block.
constexpr int k_of(int q, int lane) { return 16 * (lane % 4) + 8 * (q / 2) + 2 * (lane / 4) + q % 2; }

void to_code_order(const float* x, std::int64_t blocks, float* to) {
#ifdef ROOFTILE_AVX512
  // both sources of an even lane pair hold one word; the blend picks words 0, 1 from the first two, 2, 3 from the others
  I32 first;
  for (int lane = 0; lane < lanes; ++lane) first[lane] = 2 * (lane / 4) + 16 * (lane % 2);
  for (std::int64_t b = 0; b < blocks; ++b, x += block_k, to += block_k) {
    const __m512 word0 = _mm512_loadu_ps(x), word1 = _mm512_loadu_ps(x + 16), word2 = _mm512_loadu_ps(x + 32),
                 word3 = _mm512_loadu_ps(x + 48);
    for (int q = 0; q < quads; ++q) {
      const __m512i index = (__m512i)(first + (8 * (q / 2) + q % 2));
      const __m512 low = _mm512_permutex2var_ps(word0, index, word1), high = _mm512_permutex2var_ps(word2, index, word3);
      _mm512_storeu_ps(to + q * lanes, _mm512_mask_blend_ps(0xcccc, low, high));
    }
  }
#else
  for (std::int64_t b = 0; b < blocks; ++b, x += block_k, to += block_k)
    for (int q = 0; q < quads; ++q)
      for (int lane = 0; lane < lanes; ++lane) to[q * lanes + lane] = x[k_of(q, lane)];
#endif
}

// Row `m` of x as fp32, act-order applied, padded with zeros to whole blocks.
void natural_order(const TensorView& x, std::int64_t m, const std::int32_t* perm, std::int64_t padded, float* to) {
  with_element(x.dtype, [&](auto e) {
    const auto* p = x.as<decltype(e)>() + x.row_offset(m);
    const std::int64_t k = x.last(), stride = x.last_stride();
    if (perm) {
      for (std::int64_t i = 0; i < k; ++i) to[i] = to_float(p[perm[i] * stride]);
    } else if (stride == 1) {
      std::int64_t i = 0;
      for (; i + lanes <= k; i += lanes) store(to + i, load(p + i));
      for (; i < k; ++i) to[i] = to_float(p[i]);
    } else {
      for (std::int64_t i = 0; i < k; ++i) to[i] = to_float(p[i * stride]);
    }
    std::fill(to + k, to + padded, 0.0f);
  });
}

// ---- decoding -------------------------------------------------------------------------------------------------------------

// Every kind of weight is w = (u - origin) * scale + shift: the origin is 0 for minima, else 8; the shift is the minimum,
// 0, or (8 - zero) * scale, which is exact. Of the sixteen rows of a tile; a block of 64 k has two halves of 32, which lie
// in different groups where the group is 32.
struct TileScales {
  float scale[2][tile_n], shift[2][tile_n];
};
ROOFTILE_INLINE float origin(const W4View& w) { return w.zeros == W4Zeros::minima ? 0.0f : 8.0f; }

// Groups are 32, 64, 128 or all of k: no division by a variable, it would cost as much as a block.
ROOFTILE_INLINE std::int64_t group_count(const W4View& w) {
  return w.group == w.k ? 1 : w.group == 32 ? w.k / 32 : w.group == 64 ? w.k / 64 : w.k / 128;
}
template <bool Split>
ROOFTILE_INLINE std::int64_t group_of(const W4View& w, std::int64_t block, int half) {
  if (Split) return std::min(2 * block + half, w.k / 32 - 1);   // the last half may be padding
  return w.group == w.k ? 0 : w.group == 64 ? block : block / 2;
}

// `loaded`: the group that `to` holds already, -1 at first.
template <bool Split>
ROOFTILE_INLINE void load_scales(const W4View& w, std::int64_t tile, std::int64_t block, std::int64_t& loaded, TileScales& to) {
  if (loaded == group_of<Split>(w, block, 0)) return;
  loaded = group_of<Split>(w, block, 0);
  for (int half = 0; half < (Split ? 2 : 1); ++half) {
    const std::int64_t at = w4_scale_index(group_count(w), tile * tile_n, group_of<Split>(w, block, half));
    const auto sixteen = [&](const std::byte* data) {
      return w.scale_dtype == DType::f16 ? load(reinterpret_cast<const Half*>(data) + at)
                                         : load(reinterpret_cast<const BFloat16*>(data) + at);
    };
    const F32 scale = sixteen(w.scales);
    F32 shift{};
    if (w.zeros == W4Zeros::minima) shift = sixteen(w.offsets);
    if (w.zeros == W4Zeros::integer) {
      const U8 zeros = load_raw<U8>(reinterpret_cast<const std::uint8_t*>(w.offsets) + at);
      shift = (8.0f - __builtin_convertvector(zeros, F32)) * scale;
    }
    store(to.scale[half], scale);
    store(to.shift[half], shift);
  }
  asm("" : "+m"(to));   // a broadcast from memory is free, from a register it takes the port that the permutes need
}

// One row's weights from its codes.
#ifdef ROOFTILE_AVX512
struct RowDecoder {
  __m512 table[2];   // what each of the sixteen codes stands for, in either half
};
template <bool Split>
ROOFTILE_INLINE RowDecoder row_decoder(const TileScales& s, int row, float origin) {
  const F32 codes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  RowDecoder d;
  for (int half = 0; half < (Split ? 2 : 1); ++half)
    d.table[half] = (__m512)fma(codes - origin, splat(s.scale[half][row]), splat(s.shift[half][row]));
  return d;
}
// The four quads of row g (High = 0) or g + 8 (High = 1) in one 64-byte load: nibble High + 2 (q / 2) + 4 (q % 2).
template <bool Split, int High>
ROOFTILE_INLINE void decode(__m512i codes, const RowDecoder& d, F32 (&w)[quads]) {
  if constexpr (Split) {   // bit 4 of an index picks the table: set in the lanes of words 2 and 3
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i second = _mm512_maskz_set1_epi32(0xcccc, 0x10101010);
    const __m512i bytes = High ? _mm512_srli_epi32(codes, 4) : codes;
    const __m512i index = _mm512_ternarylogic_epi32(bytes, nibble, second, 0xea);   // (bytes & nibble) | second
    for (int q = 0; q < quads; ++q)
      w[q] = (F32)_mm512_permutex2var_ps(d.table[0], _mm512_srli_epi32(index, 8 * (q / 2) + 16 * (q % 2)), d.table[1]);
  } else {                 // a permute looks at the low four bits only
    for (int q = 0; q < quads; ++q)
      w[q] = (F32)_mm512_permutexvar_ps(_mm512_srli_epi32(codes, 4 * High + 8 * (q / 2) + 16 * (q % 2)), d.table[0]);
  }
}
using Codes = __m512i;
#else
struct RowDecoder {
  float origin;
  F32 scale, shift;
};
template <bool Split>
ROOFTILE_INLINE RowDecoder row_decoder(const TileScales& s, int row, float origin) {
  const auto by_lane = [row](const float (&v)[2][tile_n]) {
    if constexpr (!Split) return splat(v[0][row]);
    const I32 second = {0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1};
    return second ? splat(v[1][row]) : splat(v[0][row]);
  };
  return {origin, by_lane(s.scale), by_lane(s.shift)};
}
template <bool Split, int High>
ROOFTILE_INLINE void decode(U32 codes, const RowDecoder& d, F32 (&w)[quads]) {
  for (int q = 0; q < quads; ++q) {
    const I32 u = (I32)((codes >> (4 * High + 8 * (q / 2) + 16 * (q % 2))) & 15);
    w[q] = fma(__builtin_convertvector(u, F32) - d.origin, d.scale, d.shift);
  }
}
using Codes = U32;
#endif

ROOFTILE_INLINE const std::uint8_t* tile_codes(const W4View& w, std::int64_t tile, std::int64_t block) {
  return w.codes + (tile * w4_tiles_k(w.k) + block) * w4_tile_bytes;
}

// One tile as fp32 [16 rows][4 quads][16 lanes]; past the end of k it is 0, whatever the scales are.
template <bool Split>
void decode_tile(const W4View& w, std::int64_t tile, std::int64_t block, float* to) {
  TileScales scales;
  std::int64_t loaded = -1;
  load_scales<Split>(w, tile, block, loaded, scales);
  const std::uint8_t* codes = tile_codes(w, tile, block);
  const float zero = origin(w);
  for (int g = 0; g < 8; ++g) {
    const Codes c = load_raw<Codes>(codes + g * 64);
    F32 low[quads], high[quads];
    decode<Split, 0>(c, row_decoder<Split>(scales, g, zero), low);
    decode<Split, 1>(c, row_decoder<Split>(scales, g + 8, zero), high);
    for (int q = 0; q < quads; ++q) {
      store(to + g * row_floats + q * lanes, low[q]);
      store(to + (g + 8) * row_floats + q * lanes, high[q]);
    }
  }
  const std::int64_t left = w.k - block * block_k;
  if (left >= block_k) return;
  for (int row = 0; row < tile_n; ++row)
    for (int q = 0; q < quads; ++q)
      for (int lane = 0; lane < lanes; ++lane)
        if (k_of(q, lane) >= left) to[row * row_floats + q * lanes + lane] = 0;
}

// ---- outputs --------------------------------------------------------------------------------------------------------------

// sum() of sixteen vectors at once, in the same order; result lane i is of acc[i].
ROOFTILE_INLINE F32 sums(const F32* acc) {
#ifdef ROOFTILE_AVX512
  // every step adds the upper half of what is left of each vector to its lower half; the vectors are taken so that the
  // last step leaves them in order
  __m512 v[tile_n];
  for (int i = 0; i < tile_n; ++i) v[i] = (__m512)acc[4 * (i % 4) + i / 4];
  for (int i = 0; i < 8; ++i)
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44), _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xee));
  for (int i = 0; i < 4; ++i)
    v[i] = _mm512_add_ps(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x88), _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xdd));
  for (int i = 0; i < 2; ++i)
    v[i] = _mm512_add_ps(_mm512_shuffle_ps(v[2 * i], v[2 * i + 1], 0x44), _mm512_shuffle_ps(v[2 * i], v[2 * i + 1], 0xee));
  return (F32)_mm512_add_ps(_mm512_shuffle_ps(v[0], v[1], 0x88), _mm512_shuffle_ps(v[0], v[1], 0xdd));
#else
  float total[tile_n];
  for (int i = 0; i < tile_n; ++i) total[i] = sum(acc[i]);
  return load(total);
#endif
}

// Sixteen (or the last few) elements along the last dimension.
F32 load_tile(const TensorView& t, std::int64_t offset, int count) {
  F32 v{};
  with_element(t.dtype, [&](auto e) {
    const auto* p = t.as<decltype(e)>() + offset;
    const std::int64_t stride = t.last_stride();
    if (stride == 1) {
      v = load_some(p, count);
    } else {
      for (int i = 0; i < count; ++i) v[i] = to_float(p[i * stride]);
    }
  });
  return v;
}
void store_tile(const TensorView& t, std::int64_t offset, int count, F32 v) {
  with_element(t.dtype, [&](auto e) {
    auto* p = t.as<decltype(e)>() + offset;
    const std::int64_t stride = t.last_stride();
    if (stride == 1) {
      store_some(p, v, count);
    } else {
      for (int i = 0; i < count; ++i) p[i * stride] = from_float<decltype(e)>(v[i]);
    }
  });
}

F32 activate(Activation a, F32 x) {
  switch (a) {
    case Activation::none: return x;
    case Activation::silu: return Silu::apply(x);
    case Activation::gelu_tanh: return GeluTanh::apply(x);
    case Activation::gelu_erf: return GeluErf::apply(x);
  }
  return x;
}

// What follows the product, for sixteen neighbouring outputs and any row.
class Epilogue {
 public:
  Epilogue(const W4MatmulArgs& a, std::int64_t tile)
      : a_(a), n_(tile * tile_n), count_(static_cast<int>(std::min<std::int64_t>(tile_n, a.outputs() - n_))) {
    if (!a.bias.given()) return;
    bias_ = load_tile(a.bias, n_ * a.bias.stride[0], count_);
    if (a.gated) up_bias_ = load_tile(a.bias, (n_ + a.outputs()) * a.bias.stride[0], count_);
  }
  // up: of a gated product. y_row, residual_row: offsets of the row in elements
  void operator()(F32 product, F32 up, std::int64_t y_row, std::int64_t residual_row) const {
    if (a_.bias.given()) product += bias_;
    product = activate(a_.activation, product);
    if (a_.gated) product *= a_.bias.given() ? up + up_bias_ : up;
    if (a_.residual.given()) product += load_tile(a_.residual, residual_row + n_ * a_.residual.last_stride(), count_);
    store_tile(a_.y, y_row + n_ * a_.y.last_stride(), count_, product);
  }

 private:
  const W4MatmulArgs& a_;
  std::int64_t n_;
  int count_;
  F32 bias_{}, up_bias_{};
};

// ---- one row of x -----------------------------------------------------------------------------------------------------------

template <bool Split>
void one_row(const W4View& w, std::int64_t tile, const float* x, F32 (&acc)[tile_n]) {
  for (F32& a : acc) a = F32{};
  TileScales scales;
  std::int64_t loaded = -1;
  const std::int64_t whole = w.k / block_k;
  const float zero = origin(w);
  for (std::int64_t block = 0; block < whole; ++block) {
    const float* xb = x + block * block_k;
    const F32 x_quads[quads] = {load(xb), load(xb + lanes), load(xb + 2 * lanes), load(xb + 3 * lanes)};
    load_scales<Split>(w, tile, block, loaded, scales);
    const std::uint8_t* codes = tile_codes(w, tile, block);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      const Codes c = load_raw<Codes>(codes + g * 64);
      F32 low[quads], high[quads];
      decode<Split, 0>(c, row_decoder<Split>(scales, g, zero), low);
      decode<Split, 1>(c, row_decoder<Split>(scales, g + 8, zero), high);
#pragma GCC unroll 4
      for (int q = 0; q < quads; ++q) {
        acc[g] = fma(low[q], x_quads[q], acc[g]);
        acc[g + 8] = fma(high[q], x_quads[q], acc[g + 8]);
      }
    }
  }
  if (whole * block_k == w.k) return;
  float last[tile_floats];
  decode_tile<Split>(w, tile, whole, last);
  for (int row = 0; row < tile_n; ++row)
    for (int q = 0; q < quads; ++q)
      acc[row] = fma(load(last + row * row_floats + q * lanes), load(x + whole * block_k + q * lanes), acc[row]);
}

// ---- many rows of x -----------------------------------------------------------------------------------------------------------

// acc[row][16 n] += x[row] . strip[n] over `blocks` blocks, for Rows rows and micro_n of the sixteen n.
template <int Rows>
void micro(const float* strip, const float* x, std::int64_t x_row, int blocks, bool first, F32* acc) {
  F32 r[Rows][micro_n];
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < micro_n; ++n) r[m][n] = first ? F32{} : acc[m * tile_n + n];
  for (int b = 0; b < blocks; ++b, strip += tile_floats, x += block_k) {
#pragma GCC unroll 4
    for (int q = 0; q < quads; ++q) {
      F32 w[micro_n];
#pragma GCC unroll 4
      for (int n = 0; n < micro_n; ++n) w[n] = load(strip + n * row_floats + q * lanes);
#pragma GCC unroll 8
      for (int m = 0; m < Rows; ++m) {
        const F32 xv = load(x + m * x_row + q * lanes);
#pragma GCC unroll 4
        for (int n = 0; n < micro_n; ++n) r[m][n] = fma(w[n], xv, r[m][n]);
      }
    }
  }
#pragma GCC unroll 8
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < micro_n; ++n) acc[m * tile_n + n] = r[m][n];
}

template <int Rows>
void micro_at_most(int rows, const float* strip, const float* x, std::int64_t x_row, int blocks, bool first, F32* acc) {
  if constexpr (Rows > 1)
    if (rows < Rows) return micro_at_most<Rows - 1>(rows, strip, x, x_row, blocks, first, acc);
  micro<Rows>(strip, x, x_row, blocks, first, acc);
}

// One tile against `rows` rows of x, into acc [rows][16 n].
template <bool Split>
void many_rows(const W4View& w, std::int64_t tile, const float* x, std::int64_t x_row, int rows, float* strip, F32* acc) {
  const std::int64_t blocks = w4_tiles_k(w.k);
  for (std::int64_t begin = 0; begin < blocks; begin += strip_blocks) {
    const int here = static_cast<int>(std::min<std::int64_t>(strip_blocks, blocks - begin));
    for (int b = 0; b < here; ++b) decode_tile<Split>(w, tile, begin + b, strip + b * tile_floats);
    for (int m = 0; m < rows; m += micro_rows)
      for (int n = 0; n < tile_n; n += micro_n)
        micro_at_most<micro_rows>(std::min(micro_rows, rows - m), strip + n * row_floats, x + m * x_row + begin * block_k,
                                  x_row, here, begin == 0, acc + m * tile_n + n);
  }
}

// ---- the product of up to one panel of rows -----------------------------------------------------------------------------------

struct Panel {
  std::int64_t first_row, rows;
  std::int64_t x_row;              // floats of a row of x: whole blocks
  float* x;                        // [rows][x_row] in the codes' order
  std::int64_t *y_at, *residual_at;   // [rows] offsets in elements
};

void fill_panel(const Parallel& parallel, const W4MatmulArgs& a, const Panel& p, float* natural) {
  const auto fill = [&](std::int64_t m, int thread) {
    float* row = natural + thread * p.x_row;
    natural_order(a.x, p.first_row + m, a.w->perm, p.x_row, row);
    to_code_order(row, p.x_row / block_k, p.x + m * p.x_row);
    p.y_at[m] = a.y.row_offset(p.first_row + m);
    p.residual_at[m] = a.residual.given() ? a.residual.row_offset(p.first_row + m) : 0;
  };
  constexpr std::int64_t piece = 8;   // rows a task
  const auto fill_piece = [&](std::int64_t task, int thread) {
    for (std::int64_t m = task * piece; m < std::min(p.rows, (task + 1) * piece); ++m) fill(m, thread);
  };
  if (p.rows * p.x_row < worth_a_thread / 4) {
    for (std::int64_t m = 0; m < p.rows; ++m) fill(m, 0);
  } else {
    parallel.run((p.rows + piece - 1) / piece, fill_piece);
  }
}

// to[row]: sixteen products of each of `count` rows of the panel from m0 on with the rows of W from n on. Where those lie in
// two tiles (n is no multiple of sixteen) each tile takes its lanes.
template <bool Split>
void products(const W4View& w, std::int64_t n, const Panel& p, std::int64_t m0, std::int64_t count, float* strip, F32* acc, F32* to) {
  const int from = static_cast<int>(n % tile_n);   // lane 0 of `to` is lane `from` of the first tile
  for (std::int64_t tile = n / tile_n; tile <= std::min((n + tile_n - 1) / tile_n, w4_tiles_n(w.n) - 1); ++tile) {
    F32 alone[tile_n];
    if (p.rows == 1) {
      one_row<Split>(w, tile, p.x, alone);
    } else {
      many_rows<Split>(w, tile, p.x + m0 * p.x_row, p.x_row, static_cast<int>(count), strip, acc);
    }
    const int first = static_cast<int>(tile * tile_n - n);   // which lane of `to` lane 0 of this tile is
    for (std::int64_t m = 0; m < count; ++m) {
      const F32 sixteen = sums(p.rows == 1 ? alone : acc + m * tile_n);
      if (from == 0) {
        to[m] = sixteen;
      } else {
        for (int i = std::max(0, first); i < std::min(tile_n, first + tile_n); ++i) to[m][i] = sixteen[i - first];
      }
    }
  }
}

template <bool Split>
void multiply_panel(const Parallel& parallel, const W4MatmulArgs& a, const Panel& p) {
  const W4View& w = *a.w;
  const std::int64_t tiles = w4_tiles_n(a.outputs()), tile_weights = tile_n * p.x_row * (a.gated ? 2 : 1);
  const std::int64_t pieces = (p.rows + block_rows - 1) / block_rows;
  const std::int64_t rows = ((p.rows + pieces - 1) / pieces + micro_rows - 1) / micro_rows * micro_rows;   // a piece's
  const std::int64_t run = std::max<std::int64_t>(1, task_weights / (tile_weights * std::min(p.rows, rows)));   // tiles a task
  const std::int64_t runs = (tiles + run - 1) / run;
  const bool alone = p.rows * tiles * tile_weights < worth_a_thread;

  const std::int64_t strip_bytes = strip_blocks * tile_floats * 4, acc_bytes = rows * tile_n * lanes * 4, out_bytes = rows * lanes * 4;
  const std::int64_t room = 2 * out_bytes + (p.rows == 1 ? 0 : strip_bytes + acc_bytes);
  const Scratch scratch(static_cast<std::size_t>(room * (alone ? 1 : parallel.threads())));
  const auto task = [&](std::int64_t t, int thread) {
    const std::int64_t piece = t / runs, begin = (t % runs) * run, end = std::min(tiles, begin + run);
    const std::int64_t m0 = piece * rows, count = std::min(rows, p.rows - m0);
    for (std::int64_t tile = begin; tile < end; ++tile) {
      const Epilogue finish(a, tile);
      F32* out = at<F32>(scratch, room * thread);
      F32* up = at<F32>(scratch, room * thread + out_bytes);
      float* strip = at(scratch, room * thread + 2 * out_bytes);
      F32* acc = at<F32>(scratch, room * thread + 2 * out_bytes + strip_bytes);
      products<Split>(w, tile * tile_n, p, m0, count, strip, acc, out);
      if (a.gated) products<Split>(w, a.outputs() + tile * tile_n, p, m0, count, strip, acc, up);
      for (std::int64_t m = 0; m < count; ++m) finish(out[m], a.gated ? up[m] : F32{}, p.y_at[m0 + m], p.residual_at[m0 + m]);
    }
  };
  const std::int64_t used = (p.rows + rows - 1) / rows;   // pieces that have rows after rounding up
  if (alone) {
    for (std::int64_t t = 0; t < used * runs; ++t) task(t, 0);
  } else {
    parallel.run(used * runs, task);
  }
}

}  // namespace

void w4a16_matmul(const Parallel& parallel, const W4MatmulArgs& a) {
  const std::int64_t total = a.x.rows(), x_row = w4_tiles_k(a.w->k) * block_k;
  if (total == 0 || a.w->n == 0) return;
  const std::int64_t at_once = std::min(total, std::max<std::int64_t>(1, panel_bytes / (x_row * 4)));
  const std::int64_t x_bytes = at_once * x_row * 4, natural_bytes = x_row * 4 * parallel.threads();
  const Scratch buffer(static_cast<std::size_t>(x_bytes + natural_bytes + at_once * 16));
  for (std::int64_t first = 0; first < total; first += at_once) {
    const Panel p{first, std::min(at_once, total - first), x_row, at(buffer, 0),
                  at<std::int64_t>(buffer, x_bytes + natural_bytes),
                  at<std::int64_t>(buffer, x_bytes + natural_bytes + at_once * 8)};
    fill_panel(parallel, a, p, at(buffer, x_bytes));
    if (a.w->group == 32) {
      multiply_panel<true>(parallel, a, p);
    } else {
      multiply_panel<false>(parallel, a, p);
    }
  }
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
