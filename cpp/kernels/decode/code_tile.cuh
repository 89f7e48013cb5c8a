// SPDX-License-Identifier: Apache-2.0
// KV tiles of 32 tokens in codes: their place in a page, in shared memory, and the copies from one to the other.
#pragma once

#include <bit>

#include "kernels/decode/kv_traits.cuh"
#include "kernels/decode/queries.cuh"
#include "tile/copy.cuh"
#include "tile/hints.cuh"

namespace rooftile::gpu {

// Where a thread reads its 16-byte vectors of a KV head's pages: address of K's codes in page 0 at page offset 0, and
// the byte offsets of V, scales and minima from there (core/kv_layout.h).
template <KvFormat F, int D>
struct CodeSource {
  static constexpr int group_vecs = is_kivi(F) ? D / 8 : 0;  // 16-byte vectors of a group's K scales, and of its minima
  static constexpr int token_vecs = has_min(F) || !is_kivi(F) ? 8 : 4;  // threads that copy scales of tokens
  const std::byte* k;
  int v, k_scale, k_min, token_scales;
  int page_size;
  __device__ __forceinline__ bool two_pages() const {
    return !is_kivi(F) && page_size == 16;
  }  // a tile of 32 tokens spans two pages; kivi pages hold whole groups

  __device__ __forceinline__ CodeSource(const KvCacheView& c, int kv_head, int thread)
      : k(c.k.codes + kv_head * c.k.head_stride + thread * 16),
        v(static_cast<int>(c.v.codes - c.k.codes)),
        page_size(c.page_size) {
    k_scale = static_cast<int>(c.k.scale - c.k.codes);
    k_min = static_cast<int>(c.k.min - c.k.codes);
    // Four threads copy each array of 32 scales; k already counts thread * 16 bytes.
    token_scales = static_cast<int>((thread < 4   ? c.v.scale
                                     : is_kivi(F) ? c.v.min
                                                  : c.k.scale) -
                                    c.k.codes) +
                   (thread % 4 - thread) * 16;
  }
  // Pins the addresses in registers, so that they are not recomputed for every tile. A group's minima are then copied
  // with the same instruction as its scales, by the threads after the first group_vecs, whose k_scale is the offset of
  // the minima.
  __device__ __forceinline__ void pin(int thread) {
    if (has_min(F) && thread >= group_vecs) k_scale = k_min - group_vecs * 16;
    tile::pin(k);
    tile::pin(v);
    tile::pin(k_scale);
    tile::pin(token_scales);
  }
};

// One KV tile in shared memory, in the layout of its page: codes of K, codes of V, scales.
template <KvFormat F, int D>
struct CodeTile {
  static constexpr int row_bytes = D * code_bits(F) / 8, tile_bytes = 32 * row_bytes;
  static constexpr int row_vecs = row_bytes / 16;  // 16-byte vectors of a row
  // (token, byte) of K. Eight lanes read at once, four vectors of each of two neighbouring rows. Where rows are a
  // multiple of 128 bytes both would use the same banks, so odd rows exchange their vectors with neighbours, four
  // vectors away in 8 bits, the next one in 4.
  static constexpr int swizzled_bit = code_bits(F) == 8 ? 6 : 4;
  using Swizzle = cute::Swizzle<row_bytes % 128 == 0 ? 1 : 0, swizzled_bit,
                                row_bytes % 128 == 0 ? std::bit_width(unsigned{row_bytes}) - 1 - swizzled_bit : 1>;
  using SmemLayoutK = decltype(cute::composition(
      Swizzle{},
      cute::Layout<cute::Shape<cute::_32, cute::Int<row_bytes>>, cute::Stride<cute::Int<row_bytes>, cute::_1>>{}));

  alignas(16) unsigned char k[tile_bytes];  // (32 tokens, row_bytes): SmemLayoutK
  alignas(16) unsigned char v[tile_bytes];  // fragment blocks of 512 bytes: 16 bytes a lane, in lane order
  // Scales and minima in the order in which the threads copy them: of K's channels, then of the tokens.
  // k_scales: (scales, minima) x (D). token_scales: (V's scales; V's minima or K's scales) x (32 tokens).
  alignas(16) std::uint16_t k_scales[is_kivi(F) ? (has_min(F) ? 2 : 1) * D : 16];
  alignas(16) std::uint16_t token_scales[64];
  __device__ __forceinline__ const std::uint16_t* k_scale() const { return k_scales; }
  __device__ __forceinline__ const std::uint16_t* k_min() const { return k_scales + D; }
  __device__ __forceinline__ const std::uint16_t* v_scale() const { return token_scales; }
  // Beside V's scales lie its minima, or K's scales per token.
  __device__ __forceinline__ const std::uint16_t* v_min() const { return token_scales + 32; }
  __device__ __forceinline__ const std::uint16_t* k_token_scale() const { return token_scales + 32; }

  // SmemLayoutK(token, 16 vec), by hand: the layout hides from the compiler that all loads of a lane have tokens of one
  // parity. With the layout int4-kivi-sym took 43.1 us for 41.5, int4 34.2 for 33.2 (8 x 4096 tokens, head_dim 256, one
  // H200).
  __device__ __forceinline__ static constexpr int k_offset(int token, int vec) {
    constexpr int distance = row_bytes % 128 != 0 ? 0 : code_bits(F) == 8 ? 4 : 1;
    return token * row_bytes + (vec ^ (token & 1) * distance) * 16;
  }
  __device__ static constexpr bool k_offset_is_the_layout() {
    for (int token = 0; token < 32; ++token)
      for (int vec = 0; vec < row_vecs; ++vec)
        if (k_offset(token, vec) != SmemLayoutK{}(token, 16 * vec)) return false;
    return true;
  }

  // Start the copies of a tile's K with all scales, and of its V, by Threads threads. first, second: byte offsets of
  // the pages of tokens 0 and 16. page_offset: of token 0 in its page. Pinned: from.pin() has been called.
  template <int Threads, bool Pinned = false>
  __device__ __forceinline__ void copy_keys_async(const CodeSource<F, D>& from, std::int64_t first, std::int64_t second,
                                                  int page_offset, int thread) {
    constexpr int bytes_per_copy = Threads * 16;  // bytes that all threads copy with one instruction
    static_assert(tile_bytes % bytes_per_copy == 0 && k_offset_is_the_layout());
    const std::byte* const page = from.k + first;
    const auto copy = [&](const std::byte* low,
                          const std::byte* high) {  // low: row 0; high: row 16, minus 16 rows
#pragma unroll
      for (int i = 0; i < tile_bytes / bytes_per_copy; ++i) {
        const int at = i * Threads + thread;
        tile::cp_async_16(k + k_offset(at / row_vecs, at % row_vecs),
                          (at >= 16 * row_vecs ? high : low) + i * bytes_per_copy);
      }
    };
    const bool two_pages = from.two_pages();
    if (two_pages) copy(page + page_offset * row_bytes, from.k + second - 16 * row_bytes);
    else copy(page + page_offset * row_bytes, page + page_offset * row_bytes);
    if constexpr (is_kivi(F)) {
      const int group = page_offset / kv_group * (D * 2);
      static_assert(from.group_vecs * (Pinned && has_min(F) ? 2 : 1) <= Threads);
      if constexpr (Pinned && has_min(F)) {
        if (2 * from.group_vecs == Threads || thread < 2 * from.group_vecs)
          tile::cp_async_16(k_scales + thread * 8, page + (from.k_scale + group));
      } else if (thread < from.group_vecs) {
        tile::cp_async_16(k_scales + thread * 8, page + (from.k_scale + group));
        if constexpr (has_min(F)) tile::cp_async_16(k_scales + D + thread * 8, page + (from.k_min + group));
      }
    }
    if (thread < from.token_vecs) {
      const std::byte* scales = two_pages && thread % 4 >= 2 ? from.k + second - 32 : page + page_offset * 2;
      tile::cp_async_16(token_scales + thread * 8, scales + from.token_scales);
    }
  }
  template <int Threads>
  __device__ __forceinline__ void copy_values_async(const CodeSource<F, D>& from, std::int64_t first,
                                                    std::int64_t second, int page_offset, int thread) {
    constexpr int bytes_per_copy = Threads * 16;
    // Tokens 0 to 15, tokens 16 to 31.
    const std::byte* const pages[2] = {from.k + first + from.v, from.k + second + from.v};
    if (!from.two_pages()) {
#pragma unroll
      for (int i = 0; i < tile_bytes / bytes_per_copy; ++i)
        tile::cp_async_16(v + (i * Threads + thread) * 16, pages[0] + page_offset * row_bytes + i * bytes_per_copy);
    } else if constexpr (code_bits(F) == 4) {  // half of every lane's vector is in each page
#pragma unroll
      for (int i = 0; i < D / Threads; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          tile::cp_async_8(v + (i * Threads + thread) * 16 + half * 8, pages[half] + i * (Threads * 8) - thread * 8);
    } else {  // each page holds a whole number of vectors per lane
#pragma unroll
      for (int i = 0; i < tile_bytes / bytes_per_copy; ++i) {
        const int half = i * bytes_per_copy / (16 * row_bytes);
        tile::cp_async_16(v + (i * Threads + thread) * 16, pages[half] + (i * bytes_per_copy - half * 16 * row_bytes));
      }
    }
  }
};

// A scale or a minimum as it is stored.
template <class T>
__device__ __forceinline__ float stored_scale(std::uint32_t bits) {
  return tile::to_float(__builtin_bit_cast(T, static_cast<unsigned short>(bits)));
}

}  // namespace rooftile::gpu
