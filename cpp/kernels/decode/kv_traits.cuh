// SPDX-License-Identifier: Apache-2.0
// A KV format as a type: the granularity of its scales, its bits, its minima and zero point, and how its codes become
// fp16 operands.
#pragma once

#include "core/kv_layout.h"
#include "tile/dequant.cuh"

namespace rooftile::gpu {

// How a format's codes become operands: fp16, code * code_scale. 4-bit codes come in pairs, even and odd ones, and the
// odd ones have another factor. Codes with a zero point are unsigned as operands, so every product is too large by
// zero_point * (the other operand); the zero-point correction subtracts that from the sums.
template <KvFormat F>
struct KvTraits {
  static constexpr bool codes = !is_element_format(F), pairs = code_bits(F) == 4,
                        has_zero_point = codes && F != KvFormat::fp8;
  static constexpr float code_scale = F == KvFormat::fp8 ? tile::e4m3_unit : tile::code_unit,
                         odd_code_scale = pairs ? tile::odd_code_unit : code_scale;
  static constexpr float zero_point = pairs ? 8 : 128;                                           // in codes
  static constexpr std::uint32_t zero_point_pair = pairs ? tile::pair_of_8 : tile::pair_of_128;  // as operands
  static constexpr std::uint32_t flip = pairs && !has_min(F) ? 0x88888888u : 0;  // two's complement -> unsigned

  // Decodes a word: four 8-bit codes into two pairs, eight 4-bit codes into four.
  __device__ __forceinline__ static void decode(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
    if constexpr (F == KvFormat::fp8) tile::decode_e4m3(word, low, high);
    else tile::decode_int8_plus_128(word, low, high);
  }
  __device__ __forceinline__ static void decode(std::uint32_t word, std::uint32_t (&pair)[4]) {
    tile::decode_uint4(word ^ flip, pair);
  }
};

}  // namespace rooftile::gpu
