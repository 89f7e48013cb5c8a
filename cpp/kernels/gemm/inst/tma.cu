// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/tma.cuh"

namespace rooftile::gpu {
namespace {

template <class T>
std::span<const GemmVariant> variants(DType dtype) {
  static const GemmVariant rows[] = {
      tma_variant<T, 0>(dtype),
      tma_variant<T, 1>(dtype),
      tma_variant<T, 2>(dtype),
      tma_variant<T, 3>(dtype),
  };
  return rows;
}

}  // namespace

std::span<const GemmVariant> tma_half_variants() { return variants<tile::half>(DType::f16); }
std::span<const GemmVariant> tma_bf16_variants() { return variants<tile::bf16>(DType::bf16); }

}  // namespace rooftile::gpu
