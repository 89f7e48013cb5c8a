// SPDX-License-Identifier: Apache-2.0
// Matrix products of bf16 with vdpbf16ps, which adds two products, exact, to each lane's fp32: pairs of k, 32 bits.
//   c [m, n] = a [m, k] b [k, n]   a in memory as (row, pair)   b as (pair, n)   c in fp32
// Lanes are columns n; a pair of a is broadcast to all of them. One chain of pairs an output, so a row's bits do not
// depend on the rows next to it. Subnormal operands and results count as 0. Include isa.h and vec.h first.
#pragma once

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

// Two vectors, of even and of odd k -> sixteen pairs, rounded to bf16 (to nearest, ties to even).
ROOFTILE_INLINE U32 to_pairs(F32 even, F32 odd) {
  U16 halves[2];  // the sixteen of `even`, the sixteen of `odd`
  const __m512bh both = _mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
  std::memcpy(halves, &both, sizeof both);
  return __builtin_convertvector(halves[0], U32) | __builtin_convertvector(halves[1], U32) << 16;
}
// The same of neighbours: `count` floats, a multiple of sixteen.
ROOFTILE_INLINE void neighbours_to_pairs(const float* x, int count, std::uint32_t* to) {
  for (int i = 0; i < count; i += lanes) store_raw(to + i / 2, _mm512_cvtneps_pbh((__m512)load(x + i)));
}

// c (Rows, 16 Vecs columns) = or += a b over `pairs` pairs. *_row: words or floats from one row to the next.
template <int Rows, int Vecs>
ROOFTILE_INLINE void multiply_pairs(const std::uint32_t* a, std::int64_t a_row, const std::uint32_t* b,
                                    std::int64_t b_row, int pairs, float* c, std::int64_t c_row, bool add) {
  __m512 r[Rows][Vecs];  // (row, vector of 16 columns)
#pragma GCC unroll 28
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < Vecs; ++n) r[m][n] = add ? (__m512)load(c + m * c_row + n * lanes) : __m512{};
  for (int p = 0; p < pairs; ++p) {
    __m512bh x[Vecs];
#pragma GCC unroll 4
    for (int n = 0; n < Vecs; ++n) x[n] = (__m512bh)load_raw<__m512i>(b + p * b_row + n * lanes);
#pragma GCC unroll 28
    for (int m = 0; m < Rows; ++m) {
      const __m512bh y = (__m512bh)_mm512_set1_epi32(load_raw<int>(a + m * a_row + p));
#pragma GCC unroll 4
      for (int n = 0; n < Vecs; ++n) r[m][n] = _mm512_dpbf16_ps(r[m][n], x[n], y);
    }
  }
#pragma GCC unroll 28
  for (int m = 0; m < Rows; ++m)
#pragma GCC unroll 4
    for (int n = 0; n < Vecs; ++n) store(c + m * c_row + n * lanes, (F32)r[m][n]);
}

template <int Rows>
void multiply_pairs_rows(const std::uint32_t* a, std::int64_t a_row, const std::uint32_t* b, std::int64_t b_row,
                         int pairs, float* c, std::int64_t c_row, int rows, int columns, bool add) {
  if constexpr (Rows > 1)
    if (rows < Rows) return multiply_pairs_rows<Rows - 1>(a, a_row, b, b_row, pairs, c, c_row, rows, columns, add);
  int n = 0;
  for (; n + 4 * lanes <= columns; n += 4 * lanes)
    multiply_pairs<Rows, 4>(a, a_row, b + n, b_row, pairs, c + n, c_row, add);
  for (; n < columns; n += lanes) multiply_pairs<Rows, 1>(a, a_row, b + n, b_row, pairs, c + n, c_row, add);
}
// The same for any number of rows, and columns a multiple of sixteen.
inline void multiply_pairs(const std::uint32_t* a, std::int64_t a_row, const std::uint32_t* b, std::int64_t b_row,
                           int pairs, float* c, std::int64_t c_row, int rows, int columns, bool add) {
  constexpr int step = 6;  // with four vectors of columns: 24 accumulators of 32 registers
  for (int m = 0; m < rows; m += step)
    multiply_pairs_rows<step>(a + m * a_row, a_row, b, b_row, pairs, c + m * c_row, c_row,
                              rows - m < step ? rows - m : step, columns, add);
}

}  // namespace
}  // namespace rooftile::cpu::ROOFTILE_ISA
