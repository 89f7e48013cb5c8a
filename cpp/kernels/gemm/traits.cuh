// SPDX-License-Identifier: Apache-2.0
// The types that the traits of all mainloops share.
#pragma once

#include <cute/tensor.hpp>

#include <type_traits>

#include "tile/element.cuh"

namespace rooftile::gpu {

// Half or bf16 as CuTe's and CUTLASS's MMA atoms name it.
template <class T>
using MmaType = std::conditional_t<std::is_same_v<T, tile::half>, cute::half_t, cute::bfloat16_t>;

// The MMA of the streaming kernels, m16n8k16: W's rows are its M, tokens its N.
template <class T>
using StreamMma = std::conditional_t<std::is_same_v<T, tile::half>, cute::SM80_16x8x16_F32F16F16F32_TN,
                                     cute::SM80_16x8x16_F32BF16BF16F32_TN>;

}  // namespace rooftile::gpu
