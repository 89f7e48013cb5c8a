// SPDX-License-Identifier: Apache-2.0
// The rows of the table of variants for W in 4 or 8 bits and few rows of x.
#pragma once

#include <type_traits>
#include <vector>

#include "kernels/gemm/launch.cuh"
#include "kernels/gemm/stream_codes.cuh"

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

}  // namespace rooftile::gpu
