// SPDX-License-Identifier: Apache-2.0
// Hopper's tensor-core step of four warps: D[64, N] += A[64, 16] B[16, N] in fp32, A from registers (warp i has rows 16
// i ..., as in tile/mma.cuh) or from shared memory, B from shared memory. It runs on while the warps go on: registers
// of A and D are theirs again after a wait.
//   D: d[4 j], d[4 j + 1] = (row g, columns 8 j + 2t, 8 j + 2t + 1), d[4 j + 2], d[4 j + 3] = (row g + 8, ...)
// Only code for sm_90a can contain it: kernels say `#ifdef ROOFTILE_WGMMA`.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "tile/mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ROOFTILE_WGMMA 1

namespace rooftile::tile {

// An operand as it lies after a tensor copy with 128-byte swizzle: rows of A, columns of B are rows of 64 elements, 128
// bytes; at: 1024-byte aligned, plus 32 bytes for every 16 k.
__device__ __forceinline__ std::uint64_t swizzled_operand(const void* at) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
  return std::uint64_t{address >> 4 & 0x3fff} | std::uint64_t{1} << 16 | std::uint64_t{64} << 32 |
         std::uint64_t{1} << 62;
}

template <class T, int N>
struct WgmmaAtom;
#define ROOFTILE_WGMMA_ATOM(n, type, name)                                                                        \
  template <>                                                                                                     \
  struct WgmmaAtom<type, n> {                                                                                     \
    using Registers =                                                                                             \
        cute::SM90::GMMA::MMA_64x##n##x16_F32##name##_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>; \
    using Shared =                                                                                                \
        cute::SM90::GMMA::MMA_64x##n##x16_F32##name##_SS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>; \
  };
#define ROOFTILE_WGMMA_ATOMS(n) ROOFTILE_WGMMA_ATOM(n, half, F16F16) ROOFTILE_WGMMA_ATOM(n, bf16, BF16BF16)
ROOFTILE_WGMMA_ATOMS(8)
ROOFTILE_WGMMA_ATOMS(16)
ROOFTILE_WGMMA_ATOMS(32)
ROOFTILE_WGMMA_ATOMS(64)
ROOFTILE_WGMMA_ATOMS(128)
#undef ROOFTILE_WGMMA_ATOMS
#undef ROOFTILE_WGMMA_ATOM

// add: to what d holds; else d is new.
template <class T, int M>
__device__ __forceinline__ void wgmma(float (&d)[M], const FragmentA& a, std::uint64_t b, bool add) {
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    WgmmaAtom<T, 2 * M>::Registers::fma(a.r[0], a.r[1], a.r[2], a.r[3], b, d[I]...,
                                        add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }(std::make_index_sequence<M>{});
}
// The same with 64 rows of A from shared memory, added to d.
template <class T, int M>
__device__ __forceinline__ void wgmma(float (&d)[M], std::uint64_t a, std::uint64_t b) {
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    WgmmaAtom<T, 2 * M>::Shared::fma(a, b, d[I]..., cute::SM90::GMMA::ScaleOut::One);
  }(std::make_index_sequence<M>{});
}
// Registers that were written are ready for steps behind it; what was issued is a batch; all batches but the newest
// Left have ended.
__device__ __forceinline__ void begin_wgmma() { cute::warpgroup_arrive(); }
__device__ __forceinline__ void end_wgmma_batch() { cute::warpgroup_commit_batch(); }
template <int Left>
__device__ __forceinline__ void wait_for_wgmma() {
  cute::warpgroup_wait<Left>();
}
// Uses of d stay on their side of it.
template <int M>
__device__ __forceinline__ void pin(float (&d)[M]) {
#pragma unroll
  for (float& x : d) asm volatile("" : "+f"(x)::"memory");
}

}  // namespace rooftile::tile
#endif
