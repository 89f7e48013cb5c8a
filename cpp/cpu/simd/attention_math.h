// SPDX-License-Identifier: Apache-2.0
// The register-blocked loops of attention on the CPU: q k, p v, softmax, epilogue. Include isa.h, vec.h and kv_tile.h
// first.
//
// Each result is one chain of fused multiply-adds. A dot product adds channels in order, a weighted sum adds tokens in
// order. The bits of a row therefore do not depend on the rows that share its register block.
#pragma once

#include <cmath>
#include <limits>
#include <type_traits>

#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/simd/kv_tile.h"
#include "cpu/simd/vec.h"

namespace rooftile::cpu::ROOFTILE_ISA {

inline constexpr float minus_infinity = -std::numeric_limits<float>::infinity();
inline constexpr int row_block = 4;  // query rows that share each load of a key or value
inline constexpr int chunk = 128;    // tokens of a KV split of decode attention

// The tokens [first, last) a row sees, relative to its chunk.
struct Range {
  int first = 0, last = 0;
  bool empty() const { return first >= last; }
};

// to [width] = n elements of any dtype and stride as fp32, then zeros.
ROOFTILE_INLINE void gather_row(const TensorView& t, std::int64_t offset, std::int64_t stride, int n, int width,
                                float* to) {
  with_element(t.dtype, [&](auto e) {
    const auto* from = t.as<decltype(e)>() + offset;
    int i = 0;
    if (stride == 1)
      for (; i + lanes <= n; i += lanes) store(to + i, load(from + i));
    for (; i < n; ++i) to[i] = to_float(from[i * stride]);
  });
  for (int i = n; i < width; ++i) to[i] = 0;
}
// The inverse: from [n] as fp32 to n elements of any dtype and stride, rounded to nearest.
ROOFTILE_INLINE void scatter_row(const float* from, int n, const TensorView& t, std::int64_t offset,
                                 std::int64_t stride) {
  with_element(t.dtype, [&](auto e) {
    using E = decltype(e);
    E* to = t.as<E>() + offset;
    int i = 0;
    if (stride == 1)
      for (; i + lanes <= n; i += lanes) store(to + i, load(from + i));
    for (; i < n; ++i) to[i * stride] = from_float<E>(from[i]);
  });
}

// Calls f with the number of rows, 1 to row_block, as a compile-time constant.
template <class F>
ROOFTILE_INLINE void with_rows(int rows, const F& f) {
  switch (rows) {
    case 1:
      return f(std::integral_constant<int, 1>{});
    case 2:
      return f(std::integral_constant<int, 2>{});
    case 3:
      return f(std::integral_constant<int, 3>{});
    default:
      return f(std::integral_constant<int, 4>{});
  }
}

// with_element, always inlined. The shared template is compiled for the baseline instruction set, which cannot inline
// the functions of this file.
template <class F>
ROOFTILE_INLINE void with_token_type(DType t, const F& f) {
  switch (t) {
    case DType::f16:
      return f(Half{});
    case DType::bf16:
      return f(BFloat16{});
    default:
      return f(float{});
  }
}

// min += zero_point * scale: the value of code 8, so that u * scale + min = (u - 8) * scale + min_term.
ROOFTILE_INLINE void to_zero_point(const float* scale, float* min, int n) {
  for (int i = 0; i < n; i += lanes) store(min + i, fma(load(scale + i), splat(affine_zero_point), load(min + i)));
}

// ---- several horizontal sums: out[i] = sum of the 16 lanes of v[i], added in one fixed tree ----

#ifdef ROOFTILE_AVX512
inline constexpr int sums_at_once = 16;
ROOFTILE_INLINE void sum_each(const F32 (&v)[sums_at_once], float* out) { store(out, sums(v)); }
#else
inline constexpr int sums_at_once = 4;
ROOFTILE_INLINE void sum_each(const F32 (&v)[sums_at_once], float* out) {
#pragma GCC unroll 4
  for (int i = 0; i < sums_at_once; ++i) out[i] = sum(v[i]);
}
#endif

// s[r][t] = dot(q[r], k[t]) for the tokens t of [first, last) of a tile. q [rows][width], k [tile][width], s
// [rows][s_stride], rows <= row_block. Tokens are computed in whole blocks, so s is also written around [first, last).
template <class E, int rows>
ROOFTILE_INLINE void dot_rows(const float* q, int width, const TokenRows& k, int first, int last, float* s,
                              int s_stride) {
  constexpr int tokens = rows == 3 ? sums_at_once / 4 : sums_at_once / rows;
  for (int t = first / tokens * tokens; t < last; t += tokens) {
    Accumulator acc[sums_at_once];
    const E* key[tokens];
#pragma GCC unroll 16
    for (int j = 0; j < tokens; ++j) key[j] = reinterpret_cast<const E*>(k.token[t + j]);
    for (int d = 0; d < width; d += lanes) {
      F32 kv[tokens];
#pragma GCC unroll 16
      for (int j = 0; j < tokens; ++j) kv[j] = load(key[j] + d);
#pragma GCC unroll 4
      for (int r = 0; r < rows; ++r) {
        const F32 qv = load(q + r * width + d);
#pragma GCC unroll 16
        for (int j = 0; j < tokens; ++j) acc[r * tokens + j].add(qv, kv[j]);
      }
    }
    F32 vectors[sums_at_once];
#pragma GCC unroll 16
    for (int i = 0; i < sums_at_once; ++i) vectors[i] = acc[i].value();
    float sums[sums_at_once];
    sum_each(vectors, sums);
    for (int r = 0; r < rows; ++r) std::memcpy(s + r * s_stride + t, sums + r * tokens, sizeof(float) * tokens);
  }
}

// acc[r][d ..] += sum of p[r][t] * v[t][d ..] over the tokens t of [first, last), `vectors` * 16 channels from d on. p
// [rows][p_stride], v [tile][width], acc [rows][width].
template <class E, int rows, int vectors>
ROOFTILE_INLINE void add_values_block(const float* p, int p_stride, const TokenRows& v, int first, int last, float* acc,
                                      int width, int d) {
  Accumulator sum[rows][vectors];
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) sum[r][i] = Accumulator(load(acc + r * width + d + i * lanes));
  for (int t = first; t < last; ++t) {
    const E* value = reinterpret_cast<const E*>(v.token[t]) + d;
    F32 x[vectors];
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) x[i] = load(value + i * lanes);
#pragma GCC unroll 4
    for (int r = 0; r < rows; ++r) {
      const F32 weight = splat(p[r * p_stride + t]);
#pragma GCC unroll 4
      for (int i = 0; i < vectors; ++i) sum[r][i].add(weight, x[i]);
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) store(acc + r * width + d + i * lanes, sum[r][i].value());
}
// The same for all channels.
template <class E, int rows>
ROOFTILE_INLINE void add_values(const float* p, int p_stride, const TokenRows& v, int first, int last, float* acc,
                                int width) {
#ifdef ROOFTILE_AVX512
  constexpr int vectors = 4;
#else
  constexpr int vectors = 1;
#endif
  int d = 0;
  for (; d + vectors * lanes <= width; d += vectors * lanes)
    add_values_block<E, rows, vectors>(p, p_stride, v, first, last, acc, width, d);
  for (; d < width; d += lanes) add_values_block<E, rows, 1>(p, p_stride, v, first, last, acc, width, d);
}

// ---- c [m, n] = a [m, depth] b [depth, n], added to c where `add`; row-major, n a multiple of 16 ----

#ifdef ROOFTILE_AVX512
inline constexpr int gemm_rows = 6, gemm_vectors = 4;  // accumulators: 24 of 32 registers
#else
inline constexpr int gemm_rows = 2, gemm_vectors = 2;  // four vectors of 16 floats: 8 of AVX2's 16 registers
#endif

template <int rows, int vectors>
ROOFTILE_INLINE void gemm_block(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int depth,
                                bool add) {
  Accumulator sum[rows][vectors];
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) sum[r][i] = Accumulator(add ? load(c + r * ldc + i * lanes) : F32{});
  for (int k = 0; k < depth; ++k) {
    F32 x[vectors];
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) x[i] = load(b + k * ldb + i * lanes);
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) {
      const F32 y = splat(a[r * lda + k]);
#pragma GCC unroll 4
      for (int i = 0; i < vectors; ++i) sum[r][i].add(y, x[i]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < rows; ++r)
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) store(c + r * ldc + i * lanes, sum[r][i].value());
}
template <int rows>
ROOFTILE_INLINE void gemm_strip(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int n, int depth,
                                bool add) {
  int j = 0;
  for (; j + gemm_vectors * lanes <= n; j += gemm_vectors * lanes)
    gemm_block<rows, gemm_vectors>(a, lda, b + j, ldb, c + j, ldc, depth, add);
  for (; j < n; j += lanes) gemm_block<rows, 1>(a, lda, b + j, ldb, c + j, ldc, depth, add);
}
static inline void gemm(const float* a, int lda, const float* b, int ldb, float* c, int ldc, int m, int n, int depth,
                        bool add) {
  int i = 0;
  for (; i + gemm_rows <= m; i += gemm_rows)
    gemm_strip<gemm_rows>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, n, depth, add);
  for (; i + 2 <= m; i += 2) gemm_strip<2>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, n, depth, add);
  for (; i < m; ++i) gemm_strip<1>(a + i * lda, lda, b, ldb, c + i * ldc, ldc, n, depth, add);
}

// ---- logits and softmax ----

// tanh x: 1 - 2 / (e^2x + 1) for |x| >= 1; below, where that cancels, Lambert's continued fraction.
ROOFTILE_INLINE F32 tanh(F32 x) {
  const F32 z = x * x;
  const F32 over = x * fma(fma(fma(z, splat(1.0f), splat(378.0f)), z, splat(17325.0f)), z, splat(135135.0f));
  const F32 under = fma(fma(fma(z, splat(28.0f), splat(3150.0f)), z, splat(62370.0f)), z, splat(135135.0f));
  const F32 near = over / under;
  const F32 far = 1.0f - 2.0f / (exp(x + x) + 1.0f);
  return select(above(splat(1.0f), z), near, far);
}
ROOFTILE_INLINE F32 soft_cap(F32 s, float cap) { return tanh(s / cap) * cap; }

ROOFTILE_INLINE F32 lane_index() { return F32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
// x where first <= i + lane < last, else `other`.
ROOFTILE_INLINE F32 select_range(F32 x, int i, int first, int last, F32 other) {
  const F32 at = lane_index() + static_cast<float>(i);
  const I32 outside = above(splat(static_cast<float>(first)), at);
  return select(above(splat(static_cast<float>(last)), at) & ~outside, x, other);
}

// The online-softmax state of one query row: the largest logit so far and the sum of e^(logit - largest).
struct SoftmaxState {
  float top = minus_infinity, sum = 0;
};

// Replaces s[first .. last) of one row by e^(s - top), and the other lanes of the vectors it touches by 0. top is the
// larger of at_least and the largest logit. Returns top and the sum.
ROOFTILE_INLINE SoftmaxState exponentiate(float* s, int first, int last, float at_least) {
  const F32 none = splat(minus_infinity);
  const int begin = first / lanes * lanes;
  F32 largest = none;
  for (int i = begin; i < last; i += lanes) {
    F32 x = load(s + i);
    if (i < first || i + lanes > last) {
      x = select_range(x, i, first, last, none);
      store(s + i, x);
    }
    largest = vmax(x, largest);
  }
  SoftmaxState state{max(largest), 0};
  state.top = at_least > state.top ? at_least : state.top;
  const F32 shift = splat(state.top == minus_infinity ? 0.0f : state.top);
  F32 total{};
  for (int i = begin; i < last; i += lanes) {
    const F32 e = exp(load(s + i) - shift);
    store(s + i, e);
    total += e;
  }
  state.sum = rooftile::cpu::ROOFTILE_ISA::sum(total);
  return state;
}

// The epilogue of one row: out [dim] = acc [width] / sum, lse = top + log(sum). The attention sink of a query that is
// not padding (`real`) is part of the sum. A row that saw no token gets out 0 and lse -inf.
ROOFTILE_INLINE void row_epilogue(const LogitParams& p, bool real, std::int64_t head, SoftmaxState state, float* acc,
                                  int dim, int width, const TensorView& out, std::int64_t out_offset,
                                  const TensorView& lse, std::int64_t lse_offset) {
  const bool saw = !(state.sum == 0);
  float kept = 1.0f;
  if (p.sinks && real) {
    const float sink = read(*p.sinks, head * p.sinks->stride[0]);
    const float top = state.top > sink ? state.top : sink;
    if (top != minus_infinity) {
      kept = ::expf(state.top - top);
      state = {top, state.sum * kept + ::expf(sink - top)};
    }
  }
  for (int d = 0; d < width; d += lanes) store(acc + d, saw ? load(acc + d) * kept / state.sum : F32{});
  scatter_row(acc, dim, out, out_offset, out.last_stride());
  if (lse.given()) lse.as<float>()[lse_offset] = state.sum == 0 ? minus_infinity : state.top + ::logf(state.sum);
}

// ---- a thread's arrays: consecutive pieces of its scratch memory, each aligned to a cache line ----

ROOFTILE_INLINE std::size_t aligned(std::size_t bytes) { return (bytes + 63) / 64 * 64; }
struct BumpAllocator {
  std::byte* at;
  template <class T>
  void operator()(T*& array, std::int64_t count) {
    array = reinterpret_cast<T*>(at);
    at += aligned(static_cast<std::size_t>(count) * sizeof(T));
  }
};

}  // namespace rooftile::cpu::ROOFTILE_ISA
