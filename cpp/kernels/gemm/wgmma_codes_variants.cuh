// SPDX-License-Identifier: Apache-2.0
// The rows of the table of variants for W in 4 or 8 bits and many rows of x: wgmma.
#pragma once

#include <vector>

#include "kernels/gemm/launch.cuh"
#include "kernels/gemm/wgmma_codes.cuh"

namespace rooftile::gpu {

template <DType dtype, int bits, int config, W4Operand operand>
GemmVariant wgmma_codes_variant() {
  using Traits = W4WgmmaTraits<tile::ElementOf<dtype>, bits, config, operand>;
  return VariantOf<WgmmaParams, w4a16_wgmma<Traits>>::row(
      {.path = GemmPath::codes_wgmma, .bits = bits, .dtype = dtype, .config = config, .operand = operand});
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
