// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/collective.cuh"

namespace rooftile::gpu {

std::span<const GemmVariant> collective_bf16_variants() { return collective_variants<tile::bf16>(DType::bf16); }

}  // namespace rooftile::gpu
