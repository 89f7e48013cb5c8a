// SPDX-License-Identifier: Apache-2.0
// wgmma m64n224k16 for the collective's tile of 224 rows of W. CuTe's selector chooses shapes such as this one only
// with CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED, which declares tens of thousands of lines of sparse ones too, and a file
// would take the compiler 40 seconds longer. These specialisations choose this shape alone.
#pragma once

#include "kernels/gemm/collective.cuh"

#include <cute/arch/mma_sm90_gmma_ext.hpp>
#include <cute/atom/mma_traits_sm90_gmma_ext.hpp>

namespace cute::SM90::GMMA {

using TileN224 = Shape<_128, Int<224>, _64>;
template <>
CUTE_HOST_DEVICE constexpr auto ss_op_selector<half_t, half_t, float, TileN224, Major::K, Major::K>() {
  return MMA_64x224x16_F32F16F16_SS<Major::K, Major::K>();
}
template <>
CUTE_HOST_DEVICE constexpr auto ss_op_selector<bfloat16_t, bfloat16_t, float, TileN224, Major::K, Major::K>() {
  return MMA_64x224x16_F32BF16BF16_SS<Major::K, Major::K>();
}

}  // namespace cute::SM90::GMMA
