// SPDX-License-Identifier: Apache-2.0
// The tensor-core step that every warp-level kernel is made of: D[16, 8] += A[16, 16] B[16, 8] in fp32, and the loads
// that bring its operands. Lane (g, t) = (lane / 4, lane % 4) holds
//   A: a0 = (row g, k 2t..), a1 = (row g + 8, k 2t..), a2 = (row g, k 2t + 8..), a3 = (row g + 8, k 2t + 8..)
//   B: b0 = (k 2t.., column g), b1 = (k 2t + 8.., column g)
//   D: d0, d1 = (row g, columns 2t, 2t + 1), d2, d3 = (row g + 8, ...)
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>

#include "tile/element.cuh"

namespace rooftile::tile {

struct FragmentA {
  std::uint32_t r[4];
};
struct FragmentB {
  std::uint32_t r[2];
};

template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const FragmentA& a, const FragmentB& b) {
  if constexpr (std::is_same_v<T, half>)
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(d[0], d[1], d[2], d[3], a.r[0], a.r[1], a.r[2], a.r[3], b.r[0], b.r[1],
                                            d[0], d[1], d[2], d[3]);
  else
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(d[0], d[1], d[2], d[3], a.r[0], a.r[1], a.r[2], a.r[3], b.r[0], b.r[1],
                                              d[0], d[1], d[2], d[3]);
}

// An 8 x 8 tile of 16-bit elements held as two neighbours a lane (row g, columns 2t, 2t + 1), transposed.
__device__ __forceinline__ std::uint32_t transpose_8x8(std::uint32_t pair) {
  std::uint32_t turned;
  cute::SM75_U32x1_MOVM_T::copy(pair, turned);
  return turned;
}

// Four 8 x 8 tiles from shared memory, lane i naming row i % 8 of tile i / 8: as they lie, and transposed.
__device__ __forceinline__ FragmentA load_8x8x4(const void* row) {
  FragmentA a;
  cute::SM75_U32x4_LDSM_N::copy(*static_cast<const cute::uint128_t*>(row), a.r[0], a.r[1], a.r[2], a.r[3]);
  return a;
}
__device__ __forceinline__ FragmentA load_8x8x4_transposed(const void* row) {
  FragmentA a;
  cute::SM75_U16x8_LDSM_T::copy(*static_cast<const cute::uint128_t*>(row), a.r[0], a.r[1], a.r[2], a.r[3]);
  return a;
}

}  // namespace rooftile::tile
