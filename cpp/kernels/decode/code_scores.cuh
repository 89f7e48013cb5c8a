// SPDX-License-Identifier: Apache-2.0
// Scores of a KV tile of 32 tokens in codes, and the queries that they take.
//   S^T [32 tokens, 8 N packed rows] = K [32 tokens, D] Q^T    K is the A operand, tokens are its rows
#pragma once

#include <cute/tensor.hpp>

#include "kernels/decode/code_tile.cuh"
#include "kernels/decode/group_scale.cuh"
#include "tile/copy.cuh"
#include "tile/mma.cuh"

namespace rooftile::gpu {

__device__ __forceinline__ std::uint32_t word(const uint4& x, int i) {
  return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

// largest_magnitude: over pairs of elements, ignoring NaN. scale_to_f16: multiplies each element by a power of two and
// converts it to fp16.
template <class T, int N>
__device__ __forceinline__ float largest_magnitude(const std::uint32_t (&x)[N]) {
  using Pair = std::conditional_t<std::is_same_v<T, tile::half>, __half2, __nv_bfloat162>;
  Pair top = __habs2(tile::bit_cast<Pair>(x[0]));
#pragma unroll
  for (int i = 1; i < N; ++i) top = __hmax2(top, __habs2(tile::bit_cast<Pair>(x[i])));
  const float2 two = tile::unpack<T>(tile::bit_cast<std::uint32_t>(top));
  return fmaxf(two.x, two.y);
}
template <class T, int N>
__device__ __forceinline__ void scale_to_f16(std::uint32_t (&x)[N], float power) {
  if constexpr (std::is_same_v<T, tile::half>) {
    // At most one rounding: a power of two beyond fp16's range is large, and the second factor loses nothing.
    const bool large = power > 0x1p15f;
    const std::uint32_t by = tile::pack<tile::half>(large ? 0x1p15f : power, large ? 0x1p15f : power);
#pragma unroll
    for (std::uint32_t& pair : x) pair = tile::mul_f16x2(pair, by);
    if (!large) return;
    const std::uint32_t then = tile::pack<tile::half>(power * 0x1p-15f, power * 0x1p-15f);
#pragma unroll
    for (std::uint32_t& pair : x) pair = tile::mul_f16x2(pair, then);
  } else {
#pragma unroll
    for (std::uint32_t& pair : x) {
      const float2 two = tile::unpack<T>(pair);
      pair = tile::pack<tile::half>(two.x * power, two.y * power);
    }
  }
}

// The packed query rows as B operands in the order of the codes, divided by a power of two that keeps them below 1.
template <KvFormat F, int D>
struct CodeQueries {
  tile::FragmentB q[D / 16];  // (D / 16 k-tiles)
  float q_scale[2];           // (packed rows 2t, 2t + 1): that power of two
  float zp_correction[2];     // (packed rows 2t, 2t + 1): zero_point * code_one * (sum of q); one K scale a token

  // sQ: (8 N, D), as copy_queries_async left the packed rows. n: the n-tile.
  template <class T, class Tensor>
  __device__ __forceinline__ void load(const Tensor& sQ, int n, int lane) {
    constexpr int lane_channels = D / 4;
    // The channels that match the lane's codes. 4 bits: a quarter of the row, contiguous. 8 bits: 16 channels of every
    // 64, and 8 channels of the last 32.
    std::uint32_t x[lane_channels / 2];  // (lane_channels / 2 pairs)
#pragma unroll
    for (int i = 0; i < lane_channels / 8; ++i) {
      const int d = code_bits(F) == 4 ? lane % 4 * lane_channels + 8 * i
                    : i / 2 < D / 64  ? i / 2 * 64 + lane % 4 * 16 + i % 2 * 8
                                      : D / 64 * 64 + lane % 4 * 8;
      const uint4 chunk = tile::load_vec_at<uint4>(&sQ(n * mma_n + lane / 4, d));
#pragma unroll
      for (int j = 0; j < 4; ++j) x[4 * i + j] = word(chunk, j);
    }
    float top = largest_magnitude<T>(x);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    // own_scale: the power of two above the largest magnitude, 1 for zeros or infinities. The biased exponents of x and
    // 1 / x add up to 254.
    const std::uint32_t exponent = __float_as_uint(top) >> 23;
    const bool ordinary = exponent > 0 && exponent < 253;
    const float own_scale = ordinary ? __uint_as_float((exponent + 1) << 23) : 1.0f,
                inverse = ordinary ? __uint_as_float((253 - exponent) << 23) : 1.0f;
    scale_to_f16<T>(x, inverse);
#pragma unroll
    for (int ks = 0; ks < D / 16; ++ks)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // 4 bits: pairs 0 and 2, or 1 and 3, of eight channels, which are two k-tiles. 8 bits: word ks has neighbours.
        const int at = ks / 2 * 4 + half;
        q[ks].r[half] = code_bits(F) == 4 ? tile::uint4_pair(x[at], x[at + 2], 2 * half + ks % 2) : x[2 * ks + half];
      }
#pragma unroll
    for (int j = 0; j < 2; ++j) q_scale[j] = __shfl_sync(0xffffffffu, own_scale, (lane % 4 * 2 + j) * 4);
    if constexpr (KvTraits<F>::has_zero_point && !is_kivi(F)) {
      float sum = 0.0f;  // of the rounded values that the tensor cores read
#pragma unroll
      for (const tile::FragmentB& fragment : q)
#pragma unroll
        for (const std::uint32_t pair : fragment.r) {
          const float2 two = tile::unpack<tile::half>(pair);
          sum += two.x + two.y;
        }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
#pragma unroll
      for (int j = 0; j < 2; ++j)
        zp_correction[j] =
            __shfl_sync(0xffffffffu, sum, (lane % 4 * 2 + j) * 4) * (KvTraits<F>::zero_point * tile::code_one);
    }
  }
};

// Loads N words of codes from shared memory with one instruction.
template <int N>
__device__ __forceinline__ void load_words(std::uint32_t (&to)[N], const unsigned char* from) {
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N == 4) {
    const uint4 x = tile::load_vec_at<uint4>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (N == 2) {
    const uint2 x = tile::load_vec_at<uint2>(from);
    to[0] = x.x, to[1] = x.y;
  } else {
    to[0] = tile::load_vec_at<std::uint32_t>(from);
  }
}

// A operands of 32 tokens from word w of each, a: (k-tile, m-tile of 16 tokens).
template <KvFormat F, int W>
__device__ __forceinline__ void dequant_word(tile::FragmentA (&a)[KvTraits<F>::word_k_tiles][2],
                                             const std::uint32_t (&row)[4][W], int w) {
  KvTraits<F>::dequant_k({row[0][w], row[1][w], row[2][w], row[3][w]}, a);
}

// Adds the products of word w of 32 tokens in 8-bit codes with the query fragments b, one an n-tile.
template <KvFormat F, int W, int N>
__device__ __forceinline__ void qk_word(float (&s)[N][2][4], const std::uint32_t (&row)[4][W], int w,
                                        const tile::FragmentB (&b)[N]) {
  tile::FragmentA a[KvTraits<F>::word_k_tiles][2];  // (1 k-tile, m-tile of 16 tokens)
  dequant_word<F>(a, row, w);
#pragma unroll
  for (int mt = 0; mt < 2; ++mt)
#pragma unroll
    for (int n = 0; n < N; ++n) tile::mma<tile::half>(s[n][mt], a[0][mt], b[n]);
}

// Adds scores of 32 tokens in 8-bit codes, as operands (code * code_one): W words of every token and lane, from `from`
// on, times the query fragments from `first` on.
template <KvFormat F, int W, int N, int D>
__device__ __forceinline__ void qk_bytes(float (&s)[N][2][4], const unsigned char* const (&from)[4],
                                         const CodeQueries<F, D> (&q)[N], int first) {
  std::uint32_t row[4][W];  // (block of 8 tokens, word)
#pragma unroll
  for (int i = 0; i < 4; ++i) load_words(row[i], from[i]);
#pragma unroll
  for (int w = 0; w < W; ++w) {
    tile::FragmentB b[N];  // (n-tile)
#pragma unroll
    for (int n = 0; n < N; ++n) b[n] = q[n].q[first + w];
    qk_word<F>(s, row, w, b);
  }
}

// Loads K's scales and zero values of the 8 channels of a word of 4-bit codes, as pairs (r, r + 4) of fp16.
template <class T, KvFormat F, int D>
__device__ __forceinline__ void load_channel_scales(std::uint32_t (&scale)[4], std::uint32_t (&zero_value)[4],
                                                    const CodeTile<F, D>& x, const GroupScale<T, F, D>& group,
                                                    int channel) {
  const uint4 scales = tile::load_vec_at<uint4>(x.k_scale() + channel);
  uint4 minima = {};
  if constexpr (has_min(F)) minima = tile::load_vec_at<uint4>(x.k_min() + channel);
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    const auto pair = [r](const uint4& x) { return tile::uint4_pair(word(x, r / 2), word(x, 2 + r / 2), r); };
    scale[r] = group.f16(pair(scales));
    if constexpr (has_min(F))
      zero_value[r] = tile::fma_f16x2(scale[r], 0x48004800u,  // (8, 8) in fp16: zero value = min + 8 * scale
                                      group.f16(pair(minima)));
  }
}

// Scores of 32 tokens and N n-tiles of 8 packed rows. factor: per packed row, what a score in units of q_scale is
// multiplied by. This overload takes all codes but those of 8 bits with scales per channel.
template <class T, KvFormat F, int D, int N>
  requires(code_bits(F) == 4 || !KvTraits<F>::channel_scales)
__device__ __forceinline__ void qk_codes(float (&s)[N][2][4], CodeTile<F, D>& x, const CodeQueries<F, D> (&q)[N],
                                         const float (&factor)[N][2], int lane) {
  using Kind = KvTraits<F>;
  const int g = lane / 4, t = lane % 4;
  // 4-bit codes: the operands of a word's first k-tile are code * code_one, of the second code * odd_code_one, so each
  // has its own sums. 8 bits: `even` has all.
  float even[N][2][4] = {}, odd[N][2][4] = {};  // (n-tile, m-tile of 16 tokens, 4)
  if constexpr (Kind::has_zero_point && !is_kivi(F)) {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (auto& tile : even[n])
#pragma unroll
        for (int i = 0; i < 4; ++i) tile[i] = -q[n].zp_correction[i & 1];
  }
  if constexpr (code_bits(F) == 8) {
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
    // A lane has D / 32 words of 8 codes of a row and loads W at once.
    constexpr int W = D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 1;
    // Not loops with #pragma unroll: with 512 channels nvcc does not unroll those, and q, which they index, goes to
    // local memory.
    cute::for_each(cute::make_int_sequence<D / 32 / W>{}, [&](auto loaded) {
      constexpr int chunk = loaded * W;
      std::uint32_t row[4][W];  // (block of 8 tokens, word)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (W == 4) load_words(row[i], x.k + x.k_offset(g + 8 * i, (t * (D / 32) + chunk) / 4));
        else load_words(row[i], x.k + (g + 8 * i) * x.row_bytes + (t * (D / 32) + chunk) * 4);
      }
      cute::for_each(cute::make_int_sequence<W>{}, [&](auto v) {
        constexpr int w = chunk + v;
        [[maybe_unused]] const int channel = t * (D / 4) + 8 * w;
        [[maybe_unused]] std::uint32_t scale[4] = {}, zero_value[4] = {};  // (pairs (r, r + 4))
        if constexpr (Kind::channel_scales) load_channel_scales(scale, zero_value, x, group, channel);
        tile::FragmentA a[2][2];  // (k-tile, m-tile of 16 tokens)
        dequant_word<F>(a, row, v);
#pragma unroll
        for (int n = 0; n < N; ++n)
#pragma unroll
          for (int h = 0; h < 2; ++h) {  // k-tiles
            tile::FragmentB b = q[n].q[2 * w + h];
            if constexpr (has_min(F) && chains == 2)
              tile::mma<tile::half>(zero_term[n][h], {{zero_value[0], zero_value[1], zero_value[2], zero_value[3]}}, b);
            else if constexpr (has_min(F))
              tile::mma<tile::half>(zero_term[n][0],
                                    {{zero_value[h], zero_value[h], zero_value[h + 2], zero_value[h + 2]}}, b);
            if constexpr (is_kivi(F)) {
              b = {{tile::mul_f16x2(b.r[0], scale[h]), tile::mul_f16x2(b.r[1], scale[h + 2])}};
              constexpr std::uint32_t minus_zero_point = Kind::minus_zero_point_pair;
              tile::mma<tile::half>(zp_correction[n][h % chains],
                                    {{minus_zero_point, minus_zero_point, minus_zero_point, minus_zero_point}}, b);
            }
#pragma unroll
            for (int mt = 0; mt < 2; ++mt) tile::mma<tile::half>(h == 0 ? even[n][mt] : odd[n][mt], a[h][mt], b);
          }
      });
    });
    if constexpr (is_kivi(F)) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        float even_factor[2], odd_factor[2], base[2];  // (packed row 2t + j)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const float group_factor = factor[n][j] * group.scale;
          even_factor[j] = group_factor * (1.0f / Kind::code_one);
          odd_factor[j] = group_factor * (1.0f / Kind::odd_code_one);
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
        const float scale = stored_scale<T>(x.k_token_scale()[16 * mt + 8 * (i / 2) + g]) * (1.0f / Kind::code_one);
#pragma unroll
        for (int n = 0; n < N; ++n) {
          const float sum = code_bits(F) == 4
                                ? __fmaf_rn(odd[n][mt][i], Kind::code_one / Kind::odd_code_one, even[n][mt][i])
                                : even[n][mt][i];
          s[n][mt][i] = sum * (scale * factor[n][i & 1]);
        }
      }
  }
}

// Adds W words of every token and lane, from `from` on, in 8-bit codes with scales per channel; their channels begin at
// `channel`, their k-tiles at First. K's scales are multiplied into the queries, and the correction subtracts exactly
// what the codes add: the zero point times the scaled query, after rounding.
template <int W, int First, class T, KvFormat F, int N, int D>
__device__ __forceinline__ void qk_scaled_bytes(float (&sum)[N][2][4], float (&zp_correction)[N][4],
                                                const unsigned char* const (&from)[4], const CodeTile<F, D>& x,
                                                const CodeQueries<F, D> (&q)[N], const GroupScale<T, F, D>& group,
                                                int channel) {
  constexpr std::uint32_t minus_zero_point = KvTraits<F>::minus_zero_point_pair;
  std::uint32_t row[4][W];  // (block of 8 tokens, word)
#pragma unroll
  for (int i = 0; i < 4; ++i) load_words(row[i], from[i]);
#pragma unroll
  for (int w = 0; w < W; ++w) {
    const uint2 scales = *cute::recast_ptr<const uint2>(x.k_scale() + channel + 4 * w);
    const std::uint32_t low = group.f16(scales.x), high = group.f16(scales.y);
    tile::FragmentB b[N];  // (n-tile)
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const tile::FragmentB& query = q[n].q[First + w];
      b[n] = {{tile::mul_f16x2(query.r[0], low), tile::mul_f16x2(query.r[1], high)}};
      tile::mma<tile::half>(zp_correction[n],
                            {{minus_zero_point, minus_zero_point, minus_zero_point, minus_zero_point}}, b[n]);
    }
    qk_word<F>(sum, row, w, b);
  }
}

// The same scores from 8-bit codes with scales per channel.
template <class T, KvFormat F, int D, int N>
  requires(code_bits(F) == 8 && KvTraits<F>::channel_scales)
__device__ __forceinline__ void qk_codes(float (&s)[N][2][4], CodeTile<F, D>& x, const CodeQueries<F, D> (&q)[N],
                                         const float (&factor)[N][2], int lane) {
  const int g = lane / 4, t = lane % 4;
  float sum[N][2][4] = {}, zp_correction[N][4] = {};  // (n-tile, m-tile of 16 tokens, 4), (n-tile, 4)
  const GroupScale<T, F, D> group(x, lane);
  cute::for_each(cute::make_int_sequence<D / 64>{}, [&](auto chunk) {  // 64 channels: 16 bytes per lane and row
    qk_scaled_bytes<4, 4 * chunk, T>(sum, zp_correction,
                                     {x.k + x.k_offset(g, 4 * chunk + t), x.k + x.k_offset(g + 8, 4 * chunk + t),
                                      x.k + x.k_offset(g + 16, 4 * chunk + t), x.k + x.k_offset(g + 24, 4 * chunk + t)},
                                     x, q, group, 64 * chunk + 16 * t);
  });
  if constexpr (D % 64 != 0) {  // the last 32 channels
    constexpr int last = D / 64 * 64;
    const unsigned char* from = x.k + g * x.row_bytes + last + t * 8;
    qk_scaled_bytes<2, last / 16, T>(sum, zp_correction,
                                     {from, from + 8 * x.row_bytes, from + 16 * x.row_bytes, from + 24 * x.row_bytes},
                                     x, q, group, last + 8 * t);
  }
#pragma unroll
  for (int n = 0; n < N; ++n)
#pragma unroll
    for (int mt = 0; mt < 2; ++mt)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float group_factor = factor[n][i & 1] * group.scale;
        s[n][mt][i] = __fmaf_rn(sum[n][mt][i], group_factor * (1.0f / KvTraits<F>::code_one),
                                zp_correction[n][i & 1] * group_factor);
      }
}

}  // namespace rooftile::gpu
