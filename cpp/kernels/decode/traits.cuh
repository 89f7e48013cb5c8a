// SPDX-License-Identifier: Apache-2.0
// What a config's element type and head_dim fix for rows of 16 bits: layouts in shared memory, copies and MMAs.
//   S^T [16 tokens, packed rows] = K [16 tokens, D] Q^T     K is the A operand, queries are the B operand
//   O^T [D, packed rows]        += V^T [D, 16 tokens] P^T   V^T is the A operand, weights P^T are the B operand
#pragma once

#include <bit>
#include <cute/tensor.hpp>
#include <type_traits>

#include "kernels/decode/scheduler.h"
#include "tile/element.cuh"

namespace rooftile::gpu {

// T: element type of q and of the rows. D: head_dim.
template <class T, int D>
struct Bits16Traits {
  static constexpr bool is_half = std::is_same_v<T, tile::half>;
  using Element = std::conditional_t<is_half, cute::half_t, cute::bfloat16_t>;
  static constexpr int head_dim = D, tile_tokens = 16;
  static constexpr int vec = 8, row_vecs = D / vec;  // elements of a 16-byte vector; vectors of a row

  // Shared memory: panels of `panel` channels, all rows of a panel one after another. The 16-byte vectors of a row are
  // swizzled by the low bits of its index, so that neither ldmatrix nor cp.async meets a bank twice.
  static constexpr int panel = (D & (D - 1)) == 0 ? D : D % 64 == 0 ? 64 : 32;
  static constexpr int log2_panel_vecs = std::bit_width(static_cast<unsigned>(panel / vec)) - 1;
  using Swizzle = std::conditional_t<panel == 32, cute::Swizzle<2, 3, 3>, cute::Swizzle<3, 3, log2_panel_vecs>>;
  using SmemAtom = decltype(cute::composition(
      Swizzle{}, cute::Layout<cute::Shape<cute::_8, cute::Int<panel>>, cute::Stride<cute::Int<panel>, cute::_1>>{}));
  template <int Rows>
  using SmemLayout =
      decltype(cute::tile_to_shape(SmemAtom{}, cute::Shape<cute::Int<Rows>, cute::Int<D>>{}));  // (Rows, D)
  // The same rows of a KV tile as V^T.
  using Transpose = cute::Layout<cute::Shape<cute::Int<D>, cute::Int<tile_tokens>>,
                                 cute::Stride<cute::Int<tile_tokens>, cute::_1>>;  // (D, 16 tokens) -> (16 tokens, D)

  // Global to shared memory by Threads threads: neighbours copy neighbouring vectors of a row.
  template <int Threads>
  using GmemCopy =
      decltype(cute::make_tiled_copy(cute::Copy_Atom<cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>, Element>{},
                                     cute::Layout<cute::Shape<cute::Int<Threads / row_vecs>, cute::Int<row_vecs>>,
                                                  cute::Stride<cute::Int<row_vecs>, cute::_1>>{},
                                     cute::Layout<cute::Shape<cute::_1, cute::Int<vec>>>{}));

  // One warp's MMA, and the same with two k-steps side by side, which one ldmatrix.x4 fills with a B operand.
  using MmaAtom = cute::MMA_Atom<
      std::conditional_t<is_half, cute::SM80_16x8x16_F32F16F16F32_TN, cute::SM80_16x8x16_F32BF16BF16F32_TN>>;
  using TiledMma = decltype(cute::make_tiled_mma(MmaAtom{}));
  using TiledMmaK32 =
      decltype(cute::make_tiled_mma(MmaAtom{}, cute::Layout<cute::Shape<cute::_1, cute::_1, cute::_1>>{},
                                    cute::Tile<cute::_16, cute::_8, cute::_32>{}));
  // Shared memory to registers.
  using SmemCopyK = decltype(cute::make_tiled_copy_A(cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>{}, TiledMma{}));
  using SmemCopyV = decltype(cute::make_tiled_copy_A(cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>{}, TiledMma{}));
  using SmemCopyQ =
      decltype(cute::make_tiled_copy_B(cute::Copy_Atom<cute::SM75_U32x4_LDSM_N, Element>{}, TiledMmaK32{}));
  using SmemCopyP =
      decltype(cute::make_tiled_copy_B(cute::Copy_Atom<cute::SM75_U16x8_LDSM_T, Element>{}, TiledMmaK32{}));
  // Registers to registers: transposes an 8 x 8 matrix across the warp.
  using TransposeCopy = cute::Copy_Atom<cute::SM75_U32x1_MOVM_T, std::uint32_t>;

  // Rows of 16 bits at `at` in shared memory.
  template <int Rows, class Pointer>
  __device__ __forceinline__ static auto smem_rows(Pointer* at) {
    return cute::make_tensor(cute::make_smem_ptr<Element>(at), SmemLayout<Rows>{});  // (Rows, D)
  }
  // N n-tiles of 8 packed query rows as B operands.
  template <int N>
  using QueryFragment =
      decltype(TiledMmaK32{}.get_slice(0).partition_fragment_B(smem_rows<8 * N>(static_cast<T*>(nullptr))));
};

}  // namespace rooftile::gpu
