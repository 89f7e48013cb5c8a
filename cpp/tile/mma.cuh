// SPDX-License-Identifier: Apache-2.0
// mma.m16n8k16: D (16 x 8, fp32) += A (16 x 16) B (16 x 8), and the loads of its operands from shared memory.
// Lane (g, t) = (lane / 4, lane % 4) holds, two neighbouring elements a register,
//   A: a0 = (m g, k 2t..), a1 = (m g + 8, k 2t..), a2 = (m g, k 2t + 8..), a3 = (m g + 8, k 2t + 8..)
//   B: b0 = (k 2t.., n g), b1 = (k 2t + 8.., n g)
//   D: d0, d1 = (m g, n 2t, 2t + 1), d2, d3 = (m g + 8, n 2t, 2t + 1)
#pragma once

#include <cute/arch/copy_sm75.hpp>
#include <cute/arch/copy_sm80.hpp>
#include <cute/arch/mma_sm80.hpp>
#include <cute/numeric/numeric_types.hpp>
#include <type_traits>

#include "tile/element.cuh"

namespace rooftile::tile {

// T = half or bf16 as CuTe's and CUTLASS's layouts and atoms name it.
template <class T>
using MmaType = std::conditional_t<std::is_same_v<T, half>, cute::half_t, cute::bfloat16_t>;
template <class T>
using Mma16816 = std::conditional_t<std::is_same_v<T, half>, cute::SM80_16x8x16_F32F16F16F32_TN,
                                    cute::SM80_16x8x16_F32BF16BF16F32_TN>;

struct FragmentA {
  std::uint32_t r[4];  // a0 .. a3, a pair of 16-bit elements each
};
struct FragmentB {
  std::uint32_t r[2];  // b0, b1, a pair of 16-bit elements each
};

// d += a b for T = half or bf16; d (4): d0 .. d3.
template <class T>
__device__ __forceinline__ void mma(float (&d)[4], const FragmentA& a, const FragmentB& b) {
  Mma16816<T>::fma(d[0], d[1], d[2], d[3], a.r[0], a.r[1], a.r[2], a.r[3], b.r[0], b.r[1], d[0], d[1], d[2], d[3]);
}

// Transposes an 8 x 8 matrix of 16-bit elements across the warp: before and after, lane (g, t) holds (row g, columns
// 2t, 2t + 1).
__device__ __forceinline__ std::uint32_t transpose_8x8(std::uint32_t pair) {
  std::uint32_t transposed;
  cute::SM75_U32x1_MOVM_T::copy(pair, transposed);
  return transposed;
}

// ldmatrix.x4 loads four 8 x 8 matrices of 16-bit elements from shared memory: lane i passes the address of row i % 8
// of matrix i / 8, and r[j] holds matrix j. The _trans form transposes each matrix.
__device__ __forceinline__ FragmentA ldmatrix_x4(const void* row) {
  FragmentA a;
  cute::SM75_U32x4_LDSM_N::copy(*static_cast<const cute::uint128_t*>(row), a.r[0], a.r[1], a.r[2], a.r[3]);
  return a;
}
__device__ __forceinline__ FragmentA ldmatrix_x4_trans(const void* row) {
  FragmentA a;
  cute::SM75_U16x8_LDSM_T::copy(*static_cast<const cute::uint128_t*>(row), a.r[0], a.r[1], a.r[2], a.r[3]);
  return a;
}

}  // namespace rooftile::tile
