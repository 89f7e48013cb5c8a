// SPDX-License-Identifier: Apache-2.0
// 16-byte loads and stores of global memory, L2 prefetches, and cp.async copies to shared memory. Pointers are aligned
// to the size of the access.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm80.hpp"
#include "cute/arch/copy_sm90_tma.hpp"

namespace rooftile::tile {

// Loads data that the CTA reads once, without allocating an L1 line. The load is coherent: the same launch may write
// these bytes later.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// table[index], or `otherwise` without a table: a predicated load, where the compiler may branch. CuTe predicates only
// cp.async.
__device__ __forceinline__ int load_or(const int* table, int index, int otherwise) {
  asm volatile("{\n.reg .pred given;\nsetp.ne.u64 given, %1, 0;\n@given ld.global.b32 %0, [%2];\n}"
               : "+r"(otherwise)
               : "l"(table), "l"(table + index));
  return otherwise;
}

// Loads data that no thread writes during the launch, through the read-only path (ld.global.nc); L1 keeps the line.
__device__ __forceinline__ uint4 load_read_only(const void* from) { return __ldg(static_cast<const uint4*>(from)); }

// Prefetches `bytes` bytes from `at` on into L2; both are multiples of 16. A no-op before sm_90, which lacks the
// instruction.
__device__ __forceinline__ void prefetch_l2_bulk(const void* at, int bytes) {
#if __CUDA_ARCH__ >= 900
  cute::SM90_BULK_COPY_G2S::PREFETCH::copy(at, bytes);
#endif
}
// Prefetches the L2 line that holds `at`.
__device__ __forceinline__ void prefetch_l2(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// Stores 16 bytes with one instruction; the compiler may split an ordinary uint4 store into four words.
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
