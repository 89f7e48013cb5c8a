// SPDX-License-Identifier: Apache-2.0
// One row of x times the codes of a tile, in integers: vpdpbusd adds four products of bytes to each 32-bit lane.
//   x [K] of 16-bit floats   y [16 n]
//
// In a k-block of 64, x = step * v with integers |v| <= 32639, v = 256 high + low, both of 8 bits, and step a power of
// two. A group of a row n has one scale and one offset:
//   4 bits: w = u * scale + offset           u: the code
//   8 bits: w = (u - 128) * scale + offset
//   y[n] += scale * step * (sum of u v) + offset * step * (sum of v)      8 bits: u - 128 for u
// The sums are integers. So what is rounded that fp32 does not round is x: by less than 1 / 32639 of the largest |x| of
// its block, or by 2^-55. A bf16 of more than 2^-7 of that largest |x| is kept as it is.
//
// Vector instructions of 64 bytes of codes, 128 weights, in 4 bits: 13, of which 4 are vpdpbusd. fp32 takes 24, with
// groups of 32 36.
#pragma once

#include <type_traits>
#include <utility>

#include "cpu/simd/two_planes.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

// A k-block of x, in place of its 64 floats. Bytes are in the order of the codes' words: of a word, nibble (in 8 bits
// byte) 2 i of row g, and 2 i + 1 of row g + 8, belong to vector {0, 2, 1, 3}[i] (RowDecoder), and so does byte i here.
struct IntegerBlock {
  std::int8_t high[block_k], low[block_k];
  float sum[2];  // step * (sum of v) of the two halves of 32 k
  float step;
  float unused[29];
};
static_assert(sizeof(IntegerBlock) == block_k * sizeof(float));

// Rows whose largest |x| is in this range, or 0. Then no product with a scale between 2^-60 and 2^60 overflows or is a
// subnormal float: the caller may have set the CPU to flush those to zero. Of fp16 all finite rows are.
constexpr float least_largest = 0x1p-20f, most_largest = 0x1p40f;

// Replaces the floats of k-blocks in the codes' order (to_code_order) by IntegerBlocks.
template <int bits>
void to_integers(std::int64_t blocks, float* x) {
  for (std::int64_t b = 0; b < blocks; ++b, x += block_k) {
    IntegerBlock to{};
    F32 largest{};
    for (int q = 0; q < k_vecs; ++q) largest = vmax(magnitude(load(x + q * lanes)), largest);
    to.step = step_of(max(largest));
    const F32 inverse = splat(1 / to.step);
    U32 high{}, low{};
    I32 sum[2] = {};  // of v: vectors 0 and 1, vectors 2 and 3
    for (int q = 0; q < k_vecs; ++q) {
      const I32 v = to_integers(load(x + q * lanes), inverse);
      const int shift = 8 * (q / 2 + 2 * (q % 2));  // byte {0, 2, 1, 3}[q] of a word
      high |= high_byte(v) << shift;
      low |= low_byte(v) << shift;
      sum[q / 2] += v;
    }
    store_raw(to.high, high);
    store_raw(to.low, low);
    const auto add = [](I32 v, __mmask16 some) { return _mm512_mask_reduce_add_epi32(some, (__m512i)v); };
    for (int half = 0; half < 2; ++half) {
      // 8 bits: the second 32 k are vectors 2 and 3. 4 bits: lanes 2 and 3 of every four, of all vectors.
      const int total = bits == 8 ? add(sum[half], 0xffff) : add(sum[0] + sum[1], half == 0 ? 0x3333 : 0xcccc);
      to.sum[half] = to.step * static_cast<float>(total);
    }
    std::memcpy(x, &to, sizeof to);
  }
}

// In each lane 256 * (sum of u high) + (sum of u low) = sum of u v. u: codes as bytes; high, low: x in the same bytes.
ROOFTILE_INLINE __m512i dot(__m512i u, __m512i high, __m512i low) {
  return _mm512_dpbusd_epi32(_mm512_slli_epi32(_mm512_dpbusd_epi32(_mm512_setzero_si512(), u, high), 8), u, low);
}

// The scales of a k-block's rows times step. In memory: to broadcast from there is free, from a register it takes a
// permute.
template <bool by_words>
struct StepScales;
template <>
struct StepScales<false> {
  float of[2][tile_n];  // (halves, 16 rows)
  void set(F32 first, F32 second) {
    store(of[0], first);
    store(of[1], second);
  }
  __m512 row(int n, int half = 0) const { return _mm512_set1_ps(of[half][n]); }
};
// 4 bits in groups of 32: lanes of words 0 and 1 of every four take the first half's scale, of words 2 and 3 the
// second's.
template <>
struct StepScales<true> {
  float of[tile_n][4];  // (16 rows, words)
  void set(F32 first, F32 second) {
    const __m512i index = _mm512_setr_epi32(0, 0, 16, 16, 1, 1, 17, 17, 2, 2, 18, 18, 3, 3, 19, 19);
#pragma GCC unroll 4
    for (int n = 0; n < tile_n; n += 4)
      _mm512_storeu_ps(
          of[n], _mm512_permutex2var_ps((__m512)first, _mm512_add_epi32(index, _mm512_set1_epi32(n)), (__m512)second));
  }
  __m512 row(int n) const { return _mm512_broadcast_f32x4(_mm_loadu_ps(of[n])); }
};

// Calls f with each of the constants 0 to 7. An array that f indexes with them stays in registers, which it does not
// where the compiler unrolls a loop.
template <class F>
ROOFTILE_INLINE void for_eight(const F& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (f(std::integral_constant<int, i>{}), ...);
  }(std::make_integer_sequence<int, 8>{});
}

// Sixteen products of a tile with x in IntegerBlocks.
template <int bits, bool Split>
F32 integer_row(const W4View& w, std::int64_t tile, const float* x) {
  __m512 rows[tile_n] = {};  // (16 rows): sums of scale * step * u v by lane
  F32 offsets{};             // (16 rows): sums of offset * step * v
  TileScales scales;
  ScaleReader<Split> reader(w, tile);
  const float zero = zero_point(w);
  const std::int64_t blocks = w4_tiles_k(w.k);
  const std::uint8_t* codes = tile_codes(w, tile, 0);
  for (std::int64_t block = 0; block < blocks; ++block, x += block_k, codes += w4_tile_bytes(bits)) {
    const IntegerBlock& xb = *reinterpret_cast<const IntegerBlock*>(x);
    reader.load(block, scales);
    StepScales<bits == 4 && Split> s;
    F32 step_scale[2] = {};
    for (int half = 0; half < (Split ? 2 : 1); ++half) {
      const F32 scale = load(scales.scale[half]), min_term = load(scales.min_term[half]);
      const F32 offset = bits == 4 ? min_term - scale * zero : min_term;
      step_scale[half] = scale * xb.step;
      offsets = fma(offset, splat(Split ? xb.sum[half] : xb.sum[0] + xb.sum[1]), offsets);
    }
    s.set(step_scale[0], step_scale[1]);
    asm("" : "+m"(s));  // or the compiler keeps it in registers
    const __m512i high = load_raw<__m512i>(xb.high), low = load_raw<__m512i>(xb.low);
    const auto add = [&](int row, __m512i dots, __m512 scale) __attribute__((always_inline)) {
      rows[row] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dots), scale, rows[row]);
    };
    if constexpr (bits == 4) {
      const __m512i nibble = _mm512_set1_epi8(15);
      for_eight([&](auto g) __attribute__((always_inline)) {
        const __m512i c = load_raw<__m512i>(codes + g * 64);
        prefetch(codes + g * 64);
        add(g, dot(_mm512_and_si512(c, nibble), high, low), s.row(g));
        add(g + 8, dot(_mm512_and_si512(_mm512_srli_epi32(c, 4), nibble), high, low), s.row(g + 8));
      });
    } else {
      // Bytes 0 and 2 of a word are of row g, bytes 1 and 3 of row g + 8: x is 0 in the bytes of the other row.
      const __m512i even = _mm512_set1_epi32(0x00ff00ff);
      __m512i highs[2][2], lows[2][2];  // (halves of 32 k, rows g and g + 8)
      __m512i zeros[2];  // (halves): what the zero point adds to a dot: one row's x is the other's, a byte on
      for (int half = 0; half < 2; ++half) {
        highs[half][0] = _mm512_and_si512(half ? _mm512_srli_epi32(high, 8) : high, even);
        lows[half][0] = _mm512_and_si512(half ? _mm512_srli_epi32(low, 8) : low, even);
        highs[half][1] = _mm512_slli_epi32(highs[half][0], 8);
        lows[half][1] = _mm512_slli_epi32(lows[half][0], 8);
        zeros[half] = dot(_mm512_set1_epi8(static_cast<char>(w4_zero_point(8))), highs[half][0], lows[half][0]);
      }
      for_eight([&](auto g) __attribute__((always_inline)) {
        const std::uint8_t* const c = codes + g * 64;
        prefetch(c);
        prefetch(c + w4_fragment_bytes);
        const __m512i u[2] = {load_raw<__m512i>(c), load_raw<__m512i>(c + w4_fragment_bytes)};
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r) {
          const __m512i first = _mm512_sub_epi32(dot(u[0], highs[0][r], lows[0][r]), zeros[0]),
                        second = _mm512_sub_epi32(dot(u[1], highs[1][r], lows[1][r]), zeros[1]);
          if (Split) {
            add(g + 8 * r, first, s.row(g + 8 * r));
            add(g + 8 * r, second, s.row(g + 8 * r, 1));
          } else {
            add(g + 8 * r, _mm512_add_epi32(first, second), s.row(g + 8 * r));
          }
        }
      });
    }
  }
  F32 lanes_of[tile_n];
  for_eight([&](auto g) __attribute__((always_inline)) {
    lanes_of[g] = (F32)rows[g];
    lanes_of[g + 8] = (F32)rows[g + 8];
  });
  return sums(lanes_of) + offsets;
}

}  // namespace
}  // namespace rooftile::cpu::ROOFTILE_ISA
