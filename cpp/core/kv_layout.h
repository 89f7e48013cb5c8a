// SPDX-License-Identifier: Apache-2.0
// The byte layout of a compressed cache: codes, scales and minima. Both backends take the layout from this file alone.
//
// One (page, KV head) is one contiguous block:
//   K codes | V codes | K scale | K min | V scale | V min          (a format leaves out the sections it lacks)
// K codes are [token][d]. The lanes of an MMA row read 16-byte vectors of a token, because the contraction over d may
// use any order. V codes are interleaved in tiles, so that one 32-bit word holds, for a lane, pairs of neighbouring
// tokens of the same d: one bit operation makes a 16-bit pair, and the transpose costs nothing.
// head_dim is padded to a multiple of 32 inside the block; padded codes are 0.
// Scales: per-token formats have one per token; K of the kivi formats has one per channel and group of 32 tokens,
// [group][d].
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <utility>

#include "core/half.h"
#include "core/hd.h"
#include "rooftile/kv_cache.h"

namespace rooftile {

inline constexpr int max_head_dim = 512;  // of attention and of caches
inline constexpr int kv_group = 32;       // tokens that share a K scale in the kivi formats
// raw tokens kept per row: the open group, and 16 so that truncation may step back into a closed group
inline constexpr int kv_ring = 64;
inline constexpr int kv_step_back = 16;  // tokens that truncate can remove across a group boundary

// The formats whose traits satisfy `has`, a bit each. A kernel that learns the format at run time tests one bit.
constexpr std::uint32_t kv_formats(bool (*has)(const KvFormatTraits&)) {
  std::uint32_t formats = 0;
  for (int f = 0; f < kv_format_count; ++f)
    formats |= static_cast<std::uint32_t>(has(kv_format_traits(static_cast<KvFormat>(f)))) << f;
  return formats;
}
inline constexpr std::uint32_t element_formats =
                                   kv_formats([](const KvFormatTraits& t) { return t.code == KvCode::element; }),
                               e4m3_formats =
                                   kv_formats([](const KvFormatTraits& t) { return t.code == KvCode::e4m3; }),
                               kivi_formats =
                                   kv_formats([](const KvFormatTraits& t) { return t.k_scale == KvScaleOf::channel; }),
                               affine_formats = kv_formats([](const KvFormatTraits& t) { return t.affine; }),
                               nibble_formats = kv_formats([](const KvFormatTraits& t) { return t.bits == 4; });

static_assert((affine_formats & ~nibble_formats) == 0, "codes with minima are read as unsigned 4-bit integers");

ROOFTILE_HD constexpr bool one_of(std::uint32_t formats, KvFormat f) {
  return (formats >> static_cast<int>(f) & 1) != 0;
}
ROOFTILE_HD constexpr bool is_element_format(KvFormat f) { return one_of(element_formats, f); }
ROOFTILE_HD constexpr bool is_e4m3(KvFormat f) { return one_of(e4m3_formats, f); }
ROOFTILE_HD constexpr bool is_kivi(KvFormat f) { return one_of(kivi_formats, f); }
ROOFTILE_HD constexpr bool has_min(KvFormat f) { return one_of(affine_formats, f); }
ROOFTILE_HD constexpr bool has_nibbles(KvFormat f) { return one_of(nibble_formats, f); }  // two codes a byte
ROOFTILE_HD constexpr int code_bits(KvFormat f) { return kv_format_traits(f).bits; }
// The greatest code, or for fp8 the greatest number. Symmetric formats: the least is its negative.
ROOFTILE_HD constexpr int max_code(KvFormat f) {
  return is_e4m3(f) ? 448 : (1 << (code_bits(f) - (has_min(f) ? 0 : 1))) - 1;
}

// The value of a code before scale and minimum: the integer itself, or for fp8 the number with these bits.
constexpr float code_value(KvFormat f, int code) {
  return is_e4m3(f) ? to_float(E4M3{static_cast<std::uint8_t>(code)}) : static_cast<float>(code);
}

// Calls visit(constant) with the format as a type, std::integral_constant<KvFormat, f>.
template <class Visit, std::size_t... I>
constexpr void with_kv_format(KvFormat f, const Visit& visit, std::index_sequence<I...>) {
  (void)((static_cast<std::size_t>(f) == I &&
          (visit(std::integral_constant<KvFormat, static_cast<KvFormat>(I)>{}), true)) ||
         ...);
}
template <class Visit>
constexpr void with_kv_format(KvFormat f, const Visit& visit) {
  with_kv_format(f, visit, std::make_index_sequence<kv_format_count>{});
}

// Scales and minima are stored in the cache's 16-bit dtype, fp16 when its inputs are fp32.
ROOFTILE_HD constexpr DType kv_scale_dtype(DType d) { return d == DType::bf16 ? DType::bf16 : DType::f16; }

ROOFTILE_HD constexpr int padded_head_dim(int d) { return (d + 31) / 32 * 32; }

// Index of a K code inside its block's K section, in codes.
ROOFTILE_HD constexpr std::int64_t k_code_index(int head_dim, int token, int d) {
  return std::int64_t{token} * padded_head_dim(head_dim) + d;
}

// Index of a V code inside its block's V section, in codes.
//   8 bits: tiles of 16 tokens x 32 d = 32 vectors of 16 bytes, vector (d % 8, token / 2 % 4); inside a vector
//         word d / 8, byte (token / 8, token % 2).
//   4 bits: tiles of 32 tokens (16 when a page holds 16) x 32 d = 32 vectors, vector (d % 8, token / 2 % 4); inside a
//         vector word token / 8, nibble (token % 2, d / 8).
ROOFTILE_HD constexpr std::int64_t v_code_index(KvFormat f, int page_size, int head_dim, int token, int d) {
  const bool wide = code_bits(f) == 8;
  const int tile = wide || page_size == 16 ? 16 : 32;
  const int t = token % tile;
  const std::int64_t tile_base = std::int64_t{token / tile} * tile * padded_head_dim(head_dim) + (d / 32) * 32 * tile;
  const int vec = (d % 8) * 4 + (t / 2) % 4;
  const int inside = wide ? ((d / 8) % 4) * 4 + (t / 8) * 2 + t % 2 : (t / 8) * 8 + (t % 2) * 4 + (d / 8) % 4;
  return tile_base + vec * tile + inside;
}

// Byte offsets of the sections of one block.
struct KvBlock {
  std::int64_t v_codes = 0, k_scale = 0, k_min = 0, v_scale = 0, v_min = 0;
  std::int64_t bytes = 0;
};
ROOFTILE_HD constexpr KvBlock kv_block(KvFormat f, int page_size, int head_dim) {
  KvBlock b;
  const int d = is_element_format(f) ? head_dim : padded_head_dim(head_dim);
  const std::int64_t codes = std::int64_t{page_size} * d * code_bits(f) / 8;
  b.v_codes = codes;
  b.bytes = 2 * codes;
  if (is_element_format(f)) return b;
  const std::int64_t token_scales = std::int64_t{page_size} * 2;
  const std::int64_t k_scales = is_kivi(f) ? std::int64_t{page_size / kv_group} * d * 2 : token_scales;
  b.k_scale = b.bytes;
  b.bytes += k_scales;
  b.k_min = b.bytes;
  if (has_min(f)) b.bytes += k_scales;
  b.v_scale = b.bytes;
  b.bytes += token_scales;
  b.v_min = b.bytes;
  if (has_min(f)) b.bytes += token_scales;
  return b;
}

// The page that holds token `token` of row `row`. Reads no table entry but that one.
ROOFTILE_HD inline std::int64_t kv_page(const KvCacheView& c, std::int64_t row, std::int64_t token) {
  const std::int64_t index = token / c.page_size;
  return c.block_table ? c.block_table[row * c.table_stride + index] : row * c.max_pages + index;
}

// The query at position t reads tokens [0, kivi_code_end(t)) as codes and [kivi_code_end(t), t] raw.
ROOFTILE_HD constexpr std::int64_t kivi_code_end(std::int64_t position) { return position / kv_group * kv_group; }

}  // namespace rooftile
