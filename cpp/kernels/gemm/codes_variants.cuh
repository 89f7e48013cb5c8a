// SPDX-License-Identifier: Apache-2.0
// The table of variants for W in 4 or 8 bits: an inst/ file returns it for one width and element type.
#pragma once

#include <type_traits>
#include <utility>
#include <vector>

#include "kernels/gemm/launch.cuh"
#include "kernels/gemm/stream_codes.cuh"
#include "kernels/gemm/wgmma.cuh"

namespace rooftile::gpu {

// Scale: T, or void where the type of scales is known at run time.
template <class T, int bits, int config, class Scale, bool small_groups, W4StreamZeros zeros>
GemmVariant stream_codes_variant(DType dtype) {
  using Traits = W4StreamTraits<T, bits, config, Scale, small_groups, zeros>;
  return VariantOf<CodesParams, w4a16_stream<Traits>>::row({.path = GemmPath::codes_stream,
                                                            .bits = bits,
                                                            .dtype = dtype,
                                                            .config = config,
                                                            .own_scale = !std::is_void_v<Scale>,
                                                            .small_groups = small_groups,
                                                            .zeros = zeros});
}
template <class T, int bits, int config, W4Operand operand>
GemmVariant wgmma_variant(DType dtype) {
  return VariantOf<WgmmaParams, w4a16_wgmma<W4WgmmaTraits<T, bits, config, operand>>>::row(
      {.path = GemmPath::codes_wgmma, .bits = bits, .dtype = dtype, .config = config, .operand = operand});
}

template <class T, int bits, int config>
void add_stream_config(std::vector<GemmVariant>& rows, DType dtype) {
  using enum W4StreamZeros;
  rows.push_back(stream_codes_variant<T, bits, config, void, false, either>(dtype));
  rows.push_back(stream_codes_variant<T, bits, config, void, true, either>(dtype));
  if constexpr (bits == 4) rows.push_back(stream_codes_variant<T, bits, config, void, true, minima>(dtype));
  if constexpr (w4_specialises(config)) {
    rows.push_back(stream_codes_variant<T, bits, config, T, false, symmetric>(dtype));
    rows.push_back(stream_codes_variant<T, bits, config, T, false, integer>(dtype));
    rows.push_back(stream_codes_variant<T, bits, config, T, true, either>(dtype));
    if constexpr (bits == 4) rows.push_back(stream_codes_variant<T, bits, config, T, true, minima>(dtype));
  }
}
template <class T, int bits, int config>
void add_wgmma_config(std::vector<GemmVariant>& rows, DType dtype) {
  rows.push_back(wgmma_variant<T, bits, config, W4Operand::codes>(dtype));
  if constexpr (w4_has_two_sums(bits, w4_wgmma_config(bits, config)))
    rows.push_back(wgmma_variant<T, bits, config, W4Operand::codes_64>(dtype));
  rows.push_back(wgmma_variant<T, bits, config, W4Operand::f16_scales>(dtype));
  rows.push_back(wgmma_variant<T, bits, config, W4Operand::bf16_scales>(dtype));
}

template <class T, int bits>
std::span<const GemmVariant> codes_variants(DType dtype) {
  static const std::vector<GemmVariant> rows = [dtype] {
    std::vector<GemmVariant> all;
    [&]<int... config>(std::integer_sequence<int, config...>) {
      (add_stream_config<T, bits, config>(all, dtype), ...);
    }(std::make_integer_sequence<int, w4_stream_last + 1>{});
    [&]<int... config>(std::integer_sequence<int, config...>) {
      (add_wgmma_config<T, bits, config>(all, dtype), ...);
    }(std::make_integer_sequence<int, w4_wgmma_last + 1>{});
    return all;
  }();
  return rows;
}

}  // namespace rooftile::gpu
