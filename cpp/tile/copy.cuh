// SPDX-License-Identifier: Apache-2.0
// 16-byte loads and stores of global memory, L2 prefetches, and cp.async copies to shared memory. Pointers are aligned
// to the size of the access.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm80.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace rooftile::tile {

// Loads data that the CTA reads once. in_l1: allocates L1 lines. The load is coherent: the same launch may write these
// bytes later. CuTe has such a load for sm_100 alone, and CUDA's __ldcg may move across the wait of PDL.
template <bool in_l1 = false>
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 x;
#define ROOFTILE_LOAD(priority)                                       \
  asm volatile("ld.global" priority ".v4.u32 {%0, %1, %2, %3}, [%4];" \
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)           \
               : "l"(from)                                            \
               : "memory")
  if constexpr (in_l1) ROOFTILE_LOAD("");
  else ROOFTILE_LOAD(".L1::no_allocate");
#undef ROOFTILE_LOAD
  return x;
}

// Loads or stores consecutive elements as one Vec; its alignment is that of the first. For vectors that no tensor of
// CuTe holds: `recast` would need a layout for a single access.
template <class Vec, class X>
__device__ __forceinline__ Vec load_vec_at(const X* from) {
  return *reinterpret_cast<const Vec*>(from);
}
template <class Vec, class X>
__device__ __forceinline__ void store_vec_at(X* to, const Vec& vec) {
  *reinterpret_cast<Vec*>(to) = vec;
}

// Prefetches `bytes` bytes from `at` on into L2; both are multiples of 16. A no-op before sm_90, which lacks the
// instruction.
__device__ __forceinline__ void prefetch_l2_bulk(const void* at, int bytes) {
#ifdef CUTE_ARCH_TMA_SM90_ENABLED
  cute::SM90_BULK_COPY_G2S::PREFETCH::copy(at, bytes);
#endif
}
// Prefetches the L2 line that holds `at`.
__device__ __forceinline__ void prefetch_l2(const void* at) { cute::prefetch(at); }

// Stores 16 bytes with one instruction. CuTe's copies are ordinary stores, which the compiler may split into four
// words; CUDA's __stwb is a strong store, and CUTLASS's global_store lets the compiler move loads across it.
__device__ __forceinline__ void store(void* to, uint4 x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// Copies 16 bytes from global to shared memory, bypassing L1. The copy carries no L2 cache policy: with one, CUDA
// 13.0's ptxas assigned an invalid uniform register in one kernel, which then failed with an illegal instruction.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
  cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(*static_cast<const cute::uint128_t*>(global),
                                                         *static_cast<cute::uint128_t*>(shared));
}

// cp_async_16 if `valid`; else writes 16 zero bytes and does not read `global`.
__device__ __forceinline__ void cp_async_16_zfill(void* shared, const void* global, bool valid) {
  cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*static_cast<const cute::uint128_t*>(global),
                                                               *static_cast<cute::uint128_t*>(shared), valid);
}

// Copies 8 bytes from global to shared memory, through L1.
__device__ __forceinline__ void cp_async_8(void* shared, const void* global) {
  cute::SM80_CP_ASYNC_CACHEALWAYS<std::uint64_t>::copy(*static_cast<const std::uint64_t*>(global),
                                                       *static_cast<std::uint64_t*>(shared));
}

}  // namespace rooftile::tile
