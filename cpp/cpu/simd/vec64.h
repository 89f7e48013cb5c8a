// SPDX-License-Identifier: Apache-2.0
// Eight doubles at a time, for the small ops: they wait for memory, so the wider arithmetic costs nothing there and
// every result is the exact one rounded once, however long the row. Include isa.h and vec.h first.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/half.h"

namespace rooftile::cpu::ROOFTILE_ISA {

inline constexpr int lanes64 = 8;
typedef double F64 __attribute__((vector_size(64)));
typedef std::int64_t I64 __attribute__((vector_size(64)));
typedef float F32x8 __attribute__((vector_size(32)));
typedef std::int32_t I32x8 __attribute__((vector_size(32)));
typedef std::uint32_t U32x8 __attribute__((vector_size(32)));
typedef std::uint16_t U16x8 __attribute__((vector_size(16)));

ROOFTILE_INLINE F64 splat64(double x) { return x - F64{}; }   // keeps -0

// ---- eight elements of an array, converting ----

ROOFTILE_INLINE F64 load64(const float* p) { return __builtin_convertvector(load_raw<F32x8>(p), F64); }
ROOFTILE_INLINE F64 load64(const BFloat16* p) {
  return __builtin_convertvector((F32x8)(__builtin_convertvector(load_raw<U16x8>(p), U32x8) << 16), F64);
}
ROOFTILE_INLINE F64 load64(const Half* p) {
#ifdef ROOFTILE_F16C
  return __builtin_convertvector((F32x8)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))), F64);
#else
  F64 v;
  for (int i = 0; i < lanes64; ++i) v[i] = to_float(p[i]);
  return v;
#endif
}

ROOFTILE_INLINE void store64(float* p, F64 v) { store_raw(p, __builtin_convertvector(v, F32x8)); }
ROOFTILE_INLINE void store64(BFloat16* p, F64 v) {
  const U32x8 bits = (U32x8)__builtin_convertvector(v, F32x8);
  const U32x8 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U32x8 nan = (bits >> 16) | 0x40u;
  const I32x8 is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  store_raw(p, __builtin_convertvector((U32x8)(is_nan ? (I32x8)nan : (I32x8)rounded), U16x8));
}
ROOFTILE_INLINE void store64(Half* p, F64 v) {
  const F32x8 f = __builtin_convertvector(v, F32x8);
#ifdef ROOFTILE_F16C
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm256_cvtps_ph((__m256)f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  for (int i = 0; i < lanes64; ++i) p[i] = from_float<Half>(f[i]);
#endif
}

// How many of the eight lanes of a piece are real: all of them, known at compile time, or the rest of a row.
struct Whole {};
struct Part {
  std::size_t count;   // 1..7
};
// body(offset, Whole or Part) over [0, n) in pieces of eight.
template <class Body>
ROOFTILE_INLINE void for_pieces(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + lanes64 <= n; i += lanes64) body(i, Whole{});
  if (i < n) body(i, Part{static_cast<std::size_t>(n - i)});
}

// The real lanes of a piece; the others are 0 and are not written.
template <class T>
ROOFTILE_INLINE F64 load64(const T* p, Whole) { return load64(p); }
template <class T>
ROOFTILE_INLINE F64 load64(const T* p, Part part) {
  T whole[lanes64] = {};
  std::memcpy(whole, p, sizeof(T) * part.count);
  return load64(whole);
}
template <class T>
ROOFTILE_INLINE void store64(T* p, F64 v, Whole) { store64(p, v); }
template <class T>
ROOFTILE_INLINE void store64(T* p, F64 v, Part part) {
  T whole[lanes64];
  store64(whole, v);
  std::memcpy(p, whole, sizeof(T) * part.count);
}
// v with 0 in the other lanes.
ROOFTILE_INLINE F64 only(F64 v, Whole) { return v; }
ROOFTILE_INLINE F64 only(F64 v, Part part) {
  for (std::size_t i = part.count; i < lanes64; ++i) v[i] = 0;
  return v;
}

// ---- lane by lane ----

ROOFTILE_INLINE F64 clamp(F64 x, double low, double high) {   // NaN stays NaN
#if defined(ROOFTILE_AVX512)
  return (F64)_mm512_min_pd(_mm512_set1_pd(high), _mm512_max_pd(_mm512_set1_pd(low), (__m512d)x));
#elif defined(ROOFTILE_F16C)
  __m256d half[2];
  std::memcpy(half, &x, sizeof x);
  for (__m256d& h : half) h = _mm256_min_pd(_mm256_set1_pd(high), _mm256_max_pd(_mm256_set1_pd(low), h));
  std::memcpy(&x, half, sizeof x);
  return x;
#else
  x = x < low ? splat64(low) : x;
  return x > high ? splat64(high) : x;
#endif
}

ROOFTILE_INLINE F64 magnitude(F64 x) { return (F64)((I64)x & 0x7fffffffffffffffll); }

// a in the lanes where `sign` is negative, b elsewhere.
ROOFTILE_INLINE F64 where_negative(F64 sign, F64 a, F64 b) {
  const I64 negative = (I64)sign >> 63;
  return (F64)(((I64)a & negative) | ((I64)b & ~negative));
}

// e^x to 1e-13: 0 and inf beyond double's range, NaN at NaN.
ROOFTILE_INLINE F64 exp64(F64 x) {
  const double magic = 6755399441055744.0;   // 1.5 * 2^52: adding it rounds to an integer
  const F64 clipped = clamp(x, -1400.0, 1400.0);
  const F64 shifted = clipped * 1.4426950408889634074 + magic;
  const F64 n = shifted - magic;
  const F64 r = (clipped - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;   // ln 2 in two parts
  F64 p = splat64(1.0 / 39916800);   // Taylor: |r| < 0.347
  p = p * r + 1.0 / 3628800;
  p = p * r + 1.0 / 362880;
  p = p * r + 1.0 / 40320;
  p = p * r + 1.0 / 5040;
  p = p * r + 1.0 / 720;
  p = p * r + 1.0 / 120;
  p = p * r + 1.0 / 24;
  p = p * r + 1.0 / 6;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  // 2^n in two steps, so that what leaves double's range does so as 0 or inf
  const I64 k = (I64)shifted - (I64)splat64(magic);
  const I64 half = k >> 1;
  return p * (F64)((half + 1023) << 52) * (F64)((k - half + 1023) << 52);
}

// ---- across lanes, in one fixed order ----

ROOFTILE_INLINE double sum(F64 v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

// The sum of term(offset, Whole or Part) over [0, n); term gives 0 in the lanes that are not real.
template <class Term>
ROOFTILE_INLINE double sum_over(std::int64_t n, const Term& term) {
  F64 part[4] = {};
  std::int64_t i = 0;
  for (; i + 4 * lanes64 <= n; i += 4 * lanes64) {
    part[0] += term(i, Whole{});
    part[1] += term(i + lanes64, Whole{});
    part[2] += term(i + 2 * lanes64, Whole{});
    part[3] += term(i + 3 * lanes64, Whole{});
  }
  for_pieces(n - i, [&](std::int64_t j, auto lanes) { part[0] += term(i + j, lanes); });
  return sum((part[0] + part[1]) + (part[2] + part[3]));
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
