// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/collective.cuh"

namespace rooftile::gpu {

std::span<const GemmVariant> collective_half_variants() { return collective_variants<tile::half>(DType::f16); }

}  // namespace rooftile::gpu
