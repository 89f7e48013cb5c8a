// SPDX-License-Identifier: Apache-2.0
// Scores of 32 tokens in codes.
//   S^T [32 tokens, 8 packed rows] = K [32 tokens, D] Q^T      K is the A operand, tokens are its rows
#pragma once

#include "kernels/decode/code_queries.cuh"

namespace rooftile::gpu {

// Loads N words of codes from shared memory with one instruction.
template <int N>
__device__ __forceinline__ void load_words(std::uint32_t (&to)[N], const unsigned char* from) {
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N == 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (N == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    to[0] = x.x, to[1] = x.y;
  } else {
    to[0] = *reinterpret_cast<const std::uint32_t*>(from);
  }
}

// Adds scores of 32 tokens in 8-bit codes, in units of code_scale: W words of every token and lane, from `from` on,
// times the query fragments from `first` on.
template <KvFormat F, int W, int N, int D>
__device__ __forceinline__ void qk_bytes(float (&s)[N][2][4], const unsigned char* const (&from)[4],
                                         const CodeQueries<F, D> (&q)[N], int first) {
  std::uint32_t row[4][W];  // (block of 8 tokens, word)
#pragma unroll
  for (int i = 0; i < 4; ++i) load_words(row[i], from[i]);
#pragma unroll
  for (int w = 0; w < W; ++w)
#pragma unroll
    for (int mt = 0; mt < 2; ++mt) {
      tile::FragmentA a;
      CodeKind<F>::decode(row[2 * mt][w], a.r[0], a.r[2]);
      CodeKind<F>::decode(row[2 * mt + 1][w], a.r[1], a.r[3]);
#pragma unroll
      for (int n = 0; n < N; ++n) tile::mma<tile::half>(s[n][mt], a, q[n].q[first + w]);
    }
}

// Scores of 32 tokens and N n-tiles of 8 packed rows. factor: per packed row, what a score in units of q_scale is
// multiplied by.
template <class T, KvFormat F, int D, int N>
__device__ __forceinline__ void qk_codes(float (&s)[N][2][4], const CodeTile<F, D>& x, const CodeQueries<F, D> (&q)[N],
                                         const float (&factor)[N][2], int lane) {
  using Kind = CodeKind<F>;
  const int g = lane / 4, t = lane % 4;
  // 4-bit codes: even and odd pairs have different code scales, so each has its own sums. 8-bit codes: `even` has all.
  float even[N][2][4] = {}, odd[N][2][4] = {};  // (n-tile, m-tile of 16 tokens, 4)
  if constexpr (Kind::has_zero_point && !is_kivi(F)) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (auto& tile : even[n])
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[i] = -q[n].zp_correction[i & 1];
  }
  if constexpr (!Kind::pairs) {
#pragma unroll
    for (int chunk = 0; chunk < D / 64; ++chunk)  // 64 channels: 16 bytes per lane and row
      qk_bytes<F, 4>(even,
                     {x.k + x.k_offset(g, 4 * chunk + t), x.k + x.k_offset(g + 8, 4 * chunk + t),
                      x.k + x.k_offset(g + 16, 4 * chunk + t), x.k + x.k_offset(g + 24, 4 * chunk + t)},
                     q, 4 * chunk);
    if constexpr (D % 64 != 0) {  // the last 32 channels
      const unsigned char* from = x.k + g * x.row_bytes + D / 64 * 64 + t * 8;
      qk_bytes<F, 2>(even, {from, from + 8 * x.row_bytes, from + 16 * x.row_bytes, from + 24 * x.row_bytes}, q,
                     D / 64 * 4);
    }
  } else {
    // Scales per channel: k = (u - 8) * scale + (min + 8 * scale), u being the code. The scales are multiplied into the
    // queries; the second term (zero_term) is the same for all tokens. The correction subtracts exactly what the codes
    // add: 8 * (scaled query) after rounding.
    // With one n-tile, registers suffice for separate sums of even and odd pairs, which halves the dependency chain of
    // MMAs. zero_term then needs one row only: row g for even pairs, row g + 8 of the same operand for odd pairs.
    constexpr int chains = N == 1 ? 2 : 1;
    float zp_correction[N][chains][4] = {}, zero_term[N][chains][4] = {};  // (n-tile, chain, 4)
    const GroupScale<T, F, D> group(x, lane);
    constexpr int W = D % 128 == 0  ? 4
                      : D % 64 == 0 ? 2
                                    : 1;  // a lane has D / 32 words of 8 codes of a row; loads W at once
#pragma unroll
    for (int chunk = 0; chunk < D / 32; chunk += W) {
      std::uint32_t row[4][W];  // (block of 8 tokens, word)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (W == 4) load_words(row[i], x.k + x.k_offset(g + 8 * i, (t * (D / 32) + chunk) / 4));
        else load_words(row[i], x.k + (g + 8 * i) * x.row_bytes + (t * (D / 32) + chunk) * 4);
      }
#pragma unroll
      for (int v = 0; v < W; ++v) {
        const int w = chunk + v, channel = t * (D / 4) + 8 * w;
        std::uint32_t scale[4] = {}, zero_value[4] = {};  // (pairs (r, r + 4))
        if constexpr (is_kivi(F)) {
          const uint4 scales = *reinterpret_cast<const uint4*>(x.k_scale() + channel);
          uint4 minima = {};
          if constexpr (has_min(F)) minima = *reinterpret_cast<const uint4*>(x.k_min() + channel);
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const std::uint32_t selector = r % 2 ? 0x7632 : 0x5410;
            scale[r] = group.f16(__byte_perm(word(scales, r / 2), word(scales, 2 + r / 2), selector));
            if constexpr (has_min(F))
              zero_value[r] =
                  tile::fma_f16x2(scale[r], 0x48004800u,
                                  group.f16(__byte_perm(word(minima, r / 2), word(minima, 2 + r / 2), selector)));
          }
        }
        std::uint32_t code[4][4];  // (block of 8 tokens, pair)
#pragma unroll
        for (int i = 0; i < 4; ++i) Kind::decode(row[i][v], code[i]);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int h = 0; h < 2; ++h) {  // pairs h and h + 2
            tile::FragmentB b = q[n].q[2 * w + h];
            if constexpr (has_min(F) && chains == 2)
              tile::mma<tile::half>(zero_term[n][h], {{zero_value[0], zero_value[1], zero_value[2], zero_value[3]}}, b);
            else if constexpr (has_min(F))
              tile::mma<tile::half>(zero_term[n][0],
                                    {{zero_value[h], zero_value[h], zero_value[h + 2], zero_value[h + 2]}}, b);
            if constexpr (is_kivi(F)) {
              b = {{tile::mul_f16x2(b.r[0], scale[h]), tile::mul_f16x2(b.r[1], scale[h + 2])}};
              constexpr std::uint32_t minus_zero_point = 0xc800c800u;
              tile::mma<tile::half>(zp_correction[n][h % chains],
                                    {{minus_zero_point, minus_zero_point, minus_zero_point, minus_zero_point}}, b);
            }
#pragma unroll
            for (int mt = 0; mt < 2; ++mt)
              tile::mma<tile::half>(
                  h == 0 ? even[n][mt] : odd[n][mt],
                  {{code[2 * mt][h], code[2 * mt + 1][h], code[2 * mt][h + 2], code[2 * mt + 1][h + 2]}}, b);
          }
      }
    }
    if constexpr (is_kivi(F)) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float even_factor[2], odd_factor[2], base[2];  // (packed row 2t + j)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float group_factor = factor[n][j] * group.scale;
          even_factor[j] = group_factor * (1.0f / Kind::code_scale);
          odd_factor[j] = group_factor * (1.0f / Kind::odd_code_scale);
          base[j] = zp_correction[n][0][j] + zero_term[n][0][j];
          if constexpr (chains == 2) base[j] += zp_correction[n][1][j] + zero_term[n][1][2 + j];
          base[j] *= group_factor;
        }
#pragma unroll
        for (int mt = 0; mt < 2; ++mt)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            s[n][mt][i] =
                __fmaf_rn(even[n][mt][i], even_factor[i & 1], __fmaf_rn(odd[n][mt][i], odd_factor[i & 1], base[i & 1]));
      }
    }
  }
  if constexpr (!is_kivi(F)) {
#pragma unroll
    for (int mt = 0; mt < 2; ++mt)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = stored_scale<T>(x.second_scale()[16 * mt + 8 * (i / 2) + g]) * (1.0f / Kind::code_scale);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const float sum = Kind::pairs
                                ? __fmaf_rn(odd[n][mt][i], Kind::code_scale / Kind::odd_code_scale, even[n][mt][i])
                                : even[n][mt][i];
          s[n][mt][i] = sum * (scale * factor[n][i & 1]);
        }
      }
  }
}

}  // namespace rooftile::gpu
