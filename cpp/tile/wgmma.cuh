// SPDX-License-Identifier: Apache-2.0
// wgmma of one warp group: D[64, N] += A[64, 16] B[16, N] in fp32. A comes from registers (warp i holds rows 16 i to
// 16 i + 15, fragments as in tile/mma.cuh), B from shared memory. wgmma is asynchronous: the warps may touch the
// registers of A and D again after cute::warpgroup_wait.
//   D: d[4 j], d[4 j + 1] = (row g, columns 8 j + 2t, 8 j + 2t + 1), d[4 j + 2], d[4 j + 3] = (row g + 8, ...)
// Only code compiled for sm_90a may contain wgmma: kernels test `#ifdef ROOFTILE_WGMMA`.
#pragma once

#include <cute/arch/mma_sm90_gmma.hpp>
#include <utility>

#include "tile/mma.cuh"

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ROOFTILE_WGMMA 1

namespace rooftile::tile {

// The shared-memory descriptor of a K-major operand in 128-byte swizzle, as a TMA load leaves it: one row of 64
// elements (128 bytes) for each row of A or column of B, 8 rows in 1024 bytes. at: 1024-byte aligned, plus 32 bytes for
// every 16 k.
__device__ __forceinline__ std::uint64_t make_smem_desc(const void* at) {
  const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
  return std::uint64_t{address >> 4 & 0x3fff} | std::uint64_t{1} << 16 | std::uint64_t{64} << 32 |
         std::uint64_t{1} << 62;
}

template <class T, int N>
struct WgmmaAtom;
#define ROOFTILE_WGMMA_ATOM(n, type, name)                                                                        \
  template <>                                                                                                     \
  struct WgmmaAtom<type, n> {                                                                                     \
    using RS =                                                                                                    \
        cute::SM90::GMMA::MMA_64x##n##x16_F32##name##_RS<cute::SM90::GMMA::Major::K, cute::SM90::GMMA::Major::K>; \
  };
#define ROOFTILE_WGMMA_ATOMS(n) ROOFTILE_WGMMA_ATOM(n, half, F16F16) ROOFTILE_WGMMA_ATOM(n, bf16, BF16BF16)
ROOFTILE_WGMMA_ATOMS(32)
ROOFTILE_WGMMA_ATOMS(64)
ROOFTILE_WGMMA_ATOMS(128)
#undef ROOFTILE_WGMMA_ATOMS
#undef ROOFTILE_WGMMA_ATOM

// A from registers. d: (N / 8 column tiles, 4) flattened, M = N / 2. accumulate false: d is overwritten.
template <class T, int M>
__device__ __forceinline__ void wgmma(float (&d)[M], const FragmentA& a, std::uint64_t b, bool accumulate) {
  [&]<std::size_t... I>(std::index_sequence<I...>) {
    WgmmaAtom<T, 2 * M>::RS::fma(a.r[0], a.r[1], a.r[2], a.r[3], b, d[I]...,
                                 accumulate ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
  }(std::make_index_sequence<M>{});
}
// The compiler moves no use of d across this point: cute::warpgroup_fence_operand for an array.
template <int M>
__device__ __forceinline__ void warpgroup_fence_operand(float (&d)[M]) {
#pragma unroll
  for (float& x : d) asm volatile("" : "+f"(x)::"memory");
}

}  // namespace rooftile::tile
#endif
