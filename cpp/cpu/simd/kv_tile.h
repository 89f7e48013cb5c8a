// SPDX-License-Identifier: Apache-2.0
// A KV tile: 32 tokens of one KV head of any cache format, prepared as operand of a product.
//
// Elements are read in place (a pointer per token) or widened to fp32. Codes are converted to fp32 numbers; their
// scales and minima stay separate, because the product is computed on the codes and scaled once. Codes u of an affine
// format become u - 8, in -8 .. 7: sums around the zero point lose fewer bits than sums of u.
// 4-bit K codes come in paired order: of every 32 channels first the sixteen even, then the sixteen odd ones. Unpacking
// the bytes yields this order, and a dot product may use any order of channels.
// V codes are interleaved for the tensor cores (core/kv_layout.h); four rounds of byte zips restore their order.
// Include isa.h and vec.h first.
#pragma once

#include "core/kv_layout.h"
#include "cpu/simd/vec.h"

namespace rooftile::cpu::ROOFTILE_ISA {

inline constexpr int tile = 32;  // tokens, at absolute positions that are multiples of it

// token[t] points to the elements of token t. Entries past the last token repeat the last pointer and are readable.
struct TokenRows {
  DType dtype = DType::f32;
  const std::byte* token[tile];
};

// Scales and minima of a tile's codes.
struct TileScales {
  float token[tile], token_min[tile];  // per token; 0 past the last token
  float *channel, *channel_min;        // K of the kivi formats, in K's order, padded channels 0
};

ROOFTILE_INLINE float sixteen_bit(const std::byte* p, DType t, std::int64_t i) {
  std::uint16_t bits;
  std::memcpy(&bits, p + 2 * i, sizeof bits);
  if (t == DType::bf16) return to_float(BFloat16{bits});
  return to_float(Half{bits});
}

ROOFTILE_INLINE F32 sixteen_bits(const std::byte* p, DType t, std::int64_t i) {
  return t == DType::bf16 ? load(reinterpret_cast<const BFloat16*>(p) + i) : load(reinterpret_cast<const Half*>(p) + i);
}

inline constexpr float affine_zero_point = 8.0f;  // subtracted from the codes of an affine format

ROOFTILE_INLINE bool is_paired(KvFormat f) { return code_bits(f) == 4; }

// Floats in the scratch of one token: whole vectors, and whole pairs of vectors for codes.
ROOFTILE_INLINE int tile_width(const KvCacheView& c) {
  return is_element_format(c.format) ? (c.head_dim + lanes - 1) / lanes * lanes : padded_head_dim(c.head_dim);
}

// Natural order -> paired order, n a multiple of 32.
ROOFTILE_INLINE void pair_channels(const float* from, int n, float* to) {
  for (int base = 0; base < n; base += 32) {
#ifdef ROOFTILE_AVX512
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512 first = _mm512_loadu_ps(from + base), second = _mm512_loadu_ps(from + base + 16);
    _mm512_storeu_ps(to + base, _mm512_permutex2var_ps(first, even, second));
    _mm512_storeu_ps(to + base + 16,
                     _mm512_permutex2var_ps(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second));
#else
    for (int i = 0; i < 16; ++i) {
      to[base + i] = from[base + 2 * i];
      to[base + 16 + i] = from[base + 2 * i + 1];
    }
#endif
  }
}

// ---- byte zips: lanes of 16 bytes, as many side by side as a register holds ----

#ifdef ROOFTILE_AVX512
typedef std::uint8_t Bytes __attribute__((vector_size(64)));
#define ROOFTILE_ZIP(name, op) \
  ROOFTILE_INLINE Bytes name(Bytes a, Bytes b) { return (Bytes)op((__m512i)a, (__m512i)b); }
ROOFTILE_ZIP(zip8_low, _mm512_unpacklo_epi8)
ROOFTILE_ZIP(zip8_high, _mm512_unpackhi_epi8)
ROOFTILE_ZIP(zip16_low, _mm512_unpacklo_epi16)
ROOFTILE_ZIP(zip16_high, _mm512_unpackhi_epi16)
ROOFTILE_ZIP(zip32_low, _mm512_unpacklo_epi32)
ROOFTILE_ZIP(zip32_high, _mm512_unpackhi_epi32)
ROOFTILE_ZIP(zip64_low, _mm512_unpacklo_epi64)
ROOFTILE_ZIP(zip64_high, _mm512_unpackhi_epi64)
#undef ROOFTILE_ZIP
#endif
#define ROOFTILE_ZIP(name, ...) \
  ROOFTILE_INLINE U8 name(U8 a, U8 b) { return __builtin_shuffle(a, b, U8{__VA_ARGS__}); }
ROOFTILE_ZIP(zip8_low, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
ROOFTILE_ZIP(zip8_high, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
ROOFTILE_ZIP(zip16_low, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23)
ROOFTILE_ZIP(zip16_high, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31)
ROOFTILE_ZIP(zip32_low, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23)
ROOFTILE_ZIP(zip32_high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31)
ROOFTILE_ZIP(zip64_low, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
ROOFTILE_ZIP(zip64_high, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#undef ROOFTILE_ZIP
#ifndef ROOFTILE_AVX512
typedef U8 Bytes;
#endif

// x[a] holds, lane by lane, byte i of the 16-byte vector with d % 8 = a. y[i / 2] holds the eight bytes i, a = 0..7,
// then those of i + 1.
template <class B>
ROOFTILE_INLINE void zip_vecs(const B (&x)[8], B (&y)[8]) {
  B pairs[4][2], quads[2][4];
#pragma GCC unroll 4
  for (int q = 0; q < 4; ++q) {
    pairs[q][0] = zip8_low(x[2 * q], x[2 * q + 1]);
    pairs[q][1] = zip8_high(x[2 * q], x[2 * q + 1]);
  }
#pragma GCC unroll 2
  for (int r = 0; r < 2; ++r)
#pragma GCC unroll 2
    for (int z = 0; z < 2; ++z) {
      quads[r][2 * z] = zip16_low(pairs[2 * r][z], pairs[2 * r + 1][z]);
      quads[r][2 * z + 1] = zip16_high(pairs[2 * r][z], pairs[2 * r + 1][z]);
    }
#pragma GCC unroll 4
  for (int k = 0; k < 4; ++k) {
    y[2 * k] = zip32_low(quads[0][k], quads[1][k]);
    y[2 * k + 1] = zip32_high(quads[0][k], quads[1][k]);
  }
}

// Sixteen codes, signed ones or E4M3, to floats.
template <bool e4m3>
ROOFTILE_INLINE F32 numbers(I8 codes) {
  if constexpr (e4m3) return e4m3_values(codes);
  return __builtin_convertvector(widen(codes), F32);
}

// Lane `lane` of x, sixteen codes, to floats.
template <bool e4m3, class B>
ROOFTILE_INLINE void store_lane(float* to, const B& x, int lane) {
  I8 codes;
  std::memcpy(&codes, reinterpret_cast<const char*>(&x) + 16 * lane, sizeof codes);
  store(to, numbers<e4m3>(codes));
}

template <class B>
ROOFTILE_INLINE B splat_byte(int x) {
  return static_cast<std::uint8_t>(x) - B{};
}

// V codes of 32 channels of one interleaved tile (core/kv_layout.h) to fp32 [token][width].
// int4: tiles of 32 tokens have four 16-byte vectors per d % 8, tiles of 16 (pages of 16) two.
template <class B, int tile_tokens>
ROOFTILE_INLINE void unpack_v_int4(const std::byte* codes, bool is_signed, float* out, int width) {
  constexpr int vec_lanes = tile_tokens / 8, step = static_cast<int>(sizeof(B)) / 16;
  for (int lane = 0; lane < vec_lanes; lane += step) {
    B low[8], high[8], low_zip[8], high_zip[8];
#pragma GCC unroll 8
    for (int a = 0; a < 8; ++a) {
      const B both = load_raw<B>(codes + (a * vec_lanes + lane) * 16);
      low[a] = both & splat_byte<B>(15);
      high[a] = both >> 4;
      if (is_signed) {  // two's complement nibbles
        low[a] ^= splat_byte<B>(8);
        high[a] ^= splat_byte<B>(8);
      }
      low[a] -= splat_byte<B>(8);
      high[a] -= splat_byte<B>(8);
    }
    zip_vecs(low, low_zip);
    zip_vecs(high, high_zip);
    // byte i of a vector: bit 0 is d / 16, bit 1 token % 2, then token / 8 (32 tokens) or token / 8 and pair % 2 (16)
#pragma GCC unroll 8
    for (int k = 0; k < 8; ++k) {
      const B sixteen[2] = {zip64_low(low_zip[k], high_zip[k]), zip64_high(low_zip[k], high_zip[k])};
      for (int l = 0; l < step; ++l) {
        const int token = tile_tokens == 32 ? k / 2 * 8 + (lane + l) * 2 + k % 2
                                            : k / 2 % 2 * 8 + (2 * (lane + l) + k / 4) * 2 + k % 2;
        store_lane<false>(out + token * width, sixteen[0], l);
        store_lane<false>(out + token * width + 16, sixteen[1], l);
      }
    }
  }
}

template <bool e4m3>
ROOFTILE_INLINE void unpack_v_bytes(const std::byte* codes, float* out, int width) {
  constexpr int step = static_cast<int>(sizeof(Bytes)) / 16;
  for (int lane = 0; lane < 4; lane += step) {
    Bytes x[8], y[8];
#pragma GCC unroll 8
    for (int a = 0; a < 8; ++a) x[a] = load_raw<Bytes>(codes + (a * 4 + lane) * 16);
    zip_vecs(x, y);
    // byte i of a vector: bit 0 is token % 2, bit 1 token / 8, then d / 8
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) {
      const int j = k / 2, t8 = k % 2;  // channels 16 j .., tokens 8 t8 ..
      const Bytes even = zip64_low(y[4 * j + t8], y[4 * j + t8 + 2]),
                  odd = zip64_high(y[4 * j + t8], y[4 * j + t8 + 2]);
      for (int l = 0; l < step; ++l) {
        store_lane<e4m3>(out + (t8 * 8 + (lane + l) * 2) * width + 16 * j, even, l);
        store_lane<e4m3>(out + (t8 * 8 + (lane + l) * 2 + 1) * width + 16 * j, odd, l);
      }
    }
  }
}

// Two vectors of 16-bit scales at p, even and odd ones.
ROOFTILE_INLINE void load_pairs(const std::byte* p, DType t, F32& even, F32& odd) {
  const U32 words = load_raw<U32>(p);
  if (t == DType::bf16) {
    even = (F32)(words << 16);
    odd = (F32)(words & 0xffff0000u);
  } else {
    const U16 low = __builtin_convertvector(words & 0xffffu, U16), high = __builtin_convertvector(words >> 16, U16);
    Half h[lanes];
    store_raw(h, low);
    even = load(h);
    store_raw(h, high);
    odd = load(h);
  }
}

// The 16-bit scales of a group's channels at p, in the order of a token's codes: paired or as stored; padding is 0.
ROOFTILE_INLINE void load_channels(const std::byte* p, const KvCacheView& c, int width, float* out) {
  const DType dtype = kv_scale_dtype(c.dtype);
  const bool paired = is_paired(c.format);
  for (int d = 0; d < width; d += 2 * lanes) {
    const std::byte* from = p + 2 * d;
    F32 first, second;
    if (paired) {
      load_pairs(from, dtype, first, second);
    } else {
      first = sixteen_bits(from, dtype, 0);
      second = sixteen_bits(from, dtype, lanes);
    }
    store(out + d, first);
    store(out + d + lanes, second);
  }
  for (int d = c.head_dim; d < width; ++d) out[paired ? d / 32 * 32 + d % 2 * 16 + d % 32 / 2 : d] = 0;
}

// ---- one KV head of one cache row ----

struct CachedHead {
  const KvCacheView* cache;
  std::int64_t row, head;

  const std::byte* at(const std::byte* section, const KvCacheView::Plane& plane, std::int64_t token) const {
    return section + kv_page(*cache, row, token) * plane.page_stride + head * plane.head_stride;
  }
};

// Where tokens first .. first + n - 1 lie, from the pages or (ring) the raw ring.
ROOFTILE_INLINE void find_elements(const CachedHead& h, const KvCacheView::Plane& plane, const std::byte* ring,
                                   std::int64_t first, int n, TokenRows& rows) {
  const KvCacheView& c = *h.cache;
  rows.dtype = c.dtype;
  if (ring) {
    const std::int64_t token_bytes = c.head_dim * static_cast<std::int64_t>(size_of(c.dtype));
    const std::byte* base = ring + (h.row * c.kv_heads + h.head) * c.ring_size * token_bytes;
    for (int t = 0; t < n; ++t) rows.token[t] = base + (first + t) % c.ring_size * token_bytes;
  } else {
    for (int t = 0; t < n;) {
      const std::int64_t offset = (first + t) % c.page_size;
      const std::byte* base = h.at(plane.codes, plane, first + t);
      for (std::int64_t s = offset; s < c.page_size && t < n; ++s, ++t) rows.token[t] = base + s * plane.token_stride;
    }
  }
  for (int t = n; t < tile; ++t) rows.token[t] = rows.token[n - 1];
}

// Rows of any dtype widened to fp32 [tile][width], the tail of each 0.
ROOFTILE_INLINE void widen(TokenRows& rows, int n, int head_dim, int width, float* scratch) {
  const auto each = [&](auto e) {
    for (int t = 0; t < n; ++t) {
      const auto* from = reinterpret_cast<const decltype(e)*>(rows.token[t]);
      for (int d = 0; d < width; d += lanes) store(scratch + t * width + d, load_some(from + d, head_dim - d));
    }
  };
  if (rows.dtype == DType::f16) each(Half{});
  else if (rows.dtype == DType::bf16) each(BFloat16{});
  else each(float{});
  rows.dtype = DType::f32;
  for (int t = 0; t < tile; ++t)
    rows.token[t] = reinterpret_cast<const std::byte*>(scratch + (t < n ? t : n - 1) * width);
}

ROOFTILE_INLINE void scratch_rows(const float* scratch, int n, int width, TokenRows& rows) {
  rows.dtype = DType::f32;
  for (int t = 0; t < tile; ++t)
    rows.token[t] = reinterpret_cast<const std::byte*>(scratch + (t < n ? t : n - 1) * width);
}

ROOFTILE_INLINE void token_scales(const CachedHead& h, const KvCacheView::Plane& plane, const std::byte* section,
                                  std::int64_t first, int n, float* out) {
  const KvCacheView& c = *h.cache;
  const DType dtype = kv_scale_dtype(c.dtype);
  for (int t = 0; t < n;) {
    const std::byte* base = h.at(section, plane, first + t);
    const std::int64_t offset = (first + t) % c.page_size;
    if (offset + lanes <= c.page_size && t + lanes <= n) {
      store(out + t, sixteen_bits(base, dtype, offset));
      t += lanes;
    } else {
      for (std::int64_t s = offset; s < c.page_size && t < n; ++s, ++t) out[t] = sixteen_bit(base, dtype, s);
    }
  }
  for (int t = n; t < tile; ++t) out[t] = 0;
}

// K's channel scales and minima of a kivi format for the group of token `first`, in the order of a token's codes.
ROOFTILE_INLINE void load_channel_scales(const CachedHead& h, std::int64_t first, int width, float* scale, float* min) {
  const KvCacheView& c = *h.cache;
  const std::int64_t offset = first % c.page_size / kv_group * width * 2;
  load_channels(h.at(c.k.scale, c.k, first) + offset, c, width, scale);
  if (has_min(c.format)) load_channels(h.at(c.k.min, c.k, first) + offset, c, width, min);
}

// The K codes of tokens first .. first + n - 1 as fp32 [tile][width], and their scales.
ROOFTILE_INLINE void unpack_k(const CachedHead& h, std::int64_t first, int n, float* out, TileScales& scales) {
  const KvCacheView& c = *h.cache;
  const int width = tile_width(c);
  const bool is_signed = !has_min(c.format);
  const I8 flip = static_cast<std::int8_t>(-0x78) - I8{};  // 0x88
  for (int t = 0; t < n;) {
    const std::byte* base = h.at(c.k.codes, c.k, first + t);
    for (std::int64_t s = (first + t) % c.page_size; s < c.page_size && t < n; ++s, ++t) {
      float* to = out + t * width;
      if (code_bits(c.format) == 8) {
        const std::byte* from = base + s * width;
        for (int d = 0; d < width; d += lanes) {
          const I8 codes = load_raw<I8>(from + d);
          store(to + d, is_e4m3(c.format) ? numbers<true>(codes) : numbers<false>(codes));
        }
      } else {
        const std::byte* from = base + s * width / 2;
        for (int d = 0; d < width; d += 2 * lanes) {
          I8 bytes = load_raw<I8>(from + d / 2);
          if (!is_signed) bytes ^= flip;  // u with its top bit flipped is u - 8 in two's complement
          const I32 both = widen(bytes);
          const I32 even = (both << 28) >> 28, odd = both >> 4;
          store(to + d, __builtin_convertvector(even, F32));
          store(to + d + lanes, __builtin_convertvector(odd, F32));
        }
      }
    }
  }
  if (!is_kivi(c.format)) return token_scales(h, c.k, c.k.scale, first, n, scales.token);
  load_channel_scales(h, first, width, scales.channel, scales.channel_min);
}

// The V codes of the tile at `first` as fp32 [tile][width], and the scales of its first n tokens.
ROOFTILE_INLINE void unpack_v(const CachedHead& h, std::int64_t first, int n, float* out, TileScales& scales) {
  const KvCacheView& c = *h.cache;
  const int width = tile_width(c);
  const bool is_signed = !has_min(c.format);
  const int tokens = code_bits(c.format) == 8 || c.page_size == 16 ? 16 : 32;  // of an interleaved tile
  for (int t = 0; t < n; t += tokens) {
    const std::byte* base =
        h.at(c.v.codes, c.v, first + t) + (first + t) % c.page_size * width * code_bits(c.format) / 8;
    for (int d = 0; d < width; d += 32) {
      const std::byte* from = base + d * tokens * code_bits(c.format) / 8;
      float* to = out + t * width + d;
      if (is_e4m3(c.format)) unpack_v_bytes<true>(from, to, width);
      else if (code_bits(c.format) == 8) unpack_v_bytes<false>(from, to, width);
      else if (tokens == 16) unpack_v_int4<U8, 16>(from, is_signed, to, width);
      else unpack_v_int4<Bytes, 32>(from, is_signed, to, width);
    }
  }
  token_scales(h, c.v, c.v.scale, first, n, scales.token);
  if (has_min(c.format)) token_scales(h, c.v, c.v.min, first, n, scales.token_min);
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
