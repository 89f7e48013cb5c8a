// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/codes_variants.cuh"

namespace rooftile::gpu {

std::span<const GemmVariant> w4_half_variants() { return codes_variants<tile::half, 4>(DType::f16); }

}  // namespace rooftile::gpu
