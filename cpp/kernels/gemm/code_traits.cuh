// SPDX-License-Identifier: Apache-2.0
// The types of the weight-streaming kernel (stream_codes.cuh): the layouts of its tensors, copy and MMA atoms, shared
// memory; and what it has in common with wgmma_codes.cuh: the packed layout of codes, and a warp's stages of them.
#pragma once

#include <cute/tensor.hpp>

#include "core/w4_layout.h"
#include "kernels/gemm/configs.h"
#include "rooftile/gemm.h"
#include "tile/dequant_weight.cuh"
#include "tile/mma.cuh"

namespace rooftile::gpu {

// The packed layout of a tile of W, (16 rows, 64 k) -> index of the code. W4TileLayout and W8TileLayout are the A
// operand of m16n8k16: a lane's 16 bytes of a fragment block are its A fragments, of four k-steps in 4 bits, two in 8.
using W4TileLayout = cute::Layout<
    cute::Shape<cute::Shape<cute::_8, cute::_2>, cute::Shape<cute::_2, cute::_4, cute::_2, cute::_4>>,
    cute::Stride<cute::Stride<cute::_128, cute::_1>, cute::Stride<cute::_4, cute::_32, cute::_2, cute::_8>>>;
using W8TileLayout = cute::Layout<
    cute::Shape<cute::Shape<cute::_8, cute::_2>, cute::Shape<cute::_2, cute::_4, cute::_2, cute::_2, cute::_2>>,
    cute::Stride<cute::Stride<cute::_64, cute::_1>, cute::Stride<cute::_2, cute::_16, cute::_4, cute::_8, cute::_512>>>;

template <class TileLayout>
constexpr bool is_packed_layout(int bits) {
  for (int n = 0; n < w4_tile_n; ++n)
    for (int k = 0; k < w4_tile_k; ++k)
      if (int(TileLayout{}(n, k)) != w4_code_index(bits, 1, n, k)) return false;
  return true;
}
static_assert(is_packed_layout<W4TileLayout>(4) && is_packed_layout<W8TileLayout>(8));

// A step of one tile row of W in shared memory: codes of 16 rows x 128 k, up to four groups' scales, zero points or
// minima.
template <int bits>
struct W4Stage {
  static constexpr int fragment_blocks = 2 * w4_tile_fragments(bits);
  alignas(16) std::uint32_t codes[fragment_blocks * w4_fragment_bytes / 4];
  // Quantisation parameters, (scales, offsets): (4 groups, 16 rows) of 2 bytes each. Offsets are minima, or zero points
  // of a byte, which leave half of their room unused.
  cute::uint128_t qparams[2 * w4_qparam_bytes / 16];
};
static_assert(sizeof(W4Stage<4>) == w4_stage_bytes(4) && sizeof(W4Stage<8>) == w4_stage_bytes(8));

// Layouts of one warp's stages, a step of one tile row each, and the warp's copies. pitch: distance from a stage to the
// warp's next one, in W4Stages: 1 where a warp's stages are contiguous, else the warps whose stages are interleaved.
// Scale: half or bf16; void: known at run time. scale_blocks: of a step, as registers hold them; 4: up to four, how
// many is known at run time.
template <int bits_, int stages_, int pitch, class Scale, int scale_blocks_>
struct W4StageTraits {
  static constexpr int bits = bits_, stages = stages_, scale_blocks = scale_blocks_;
  static_assert(scale_blocks == 1 || scale_blocks == 2 || scale_blocks == 4);
  using Stage = W4Stage<bits>;
  static constexpr int fragment_blocks = Stage::fragment_blocks;
  using STAGE = cute::Int<stages>;
  template <class X>
  using StageStride = cute::Int<pitch * sizeof(Stage) / sizeof(X)>;

  // Two 16-bit scales or minima, of rows g and g + 8. is_half: their type, where it is known at run time.
  __device__ __forceinline__ static float2 scale_pair(bool is_half, std::uint32_t pair) {
    if constexpr (std::is_void_v<Scale>)
      return is_half ? tile::unpack<tile::half>(pair) : tile::unpack<tile::bf16>(pair);
    else return tile::unpack<Scale>(pair);
  }

  // Codes in shared memory, (word, fragment block, STAGE)
  using SmemLayoutCodes = cute::Layout<cute::Shape<cute::_128, cute::Int<fragment_blocks>, STAGE>,
                                       cute::Stride<cute::_1, cute::_128, StageStride<std::uint32_t>>>;
  // A lane's 16-byte vector of scales or offsets, (1, STAGE)
  using LaneLayoutQparams =
      cute::Layout<cute::Shape<cute::_1, STAGE>, cute::Stride<cute::_1, StageStride<cute::uint128_t>>>;
  // Scales as ldmatrix.trans reads them: (g, ((row half, k-block), t), STAGE), the same for all t, so that lane (g, t)
  // gets the scales of rows g and g + 8 in a register. Four scale blocks: k-blocks 2^shift apart are in different
  // groups.
  CUTE_HOST_DEVICE static auto smem_layout_scales(int shift) {
    using namespace cute;
    if constexpr (scale_blocks == 4)
      return make_layout(Shape<_8, Shape<Shape<_2, _2, _2>, _4>, STAGE>{},
                         make_stride(_1{}, make_stride(make_stride(_8{}, (1 >> shift) * 16, (2 >> shift) * 16), _0{}),
                                     StageStride<std::uint16_t>{}));
    else
      return Layout<Shape<_8, Shape<Shape<_2, Int<scale_blocks>>, _4>, STAGE>,
                    Stride<_1, Stride<Stride<_8, _16>, _0>, StageStride<std::uint16_t>>>{};
  }
  using LaneLayoutScales =
      cute::Layout<cute::Shape<cute::_8, STAGE>, cute::Stride<cute::_1, StageStride<std::uint16_t>>>;
  // Zero points, bytes: ((t, g), rows g and g + 8, group, STAGE)
  using SmemLayoutZeros =
      cute::Layout<cute::Shape<cute::Shape<cute::_4, cute::_8>, cute::_2, cute::_4, STAGE>,
                   cute::Stride<cute::Stride<cute::_0, cute::_1>, cute::_8, cute::_16, StageStride<std::uint8_t>>>;

  // Codes: a lane copies, and reads back, its 16 bytes of a fragment block.
  using GmemCopyCodes =
      decltype(cute::make_tiled_copy(cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>, std::uint32_t>{},
                                     cute::Layout<cute::_32>{}, cute::Layout<cute::_4>{}));
  // Scales and offsets: a lane copies up to 16 bytes of a step.
  using GmemCopyQparams = cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<cute::uint128_t>, cute::uint128_t>;
  using SmemCopyScales = decltype(cute::make_tiled_copy(
      cute::Copy_Atom<
          std::conditional_t<scale_blocks == 1, cute::SM75_U16x2_LDSM_T,
                             std::conditional_t<scale_blocks == 2, cute::SM75_U16x4_LDSM_T, cute::SM75_U16x8_LDSM_T>>,
          std::uint16_t>{},
      cute::Layout<cute::Shape<cute::_8, cute::_4>, cute::Stride<cute::_4, cute::_1>>{},
      cute::Layout<cute::Shape<cute::_1, cute::Int<2 * scale_blocks>>>{}));
};

// What a variant of stream_codes.cuh is compiled for. Element: of x and y. Scale: of scales and minima, half or bf16;
// void: the type is known at run time. small_groups: a step of 128 k may hold several scale blocks; minima take the
// same path.
template <class Element, int bits_, int config_, class Scale, bool small_groups_, W4StreamZeros zeros>
struct W4StreamTraits : W4StageTraits<bits_, w4_stream_config(bits_, config_).stages, 1, Scale,
                                      small_groups_ || zeros == W4StreamZeros::minima ? 4 : 1> {
  using Base = typename W4StreamTraits::W4StageTraits;
  using Base::bits, Base::stages;
  using typename Base::Stage;
  using T = Element;
  using MmaT = tile::MmaType<T>;
  static constexpr bool minima = zeros == W4StreamZeros::minima, small_groups = Base::scale_blocks > 1;
  ROOFTILE_HD static bool has_zero_points(const W4View& w) {
    return zeros == W4StreamZeros::integer || (zeros == W4StreamZeros::either && w.zeros == W4Zeros::integer);
  }
  static constexpr W4StreamConfig config = w4_stream_config(bits, config_);
  static constexpr int n_tiles = config.n_tiles, x_tile_steps = config.x_tile_k / w4_step_k;
  static constexpr bool clusters = 8 * n_tiles <= w4_cluster_tokens;  // whether K splits may be a cluster
  static constexpr int ctas_per_sm = minima && n_tiles == 8 ? 1 : 2;  // sums of x take 32 registers more
  static constexpr int k_blocks_per_sum = small_groups ? 1 : 2;       // of 32 k: the sum that is scaled in fp32
  // The wait for a step's codes is also the wait for the tile of x that was loaded a tile before.
  static_assert(x_tile_steps >= stages - 1 && config.x_tile_k % w4_step_k == 0);

  struct SharedStorage {
    Stage ring[w4_warps][stages];
    __device__ MmaT* x() { return static_cast<MmaT*>(static_cast<void*>(this + 1)); }  // tiles of x: smem_layout_x
  };

  using BLK_N = cute::Int<8 * n_tiles>;  // tokens
  using BLK_K = cute::Int<config.x_tile_k>;

  // Codes in global memory, (word, fragment block, step) of a tile row, and what a lane copies of it.
  template <int words>
  using CodesOf = cute::Layout<cute::Shape<cute::Int<words>, cute::Int<Base::fragment_blocks>, int>,
                               cute::Stride<cute::_1, cute::_128, cute::Int<128 * Base::fragment_blocks>>>;
  using GmemLayoutCodes = CodesOf<128>;
  using LaneLayoutCodes = CodesOf<4>;
  // (BLK_N, BLK_K, buffer): a tile of x in shared memory has `tokens` rows. The pitch is 16 bytes more than a row,
  // against bank conflicts.
  static constexpr int x_pitch = w4_x_tile_pitch(config) / 2;
  CUTE_HOST_DEVICE static auto smem_layout_x(int tokens) {
    return cute::make_layout(cute::Shape<BLK_N, BLK_K, cute::_2>{},
                             cute::make_stride(cute::Int<x_pitch>{}, cute::_1{}, tokens * x_pitch));
  }
  // The epilogue's sums: tiles of (16 rows of W, BLK_N), swizzled against bank conflicts, one for each (warp whose sums
  // the CTA reduces, split of the cluster).
  using SumsSwizzle = cute::Swizzle<2, 2, 3>;
  using SmemLayoutSum = decltype(cute::composition(
      SumsSwizzle{}, cute::Layout<cute::Shape<cute::_16, BLK_N>, cute::Stride<cute::_1, cute::Int<w4_sums_pitch>>>{}));
  CUTE_HOST_DEVICE static auto sums_of_warps(int warps) {
    return cute::make_layout(cute::Shape<cute::Int<w4_warps>, cute::Int<clusters ? w4_max_cluster : 1>>{},
                             cute::make_stride(cute::size(SmemLayoutSum{}), warps * cute::size(SmemLayoutSum{})));
  }

  // mma m16n8k16 of one warp; a k-block of 32 is two k-steps.
  using TiledMma =
      decltype(cute::make_tiled_mma(tile::Mma16816<T>{}, cute::Layout<cute::Shape<cute::_1, cute::_1, cute::_1>>{},
                                    cute::Tile<cute::_16, cute::_8, cute::_32>{}));

  // x: all threads of the CTA copy 16-byte vectors, 8 or 16 tokens at once, zero-filled past the end of K.
  using XThreads =
      std::conditional_t<n_tiles == 1,
                         cute::Layout<cute::Shape<cute::_8, cute::_32>, cute::Stride<cute::_32, cute::_1>>,
                         cute::Layout<cute::Shape<cute::_16, cute::_16>, cute::Stride<cute::_16, cute::_1>>>;
  using GmemCopyX =
      decltype(cute::make_tiled_copy(cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<cute::uint128_t>, MmaT>{},
                                     XThreads{}, cute::Layout<cute::Shape<cute::_1, cute::_8>>{}));
  using SmemCopyX = decltype(cute::make_tiled_copy_B(cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, MmaT>{}, TiledMma{}));
};

}  // namespace rooftile::gpu
