// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/stream_bits16.cuh"

namespace rooftile::gpu {
namespace {

template <class T>
std::span<const GemmVariant> variants(DType dtype) {
  static const GemmVariant rows[] = {
      stream_bits16_variant<T, 1, true>(dtype),
      stream_bits16_variant<T, 2, true>(dtype),
      stream_bits16_variant<T, 1, false>(dtype),
      stream_bits16_variant<T, 2, false>(dtype),
  };
  return rows;
}

}  // namespace

std::span<const GemmVariant> stream_bits16_half_variants() { return variants<tile::half>(DType::f16); }
std::span<const GemmVariant> stream_bits16_bf16_variants() { return variants<tile::bf16>(DType::bf16); }

}  // namespace rooftile::gpu
