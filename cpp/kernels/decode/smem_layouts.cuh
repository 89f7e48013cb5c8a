// SPDX-License-Identifier: Apache-2.0
// Shared-memory layouts of rows of 16-bit elements.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/decode/scheduler.h"
#include "tile/mma.cuh"

namespace rooftile::gpu {

// 8 rows of 64 elements (32 where 64 does not divide D). The swizzle lets ldmatrix read 8 rows, and cp.async write a
// row, without bank conflicts.
template <int D>
using SmemAtom = std::conditional_t<
    D % 64 == 0,
    decltype(cute::composition(cute::Swizzle<3, 3, 3>{},
                               cute::Layout<cute::Shape<cute::_8, cute::_64>, cute::Stride<cute::_64, cute::_1>>{})),
    decltype(cute::composition(cute::Swizzle<2, 3, 3>{},
                               cute::Layout<cute::Shape<cute::_8, cute::_32>, cute::Stride<cute::_32, cute::_1>>{}))>;
template <int D, int Rows>
using SmemRows =
    decltype(cute::tile_to_shape(SmemAtom<D>{}, cute::Shape<cute::Int<Rows>, cute::Int<D>>{}));  // (Rows, D)
template <int D, int N>
using QueryLayout = SmemRows<D, N * mma_n>;  // (8 N packed rows, D)

}  // namespace rooftile::gpu
