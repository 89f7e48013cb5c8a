// SPDX-License-Identifier: Apache-2.0
// The shared-memory layouts and MMAs of tma.cu, from its config.
#pragma once

#include <cute/tensor.hpp>
#include <cutlass/numeric_types.h>

#include "kernels/linear/plan.h"
#include "tile/element.cuh"

namespace rooftile::gpu {

template <class T>
struct CutlassElement;
template <>
struct CutlassElement<tile::half> {
  using type = cutlass::half_t;
};
template <>
struct CutlassElement<tile::bf16> {
  using type = cutlass::bfloat16_t;
};

// One consumer warp group multiplies 64 rows of W by the CTA's tokens, both from shared memory. A TMA tile has 64 k.
template <class Element_, int config_>
struct LinearTma {
  using Element = Element_;
  using T = typename CutlassElement<Element>::type;
  static constexpr int tokens = linear_tma_block_m[config_];
  using BlkM = cute::_64;
  using BlkN = cute::Int<tokens>;
  using BlkK = cute::Int<linear_tma_tile_k>;
  using SmemAtom = cute::SM90::GMMA::Layout_K_SW128_Atom<T>;                             // (8, 64): rows of 128 bytes
  using LayoutW = decltype(cute::tile_to_shape(SmemAtom{}, cute::Shape<BlkM, BlkK>{}));  // (BLK_M, BLK_K)
  using LayoutX = decltype(cute::tile_to_shape(SmemAtom{}, cute::Shape<BlkN, BlkK>{}));  // (BLK_N, BLK_K)
  using TiledMma = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::ss_op_selector<T, T, float, cute::Shape<BlkM, BlkN, cute::_16>>()));
};

}  // namespace rooftile::gpu
