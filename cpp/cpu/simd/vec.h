// SPDX-License-Identifier: Apache-2.0
// Vectors of 16 floats on every instruction set. The compiler splits a vector where registers are narrower. The order
// of every sum is the same everywhere, and so are the bits, fused multiply-adds aside. Include isa.h first.
#pragma once

#include <cstdint>
#include <cstring>

#include "core/half.h"

namespace rooftile::cpu::ROOFTILE_ISA {

inline constexpr int lanes = 16;
typedef float F32 __attribute__((vector_size(64)));
typedef std::int32_t I32 __attribute__((vector_size(64)));
typedef std::uint32_t U32 __attribute__((vector_size(64)));
typedef std::int16_t I16 __attribute__((vector_size(32)));
typedef std::uint16_t U16 __attribute__((vector_size(32)));
typedef std::uint8_t U8 __attribute__((vector_size(16)));
typedef std::int8_t I8 __attribute__((vector_size(16)));

#define ROOFTILE_INLINE static inline __attribute__((always_inline))

template <class V, class T>
ROOFTILE_INLINE V load_raw(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V, class T>
ROOFTILE_INLINE void store_raw(T* p, V v) {
  std::memcpy(p, &v, sizeof v);
}

// Between 8 and 32 bits. GCC 12 takes sixteen elements one by one where it is given both steps at once; it has
// instructions for each of the two by way of 16 bits.
#ifdef ROOFTILE_AVX512
ROOFTILE_INLINE I32 widen(I8 x) { return (I32)_mm512_cvtepi8_epi32((__m128i)x); }
ROOFTILE_INLINE I32 widen(U8 x) { return (I32)_mm512_cvtepu8_epi32((__m128i)x); }
ROOFTILE_INLINE I8 lowest_bytes(I32 x) { return (I8)_mm512_cvtepi32_epi8((__m512i)x); }
#else
ROOFTILE_INLINE I32 widen(I8 x) { return __builtin_convertvector(__builtin_convertvector(x, I16), I32); }
ROOFTILE_INLINE I32 widen(U8 x) { return __builtin_convertvector(__builtin_convertvector(x, U16), I32); }
ROOFTILE_INLINE I8 lowest_bytes(I32 x) { return __builtin_convertvector(__builtin_convertvector(x, I16), I8); }
#endif

ROOFTILE_INLINE F32 splat(float x) {
#ifdef ROOFTILE_AVX512
  return (F32)_mm512_set1_ps(x);
#else
  return x - F32{};  // keeps -0
#endif
}

// Compiled with -ffp-contract=fast: one fused instruction where the instruction set has one, else two.
ROOFTILE_INLINE F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }

// ---- vectors that a loop carries ----

// GCC 12 keeps a vector of two or more registers in memory, and moves it 16 bytes at a time, where it is live from one
// iteration of a loop to the next. Loops of products and of attention therefore carry Registers, as many as a vector
// has. Lanes do not meet, so the bits are the same.
#if defined(ROOFTILE_AVX512)
inline constexpr int register_lanes = 16;
#elif defined(ROOFTILE_ISA_AVX2)
inline constexpr int register_lanes = 8;
#else
inline constexpr int register_lanes = 4;
#endif
inline constexpr int registers = lanes / register_lanes;
typedef float Register __attribute__((vector_size(4 * register_lanes)));

class Accumulator {
 public:
  Accumulator() = default;
  [[gnu::always_inline]] explicit Accumulator(F32 v) { std::memcpy(part_, &v, sizeof v); }
  // += a * b, one rounding where the instruction set has fused multiply-adds
  [[gnu::always_inline]] void add(F32 a, F32 b) {
    Register x[registers], y[registers];
    std::memcpy(x, &a, sizeof a);
    std::memcpy(y, &b, sizeof b);
#pragma GCC unroll 4
    for (int i = 0; i < registers; ++i) part_[i] = x[i] * y[i] + part_[i];
  }
  [[gnu::always_inline]] F32 value() const { return load_raw<F32>(part_); }

 private:
  Register part_[registers] = {};
};

// GCC 12 compares lane by lane where a vector has several registers, and takes `mask ? a : b` so, too: these do it by
// registers. -1 in the lanes where holds(a, b), a comparison, is true, else 0.
template <class Holds>
ROOFTILE_INLINE I32 mask_where(F32 a, F32 b, const Holds& holds) {
#ifdef ROOFTILE_AVX512
  return holds(a, b);
#else
  Register x[registers], y[registers];
  std::memcpy(x, &a, sizeof a);
  std::memcpy(y, &b, sizeof b);
  decltype(holds(x[0], y[0])) masks[registers];
#pragma GCC unroll 4
  for (int i = 0; i < registers; ++i) masks[i] = holds(x[i], y[i]);
  return load_raw<I32>(masks);
#endif
}
ROOFTILE_INLINE I32 above(F32 a, F32 b) {
  return mask_where(a, b, [](auto x, auto y) { return x > y; });
}
ROOFTILE_INLINE I32 is_nan(F32 x) {
  return mask_where(x, x, [](auto a, auto b) { return a != b; });
}
// a in the lanes where mask is -1, b where it is 0.
ROOFTILE_INLINE F32 select(I32 mask, F32 a, F32 b) {
#ifdef ROOFTILE_AVX512
  return mask ? a : b;
#else
  return (F32)(((I32)a & mask) | ((I32)b & ~mask));
#endif
}

ROOFTILE_INLINE F32 vmax(F32 a, F32 b) {  // b where a is NaN
#ifdef ROOFTILE_AVX512
  return (F32)_mm512_max_ps((__m512)a, (__m512)b);
#else
  return select(above(a, b), a, b);
#endif
}

ROOFTILE_INLINE F32 clamp(F32 x, float low, float high) {  // NaN stays NaN
#ifdef ROOFTILE_AVX512
  return (F32)_mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), (__m512)x));
#else
  x = select(above(splat(low), x), splat(low), x);
  return select(above(x, splat(high)), splat(high), x);
#endif
}

ROOFTILE_INLINE F32 magnitude(F32 x) { return (F32)((I32)x & 0x7fffffff); }

// a in the lanes where the sign bit of `sign` is set (-0 too), b elsewhere.
ROOFTILE_INLINE F32 where_negative(F32 sign, F32 a, F32 b) { return select((I32)sign >> 31, a, b); }

// ---- 16 doubles, for long sums and for differences that cancel in float ----

typedef double F64 __attribute__((vector_size(64)));
typedef float F32x8 __attribute__((vector_size(32)));
struct Wide {
  F64 low, high;
};

ROOFTILE_INLINE Wide wide(F32 x) {
  F32x8 half[2];
  std::memcpy(half, &x, sizeof x);
  return {__builtin_convertvector(half[0], F64), __builtin_convertvector(half[1], F64)};
}
ROOFTILE_INLINE F32 narrow(Wide x) {
  const F32x8 half[2] = {__builtin_convertvector(x.low, F32x8), __builtin_convertvector(x.high, F32x8)};
  F32 y;
  std::memcpy(&y, half, sizeof y);
  return y;
}
ROOFTILE_INLINE Wide operator+(Wide a, Wide b) { return {a.low + b.low, a.high + b.high}; }
ROOFTILE_INLINE Wide operator-(Wide a, Wide b) { return {a.low - b.low, a.high - b.high}; }
ROOFTILE_INLINE Wide operator*(Wide a, Wide b) {
  return {a.low * b.low, a.high * b.high};
}  // exact for products of floats

// ---- loads and stores of sixteen elements, converting ----

ROOFTILE_INLINE F32 load(const float* p) { return load_raw<F32>(p); }
ROOFTILE_INLINE F32 load(const BFloat16* p) { return (F32)(__builtin_convertvector(load_raw<U16>(p), U32) << 16); }
ROOFTILE_INLINE F32 load(const Half* p) {
#if defined(ROOFTILE_AVX512)
  return (F32)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(ROOFTILE_F16C)
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  F32 v;
  const __m256 halves[2] = {_mm256_cvtph_ps(_mm_loadu_si128(q)), _mm256_cvtph_ps(_mm_loadu_si128(q + 1))};
  std::memcpy(&v, halves, sizeof v);
  return v;
#else
  float f[lanes];
  for (int i = 0; i < lanes; ++i) f[i] = to_float(p[i]);
  return load_raw<F32>(f);
#endif
}

ROOFTILE_INLINE void store(float* p, F32 v) { store_raw(p, v); }
ROOFTILE_INLINE void store(BFloat16* p, F32 v) {
  const U32 bits = (U32)v;
  const U32 rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  const U32 nan = (bits >> 16) | 0x40u;
  store_raw(p, __builtin_convertvector((U32)select(is_nan(v), (F32)nan, (F32)rounded), U16));
}
ROOFTILE_INLINE void store(Half* p, F32 v) {
#if defined(ROOFTILE_AVX512)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                      _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(ROOFTILE_F16C)
  __m256 halves[2];
  std::memcpy(halves, &v, sizeof v);
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, _mm256_cvtps_ph(halves[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  _mm_storeu_si128(q + 1, _mm256_cvtps_ph(halves[1], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  float f[lanes];
  store_raw(f, v);
  for (int i = 0; i < lanes; ++i) p[i] = from_float<Half>(f[i]);
#endif
}

// ---- E4M3 codes ----

// Exponent and mantissa (7 bits) are moved to those of an fp16, which is then 2^-8 times the value; this also holds for
// subnormals. The code 0x7f, NaN, gets the highest bit of fp16's exponent in addition.
ROOFTILE_INLINE F32 e4m3_values(I8 codes) {
  const U16 bits = (U16) __builtin_convertvector(codes, I16);
  const U16 nan = ((bits & 0x7f) + 1) & 0x80;
  Half h[lanes];
  store_raw(h, ((bits << 7) & 0xbf80) | (nan << 7));
  return load(h) * 256.0f;
}
// No intermediate result is a subnormal float: the caller may have set the CPU to flush those to zero.
ROOFTILE_INLINE I32 e4m3_codes(F32 x) {  // |x| at most 448; the upper bytes are not used
  const F32 size = magnitude(x);
  const U32 bits = (U32)size;
  const I32 normal = (I32)((bits + 0x7ffffu + ((bits >> 20) & 1u)) >> 20) - (120 << 3);
  const I32 subnormal = (I32)(size + 0x1p14f) - (I32)splat(0x1p14f);  // rounds to a multiple of 2^-9
  return (I32)select(above(splat(0x1p-6f), size), (F32)subnormal, (F32)normal) | (((I32)x >> 24) & 0x80);
}

// Loads and stores of the first n <= 16 elements. Other lanes are loaded as `fill` and are not stored.
template <class T>
ROOFTILE_INLINE F32 load_some(const T* p, int n, float fill = 0.0f) {
  if (n >= lanes) return load(p);
  float f[lanes];
  for (int i = 0; i < lanes; ++i) f[i] = i < n ? to_float(p[i]) : fill;
  return load_raw<F32>(f);
}
template <class T>
ROOFTILE_INLINE void store_some(T* p, F32 v, int n) {
  if (n >= lanes) return store(p, v);
  T f[lanes];
  store(f, v);
  std::memcpy(p, f, sizeof(T) * static_cast<std::size_t>(n));
}

// ---- reductions across lanes, in one fixed order ----

typedef float F32x4 __attribute__((vector_size(16)));
template <class Reduce>
ROOFTILE_INLINE F32x4 reduce_to_four(F32 v, const Reduce& reduce) {  // lanes i, i + 4, i + 8, i + 12 become lane i
  F32x4 part[4];
  std::memcpy(part, &v, sizeof v);
  return reduce(reduce(part[0], part[2]), reduce(part[1], part[3]));
}
template <class Reduce>
ROOFTILE_INLINE float reduce_lanes(F32 v, const Reduce& reduce) {  // by halving
  const F32x4 four = reduce_to_four(v, reduce);
  const F32x4 two = reduce(four, __builtin_shufflevector(four, four, 2, 3, 2, 3));
  return reduce(two, __builtin_shufflevector(two, two, 1, 1, 1, 1))[0];
}
ROOFTILE_INLINE float sum(F32 v) {
  return reduce_lanes(v, [](F32x4 a, F32x4 b) { return a + b; });
}
// sum() of sixteen vectors at once, in the same order; result lane i is of v[i].
ROOFTILE_INLINE F32 sums(const F32* v) {
#ifdef ROOFTILE_AVX512
  // Every step adds the upper half of each vector's remaining lanes to the lower half. The initial order of the vectors
  // makes the last step leave the results in order.
  __m512 x[lanes];
  for (int i = 0; i < lanes; ++i) x[i] = (__m512)v[4 * (i % 4) + i / 4];
  for (int i = 0; i < 8; ++i)
    x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x44),
                         _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xee));
  for (int i = 0; i < 4; ++i)
    x[i] = _mm512_add_ps(_mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0x88),
                         _mm512_shuffle_f32x4(x[2 * i], x[2 * i + 1], 0xdd));
  for (int i = 0; i < 2; ++i)
    x[i] =
        _mm512_add_ps(_mm512_shuffle_ps(x[2 * i], x[2 * i + 1], 0x44), _mm512_shuffle_ps(x[2 * i], x[2 * i + 1], 0xee));
  return (F32)_mm512_add_ps(_mm512_shuffle_ps(x[0], x[1], 0x88), _mm512_shuffle_ps(x[0], x[1], 0xdd));
#else
  // The same by four lanes: the first two steps within a vector, the last two for four vectors at once.
  float total[lanes];
  for (int i = 0; i < lanes; i += 4) {
    F32x4 four[4];
    for (int j = 0; j < 4; ++j) four[j] = reduce_to_four(v[i + j], [](F32x4 a, F32x4 b) { return a + b; });
    for (int j = 0; j < 2; ++j)
      four[j] = __builtin_shufflevector(four[2 * j], four[2 * j + 1], 0, 1, 4, 5) +
                __builtin_shufflevector(four[2 * j], four[2 * j + 1], 2, 3, 6, 7);
    store_raw(total + i, __builtin_shufflevector(four[0], four[1], 0, 2, 4, 6) +
                             __builtin_shufflevector(four[0], four[1], 1, 3, 5, 7));
  }
  return load(total);
#endif
}
ROOFTILE_INLINE double sum(Wide w) {
  const F64 v = w.low + w.high;
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
ROOFTILE_INLINE float max(F32 v) {
  return reduce_lanes(v, [](F32x4 a, F32x4 b) { return a > b ? a : b; });
}

// e^x: 0 at -inf and below -103.97, inf above 88.72, NaN at NaN; within 1 ulp of the true value elsewhere.
ROOFTILE_INLINE F32 exp(F32 x) {
  const F32 log2e = splat(1.44269504088896341f);
  const F32 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const F32 clipped = clamp(x, -104.0f, 89.0f);
  const F32 shifted = fma(clipped, log2e, magic);
  const F32 n = shifted - magic;
  // r = x - n ln 2, with ln 2 in two parts (Cody and Waite); then Cephes' polynomial of expf on |r| <= ln 2 / 2
  F32 r = fma(n, splat(-0.693359375f), clipped);
  r = fma(n, splat(2.12194440e-4f), r);
  F32 p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p * r, r, r) + 1.0f;
#ifdef ROOFTILE_AVX512
  return (F32)_mm512_scalef_ps((__m512)p, (__m512)n);
#else  // 2^n in two steps, so that subnormal results and 2^128 come out right
  const I32 k = (I32)shifted - (I32)magic;
  const I32 half = k >> 1;
  return p * (F32)((half + 127) << 23) * (F32)((k - half + 127) << 23);
#endif
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
