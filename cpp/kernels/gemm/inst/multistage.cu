// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/multistage.cuh"

namespace rooftile::gpu {

std::span<const GemmVariant> multistage_half_variants() { return multistage_variants<tile::half>(DType::f16); }
std::span<const GemmVariant> multistage_bf16_variants() { return multistage_variants<tile::bf16>(DType::bf16); }

}  // namespace rooftile::gpu
