// SPDX-License-Identifier: Apache-2.0
// The layouts, copies and MMAs of stream_bits16.cuh and tma_bits16.cuh, from their configs.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/gemm/configs.h"
#include "tile/mma.cuh"

namespace rooftile::gpu {

// stream_bits16.cuh. A warp multiplies 16 rows of W by the CTA's tokens, 64 k a step.
// vec: rows of W and x are whole 16-byte vectors at 16-byte addresses, and rows of x have one stride. Otherwise the
// kernel gathers element by element.
template <class Element_, int token_tiles_, bool vec_>
struct LinearConfig {
  using Element = Element_;
  using T = tile::MmaType<Element>;
  static constexpr int token_tiles = token_tiles_;  // mma tiles of 8 tokens
  static constexpr bool vec = vec_;
  using BlkM = cute::Int<linear_rows>;
  using BlkN = cute::Int<8 * token_tiles>;
  using TiledMma = decltype(cute::make_tiled_mma(tile::Mma16816<Element>{}));

  // Lane (g, t) has vectors of 8 neighbouring k, 8t to 8t + 7 of every 32, and feeds two mma with each: element
  // i + 2 j + 4 s is k 2t + i + 8 j of mma s.
  using Vec = cute::Layout<cute::_8>;
  using FragmentW =
      cute::Layout<cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_2>,
                   cute::Stride<cute::Stride<cute::_1, cute::_8, cute::_2>, cute::_4>>;  // ((i, row, j), s)
  using FragmentX = cute::Layout<
      cute::Shape<cute::Shape<cute::_2, cute::_2>, cute::_2, cute::_2, cute::Int<token_tiles>>,
      cute::Stride<cute::Stride<cute::_1, cute::_2>, cute::_4, cute::_8, cute::_16>>;  // ((i, j), s, half, token tile)

  // A warp's ring: (16 rows, 64 k, STAGE). A lane's vectors are 512 bytes from each other, beside those of other lanes.
  using LayoutW = cute::Layout<
      cute::Shape<cute::Shape<cute::_8, cute::_2>, cute::Shape<cute::_8, cute::_4, cute::_2>, cute::Int<linear_stages>>,
      cute::Stride<cute::Stride<cute::_32, cute::_256>, cute::Stride<cute::_1, cute::_8, cute::_512>, cute::_1024>>;
  using CopyAtom = cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>, T>;
  using CopyW = decltype(cute::make_tiled_copy(
      CopyAtom{}, cute::Layout<cute::Shape<cute::_8, cute::_4>, cute::Stride<cute::_4, cute::_1>>{},
      cute::Layout<cute::Shape<cute::_1, cute::_8>>{}));
  using LayoutSums = cute::Layout<cute::Shape<BlkM, BlkN>, cute::Stride<cute::_1, BlkM>>;  // fp32 (BLK_M, BLK_N)
};

// tma_bits16.cuh. One consumer warp group multiplies 64 rows of W by the CTA's tokens, both from shared memory. A TMA
// tile has 64 k.
template <class Element_, int config_>
struct LinearTma {
  using Element = Element_;
  using T = tile::MmaType<Element>;
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
