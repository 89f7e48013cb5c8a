// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 4 or 8 bits; gated: the rows of W are [gate | up], y =
// activation(gate) * up + residual.
//   x [M, K]   y, residual [M, N or N / 2]   bias [N]   W in tiles of 16 n x 64 k (core/w4_layout.h)
//
// x is permuted into the codes' order once a call, and codes are decoded into registers (M = 1) or into L1 (M > 1):
// w4_tile.h, product.h. With VNNI one row of 16-bit floats is multiplied in integers: integer_row.h. With AVX512-BF16
// or AMX many rows of bf16 are multiplied by weights rounded to bf16: bf16_rows.h, amx_rows.h.
#include <algorithm>
#include <cstddef>

#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/activation.h"
#include "cpu/simd/product.h"
#include "cpu/simd/w4_tile.h"
#ifdef ROOFTILE_VNNI
#include "cpu/simd/integer_row.h"
#endif
#if defined(ROOFTILE_AMX)
#include "cpu/simd/amx_rows.h"
#elif defined(ROOFTILE_BF16)
#include "cpu/simd/bf16_rows.h"
#endif

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

// ---- x in the codes' order ----------------------------------------------------------------------

template <int bits>
void to_code_order(const float* x, std::int64_t blocks, float* to) {
#ifdef ROOFTILE_AVX512
  I32 half;  // index within 32 positions of k
  for (int lane = 0; lane < lanes; ++lane) half[lane] = k_of<8>(0, lane);
  // Even lanes of an index take the first of two words, odd lanes the second. Lanes 4 t and 4 t + 1 hold words 0 and 1,
  // lanes 4 t + 2 and 4 t + 3 words 2 and 3, so the blend takes every second pair of lanes from `high`.
  I32 first;
  for (int lane = 0; lane < lanes; ++lane) first[lane] = 2 * (lane / 4) + 16 * (lane % 2);
  for (std::int64_t b = 0; b < blocks; ++b, x += block_k, to += block_k) {
    const __m512 word0 = _mm512_loadu_ps(x), word1 = _mm512_loadu_ps(x + 16), word2 = _mm512_loadu_ps(x + 32),
                 word3 = _mm512_loadu_ps(x + 48);
    for (int q = 0; q < k_vecs; ++q) {
      if constexpr (bits == 8) {
        const __m512i index = (__m512i)(half + q % 2);
        _mm512_storeu_ps(to + q * lanes, q < 2 ? _mm512_permutex2var_ps(word0, index, word1)
                                               : _mm512_permutex2var_ps(word2, index, word3));
        continue;
      }
      const __m512i index = (__m512i)(first + (8 * (q / 2) + q % 2));
      const __m512 low = _mm512_permutex2var_ps(word0, index, word1),
                   high = _mm512_permutex2var_ps(word2, index, word3);
      _mm512_storeu_ps(to + q * lanes, _mm512_mask_blend_ps(0xcccc, low, high));
    }
  }
#else
  for (std::int64_t b = 0; b < blocks; ++b, x += block_k, to += block_k)
    for (int q = 0; q < k_vecs; ++q)
      for (int lane = 0; lane < lanes; ++lane) to[q * lanes + lane] = x[k_of<bits>(q, lane)];
#endif
}

// Row `m` of x as fp32, act-order applied, padded with zeros to whole blocks.
void natural_order(const TensorView& x, std::int64_t m, const std::int32_t* perm, std::int64_t padded, float* to) {
  with_element(x.dtype, [&](auto e) {
    const auto* p = x.as<decltype(e)>() + x.row_offset(m);
    const std::int64_t k = x.last(), stride = x.last_stride();
    if (perm) {
      for (std::int64_t i = 0; i < k; ++i) to[i] = to_float(p[perm[i] * stride]);
    } else {
      widen(p, stride, k, to);
    }
    std::fill(to + k, to + padded, 0.0f);
  });
}

// ---- one row of x -------------------------------------------------------------------------------

template <int bits, bool Split>
F32 one_row(const W4View& w, std::int64_t tile, const float* x) {
  Accumulator rows[tile_n];
  TileScales scales;
  ScaleReader<Split> reader(w, tile);
  const std::int64_t whole = w.k / block_k;
  const float zero = zero_point(w);
  for (std::int64_t block = 0; block < whole; ++block) {
    const float* xb = x + block * block_k;
    const F32 x_vecs[k_vecs] = {load(xb), load(xb + lanes), load(xb + 2 * lanes), load(xb + 3 * lanes)};
    reader.load(block, scales);
    const std::uint8_t* codes = tile_codes(w, tile, block);
#pragma GCC unroll 8
    for (int g = 0; g < 8; ++g) {
      for (int i = 0; i < w4_tile_fragments(bits); ++i) prefetch(codes + i * w4_fragment_bytes + g * 64);
      F32 low[k_vecs], high[k_vecs];
      decode_rows<bits, Split>(codes, g, scales, zero, low, high);
      Accumulator low_row = rows[g], high_row = rows[g + 8];
#pragma GCC unroll 4
      for (int q = 0; q < k_vecs; ++q) {
        low_row.add(low[q], x_vecs[q]);
        high_row.add(high[q], x_vecs[q]);
      }
      rows[g] = low_row;
      rows[g + 8] = high_row;
    }
  }
  if (whole * block_k < w.k) {
    float last[tile_floats];
    decode_tile<bits, Split>(w, tile, whole, last);
    for (int row = 0; row < tile_n; ++row)
      for (int q = 0; q < k_vecs; ++q)
        rows[row].add(load(last + row * row_floats + q * lanes), load(x + whole * block_k + q * lanes));
  }
  F32 acc[tile_n];
  for (int row = 0; row < tile_n; ++row) acc[row] = rows[row].value();
  return sums(acc);
}

template <int bits, bool Split>
struct Weights {
  using Rows = Fp32Rows;
  const W4View& w;
  std::int64_t rows() const { return w.n; }
  void pack_row(const TensorView& x, std::int64_t m, std::int64_t padded, float* buffer, float* to) const {
    natural_order(x, m, w.perm, padded, buffer);
    to_code_order<bits>(buffer, padded / block_k, to);
  }
  void tile(std::int64_t tile, std::int64_t block, float* to) const { decode_tile<bits, Split>(w, tile, block, to); }
  F32 one_row(std::int64_t tile, const float* x) const {
    return rooftile::cpu::ROOFTILE_ISA::one_row<bits, Split>(w, tile, x);
  }
};

#ifdef ROOFTILE_VNNI
// The same for one row of x in integers.
template <int bits, bool Split>
struct IntegerWeights : Weights<bits, Split> {
  void pack_row(const TensorView& x, std::int64_t m, std::int64_t padded, float* buffer, float* to) const {
    Weights<bits, Split>::pack_row(x, m, padded, buffer, to);
    to_integers<bits>(padded / block_k, to);
  }
  F32 one_row(std::int64_t tile, const float* x) const { return integer_row<bits, Split>(this->w, tile, x); }
};

// Whether a product is taken in integers: one row of 16-bit floats of a size that integer_row.h is for.
bool takes_integers(const W4MatmulArgs& a) {
  if (a.batch_invariant || a.x.rows() != 1 || a.x.dtype == DType::f32) return false;
  const auto* const bits = a.x.as<std::uint16_t>() + a.x.row_offset(0);
  std::uint16_t largest = 0;  // bits of the largest |x|; NaN is above infinity
  const auto look_at = [&](std::int64_t stride) {
    for (std::int64_t i = 0; i < a.x.last(); ++i) largest = std::max<std::uint16_t>(largest, bits[i * stride] & 0x7fff);
  };
  a.x.last_stride() == 1 ? look_at(1) : look_at(a.x.last_stride());  // in vectors where it is 1
  if (a.x.dtype == DType::f16) return largest < 0x7c00;
  const float value = to_float(BFloat16{largest});
  return largest == 0 || (value >= least_largest && value <= most_largest);
}
#endif

#ifdef ROOFTILE_BF16
// The same for many rows of bf16.
template <int bits, bool Split>
struct RoundedWeights : Weights<bits, Split> {
#ifdef ROOFTILE_AMX
  using Rows = AmxRows;
#else
  using Rows = Bf16Rows;
#endif
};
#endif

template <template <int bits, bool Split> class Kind>
void multiply_by(const Parallel& parallel, const W4MatmulArgs& a) {
  const auto of = [&](const auto& weights) { multiply(parallel, a, a.w->k, weights); };
  if (a.w->bits == 4) {
    a.w->group == 32 ? of(Kind<4, true>{*a.w}) : of(Kind<4, false>{*a.w});
  } else {
    a.w->group == 32 ? of(Kind<8, true>{*a.w}) : of(Kind<8, false>{*a.w});
  }
}

}  // namespace

void w4a16_matmul(const Parallel& parallel, const W4MatmulArgs& a) {
#ifdef ROOFTILE_VNNI
  if (takes_integers(a)) return multiply_by<IntegerWeights>(parallel, a);
#endif
#ifdef ROOFTILE_BF16
  if (a.x.dtype == DType::bf16 && a.x.rows() >= least_bf16_rows && !a.batch_invariant)
    return multiply_by<RoundedWeights>(parallel, a);
#endif
  multiply_by<Weights>(parallel, a);
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
