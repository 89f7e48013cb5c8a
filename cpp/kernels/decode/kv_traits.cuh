// SPDX-License-Identifier: Apache-2.0
// A KV format as a type: the granularity of its scales, its bits, its minima and zero point, and how its codes become
// fp16 operands.
#pragma once

#include <cute/tensor.hpp>

#include "core/kv_layout.h"
#include "tile/dequant_kv.cuh"
#include "tile/mma.cuh"

namespace rooftile::gpu {

// How a format's codes become operands: fp16, code * code_one. The odd ones of 4-bit codes are code * odd_code_one: of
// K they are a k-tile of their own, of V the rows g + 8 of an m-tile. Codes with a zero point are unsigned as operands,
// so every product is too large by zero_point * (the other operand); the zero-point correction subtracts that from the
// sums.
template <KvFormat F>
struct KvTraits {
  static constexpr int bits = code_bits(F);
  static constexpr bool codes = !is_element_format(F), has_zero_point = codes && !is_e4m3(F);
  static constexpr int word_k_tiles = bits == 4 ? 2 : 1;  // k-tiles of 16 channels that a word of K's codes is part of
  // Scales of K: of a channel and kv_group tokens, or of a token. Those of V are of a token. affine: with minima.
  static constexpr bool channel_scales = is_kivi(F), affine = has_min(F);
  static constexpr float code_one = is_e4m3(F) ? tile::e4m3_one : tile::code_one,
                         odd_code_one = bits == 4 ? tile::odd_code_one : code_one;
  static constexpr float zero_point = bits == 4 ? 8 : 128;                                           // in codes
  static constexpr std::uint32_t zero_point_pair = bits == 4 ? tile::pair_of_8 : tile::pair_of_128;  // as operands
  static constexpr std::uint32_t minus_zero_point_pair = bits == 4 ? 0xc800c800u : 0xd800d800u;      // as fp16 numbers
  static constexpr std::uint32_t flip = bits == 4 && !affine ? 0x88888888u : 0;  // two's complement -> unsigned

  // K codes of 32 tokens: (token, channel) -> code. Rows are padded to 32 channels.
  template <int D>
  using LayoutK =
      cute::Layout<cute::Shape<cute::_32, cute::Int<D>>, cute::Stride<cute::Int<padded_head_dim(D)>, cute::_1>>;
  // V codes of 32 tokens (16 in 8 bits) and 32 channels: (token, channel) -> code.
  using V8 = cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_4, cute::_2>, cute::Shape<cute::_8, cute::_4>>,
                          cute::Stride<cute::Stride<cute::_1, cute::_16, cute::_2>, cute::Stride<cute::_64, cute::_4>>>;
  using V4 =
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_4, cute::_4>, cute::Shape<cute::_8, cute::_4>>,
                   cute::Stride<cute::Stride<cute::_4, cute::_32, cute::_8>, cute::Stride<cute::_128, cute::_1>>>;
  using LayoutV = std::conditional_t<bits == 4, V4, V8>;

  // K: the A operands of 32 tokens. rCodes[i]: this lane's word of token 8 i + g. rA: (k-tile of 16 channels, m-tile
  // of 16 tokens). 8 bits: a word is two pairs, the lower and the upper half of k; 4 bits: four, of which 0 and 2 are
  // those of the first k-tile, 1 and 3 those of the second.
  __device__ __forceinline__ static void dequant_k(const std::uint32_t (&rCodes)[4],
                                                   tile::FragmentA (&rA)[word_k_tiles][2]) {
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      const int mt = block / 2, row = block % 2;  // register row + 2 h of A: token g + 8 row, half h of k
      if constexpr (bits == 4) {
        std::uint32_t pair[4];  // (4) pairs of k
        tile::decode_uint4(rCodes[block] ^ flip, pair);
#pragma unroll
        for (int r = 0; r < 4; ++r) rA[r % 2][mt].r[row + r / 2 * 2] = pair[r];
      } else {
        decode_bytes(rCodes[block], rA[0][mt].r[row], rA[0][mt].r[row + 2]);
      }
    }
  }
  // V: the A operands of V^T from a lane's 16 bytes of a fragment block. rA: (k-tile of 16 tokens, m-tile of 16
  // channels). 8 bits: word w is channel 8 w + g, its bytes tokens 2t, 2t + 1, 2t + 8, 2t + 9. 4 bits: word w is tokens
  // 8 w + 2t and 8 w + 2t + 1, its pair r channel 8 r + g.
  static constexpr int v_k_tiles = bits == 4 ? 2 : 1;  // k-tiles of a fragment block
  __device__ __forceinline__ static void dequant_v(const std::uint32_t (&rCodes)[4],
                                                   tile::FragmentA (&rA)[v_k_tiles][2]) {
    if constexpr (bits == 4) {
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        std::uint32_t pair[4];  // (4) pairs of tokens
        tile::decode_uint4(rCodes[word] ^ flip, pair);
#pragma unroll
        for (int r = 0; r < 4; ++r) rA[word / 2][r / 2].r[r % 2 + word % 2 * 2] = pair[r];
      }
    } else {
#pragma unroll
      for (int word = 0; word < 4; ++word)
        decode_bytes(rCodes[word], rA[0][word / 2].r[word % 2], rA[0][word / 2].r[word % 2 + 2]);
    }
  }

 private:
  // Four 8-bit codes -> two pairs.
  __device__ __forceinline__ static void decode_bytes(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
    if constexpr (is_e4m3(F)) tile::decode_e4m3(word, low, high);
    else tile::decode_int8_plus_128(word, low, high);
  }
};

// The layouts are those of core/kv_layout.h.
template <KvFormat F, int D>
constexpr bool is_layout_of_k() {
  for (int token = 0; token < kv_group; ++token)
    for (int d = 0; d < D; ++d)
      if (int(typename KvTraits<F>::template LayoutK<D>{}(token, d)) != int(k_code_index(D, token, d))) return false;
  return true;
}
static_assert(is_layout_of_k<KvFormat::int8, 128>() && is_layout_of_k<KvFormat::int4, 64>());

// The layout is that of core/kv_layout.h, and lane (g, t) owns the codes of channels g + 8 i and tokens 2t + j + 8 k:
// what its A operand of V^T takes.
template <KvFormat F>
constexpr bool lanes_own_v() {
  typename KvTraits<F>::LayoutV layout;
  constexpr int lane_codes = int(cute::size(layout)) / 32;
  for (int token = 0; token < int(cute::size<0>(layout)); ++token)
    for (int d = 0; d < 32; ++d)
      if (int(layout(token, d)) != int(v_code_index(F, 32, 32, token, d)) ||
          int(layout(token, d)) / lane_codes != d % 8 * 4 + token / 2 % 4)
        return false;
  return true;
}
static_assert(lanes_own_v<KvFormat::int8>() && lanes_own_v<KvFormat::int4>());

}  // namespace rooftile::gpu
