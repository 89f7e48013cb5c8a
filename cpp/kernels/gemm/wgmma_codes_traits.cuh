// SPDX-License-Identifier: Apache-2.0
// The types of wgmma_codes.cuh: the layouts of its tensors, MMA and TMA atoms, shared memory.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cute/tensor.hpp>

#include "kernels/gemm/code_traits.cuh"
#include "kernels/gemm/plan.h"

namespace rooftile::gpu {

// The type of scales and minima of rounded operands; void: exact operands, known at run time.
template <W4Operand operand>
using W4OperandScale = std::conditional_t<operand == W4Operand::f16_scales, tile::half,
                                          std::conditional_t<operand == W4Operand::bf16_scales, tile::bf16, void>>;

// ring[stage][warp]: a warp's next stage is `warps` Stages further. A step of rounded operands may have four scale
// blocks.
template <int bits, int config, W4Operand operand>
using W4WgmmaStages = W4StageTraits<bits, w4_wgmma_config(bits, config).stages, w4_wgmma_config(bits, config).warps(),
                                    W4OperandScale<operand>,
                                    operand == W4Operand::codes      ? 1
                                    : operand == W4Operand::codes_64 ? 2
                                                                     : 4>;

template <class Element, int bits_, int config_, W4Operand operand>
struct W4WgmmaTraits : W4WgmmaStages<bits_, config_, operand> {
  using Base = typename W4WgmmaTraits::W4StageTraits;
  using Base::bits, Base::stages;
  using typename Base::STAGE, typename Base::Stage;
  using T = Element;
  using MmaT = tile::MmaType<T>;
  using Scale = W4OperandScale<operand>;
  static constexpr W4WgmmaConfig config = w4_wgmma_config(bits, config_);
  static constexpr int tokens = config.tokens, warps = config.warps(), ctas_per_sm = config.ctas_per_sm;
  static constexpr int producer_warps = config.threads() / 32 - warps;  // each loads the codes of two consumer warps
  static constexpr bool rounded = !std::is_void_v<Scale>, stream_k = w4_stream_k(config);
  static constexpr int sums = rounded ? 1 : Base::scale_blocks;  // of a step; exact operands: each has its own scale
  // Registers of a thread. One CTA an SM: 2 x 232 + 40 = 504 for three warp groups, 168 each as the kernel starts, all
  // that an SM has; two CTAs: 2 x 104 + 32 = 240, 80 each.
  static constexpr int consumer_registers = ctas_per_sm == 1 ? 232 : 104,
                       producer_registers = ctas_per_sm == 1 ? 40 : 32;
  static_assert(128 * (config.consumer_groups * consumer_registers + producer_registers) <=
                    config.threads() * (65536 / (ctas_per_sm * config.threads()) / 8 * 8),
                "setmaxnreg would wait forever");
  static_assert(warps == 2 * producer_warps);

  using BLK_M = cute::Int<warps * w4_tile_n>;  // rows of W
  using BLK_N = cute::Int<tokens>;
  using BLK_K = cute::Int<w4_step_k>;

  // Two warp groups, 64 rows of W each. A comes from registers, x from shared memory by descriptor.
  using TiledMma = decltype(cute::make_tiled_mma(
      cute::SM90::GMMA::rs_op_selector<MmaT, MmaT, float, cute::Shape<cute::_64, BLK_N, cute::_16>>(),
      cute::Layout<cute::Shape<cute::Int<config.consumer_groups>, cute::_1, cute::_1>>{}));
  static_assert(cute::size(TiledMma{}) == 32 * warps);

  // x as TMA leaves it: (BLK_N, BLK_K, STAGE), rows of 128 bytes, swizzled.
  using SmemLayoutX =
      decltype(cute::tile_to_shape(cute::SM90::GMMA::Layout_K_SW128_Atom<MmaT>{}, cute::Shape<BLK_N, BLK_K, STAGE>{}));
  static constexpr int x_bytes = cute::cosize_v<SmemLayoutX> * sizeof(MmaT) / stages;  // of a stage
  // A TMA load has 64 k of BLK_N tokens, of which each CTA of the cluster loads its part. Op: multicast or not.
  template <class Op>
  using TmaX = cute::Copy_Atom<cute::Copy_Traits<Op, cute::Int<tokens * w4_wgmma_x_tile_k * 8 * sizeof(MmaT)>>, MmaT>;

  // The epilogue's tile: `epilogue_tokens` tokens at a time, (BLK_M, (epilogue tokens, epilogue tiles)), fp32; the
  // pitch is 4 more than BLK_M against bank conflicts.
  static constexpr int epilogue_tokens = w4_epilogue_tokens(config), epilogue_tiles = tokens / epilogue_tokens;
  using SmemLayoutOut =
      cute::Layout<cute::Shape<BLK_M, cute::Shape<cute::Int<epilogue_tokens>, cute::Int<epilogue_tiles>>>,
                   cute::Stride<cute::_1, cute::Stride<cute::Int<BLK_M{} + 4>, cute::_0>>>;

  // Begins at a multiple of 1024 bytes, which the swizzle of x needs.
  struct SharedStorage {
    alignas(16) MmaT x[cute::cosize_v<SmemLayoutX>];                   // (BLK_N, BLK_K, STAGE)
    Stage ring[stages][warps];                                         // (STAGE, consumer warp)
    alignas(16) float out[w4_epilogue_bytes(config) / sizeof(float)];  // SmemLayoutOut
    cutlass::arch::ClusterTransactionBarrier full[stages];             // (STAGE)
    cutlass::arch::ClusterBarrier empty[stages];                       // (STAGE)
  };
  static_assert(cute::cosize_v<SmemLayoutOut> <= w4_epilogue_bytes(config) / sizeof(float));
  static_assert(sizeof(SharedStorage) == w4_wgmma_shared_bytes(bits, config));
};

}  // namespace rooftile::gpu
