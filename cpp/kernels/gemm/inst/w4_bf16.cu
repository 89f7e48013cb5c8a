// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/codes_variants.cuh"

namespace rooftile::gpu {

std::span<const GemmVariant> w4_bf16_variants() { return codes_variants<tile::bf16, 4>(DType::bf16); }

}  // namespace rooftile::gpu
