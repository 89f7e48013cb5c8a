// SPDX-License-Identifier: Apache-2.0
// 16-byte accesses to global memory and copies from there. Pointers are multiples of 16 bytes.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm80.hpp"

namespace rooftile::tile {

// Read once: it takes no room in L1, which is left to what is read again. Coherent: the launch may write the same bytes
// later.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// Read by many and written by nobody during the launch.
__device__ __forceinline__ uint4 load_shared_by_many(const void* from) {
  return __ldg(static_cast<const uint4*>(from));
}

// Starts on its way to L2 what will be read soon: `bytes` from `at` on, both multiples of 16 (nothing on GPUs before
// Hopper); or the line that `at` lies in.
__device__ __forceinline__ void prefetch_run(const void* at, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(at), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// One instruction: left to the compiler, words that come from packed pairs may be stored one by one.
__device__ __forceinline__ void store(void* to, uint4 x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// 16 bytes from global to shared memory, past L1. (With an L2 policy, CUDA 13.0's ptxas took an impossible uniform
// register for it in one kernel, which then stopped with an illegal instruction: no hint.)
__device__ __forceinline__ void cp_async_16(void* shared, const void* global) {
  cute::SM80_CP_ASYNC_CACHEGLOBAL<cute::uint128_t>::copy(*static_cast<const cute::uint128_t*>(global),
                                                         *static_cast<cute::uint128_t*>(shared));
}

// The same, or 16 bytes of 0 where `there` is false: nothing is read then.
__device__ __forceinline__ void cp_async_16_or_zeros(void* shared, const void* global, bool there) {
  cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*static_cast<const cute::uint128_t*>(global),
                                                               *static_cast<cute::uint128_t*>(shared), there);
}

// 8 bytes; through L1.
__device__ __forceinline__ void cp_async_8(void* shared, const void* global) {
  cute::SM80_CP_ASYNC_CACHEALWAYS<std::uint64_t>::copy(*static_cast<const std::uint64_t*>(global),
                                                       *static_cast<std::uint64_t*>(shared));
}

}  // namespace rooftile::tile
