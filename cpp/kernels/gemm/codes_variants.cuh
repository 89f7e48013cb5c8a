// SPDX-License-Identifier: Apache-2.0
// The rows of the table of variants for W in 4 or 8 bits.
#pragma once

#include <type_traits>
#include <vector>

#include "kernels/gemm/launch.cuh"
#include "kernels/gemm/stream_codes.cuh"
#include "kernels/gemm/wgmma_codes.cuh"

namespace rooftile::gpu {

// Scale: x's type, or void where the type of scales is known at run time.
template <DType dtype, int bits, int config, class Scale, bool small_groups, W4StreamZeros zeros>
GemmVariant stream_codes_variant() {
  using Traits = W4StreamTraits<tile::ElementOf<dtype>, bits, config, Scale, small_groups, zeros>;
  return VariantOf<CodesParams, w4a16_stream<Traits>>::row({.path = GemmPath::codes_stream,
                                                            .bits = bits,
                                                            .dtype = dtype,
                                                            .config = config,
                                                            .own_scale = !std::is_void_v<Scale>,
                                                            .small_groups = small_groups,
                                                            .zeros = zeros});
}
template <DType dtype, int bits, int config, W4Operand operand>
GemmVariant wgmma_codes_variant() {
  using Traits = W4WgmmaTraits<tile::ElementOf<dtype>, bits, config, operand>;
  return VariantOf<WgmmaParams, w4a16_wgmma<Traits>>::row(
      {.path = GemmPath::codes_wgmma, .bits = bits, .dtype = dtype, .config = config, .operand = operand});
}

template <DType dtype, int bits, int config>
std::span<const GemmVariant> stream_codes_variants() {
  using enum W4StreamZeros;
  using T = tile::ElementOf<dtype>;
  static const std::vector<GemmVariant> rows = [] {
    std::vector<GemmVariant> made{stream_codes_variant<dtype, bits, config, void, false, either>(),
                                  stream_codes_variant<dtype, bits, config, void, true, either>()};
    if constexpr (bits == 4) made.push_back(stream_codes_variant<dtype, bits, config, void, true, minima>());
    if constexpr (w4_specialises(config)) {
      made.push_back(stream_codes_variant<dtype, bits, config, T, false, symmetric>());
      made.push_back(stream_codes_variant<dtype, bits, config, T, false, integer>());
      made.push_back(stream_codes_variant<dtype, bits, config, T, true, either>());
      if constexpr (bits == 4) made.push_back(stream_codes_variant<dtype, bits, config, T, true, minima>());
    }
    return made;
  }();
  return rows;
}

template <DType dtype, int bits, int config>
std::span<const GemmVariant> wgmma_codes_variants() {
  static const std::vector<GemmVariant> rows = [] {
    std::vector<GemmVariant> made{wgmma_codes_variant<dtype, bits, config, W4Operand::codes>(),
                                  wgmma_codes_variant<dtype, bits, config, W4Operand::f16_scales>(),
                                  wgmma_codes_variant<dtype, bits, config, W4Operand::bf16_scales>()};
    if constexpr (w4_has_two_sums(bits, w4_wgmma_config(bits, config)))
      made.push_back(wgmma_codes_variant<dtype, bits, config, W4Operand::codes_64>());
    return made;
  }();
  return rows;
}

}  // namespace rooftile::gpu
