// SPDX-License-Identifier: Apache-2.0
// 16-byte accesses to global memory, and copies that CuTe's atoms have no cache hint for. Pointers are multiples of 16 bytes.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm80.hpp"
#include "cute/arch/util.hpp"

namespace rooftile::tile {

// Read once: it takes no room in L1, which is left to what is read again. Coherent: the launch may write the same bytes later.
__device__ __forceinline__ uint4 load_once(const void* from) {
  uint4 x;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
               : "l"(from)
               : "memory");
  return x;
}

// Read by many and written by nobody during the launch.
__device__ __forceinline__ uint4 load_shared_by_many(const void* from) { return __ldg(static_cast<const uint4*>(from)); }

// Starts on its way to L2 what will be read soon. Any alignment.
__device__ __forceinline__ void prefetch(const void* at) { asm volatile("prefetch.global.L2 [%0];" ::"l"(at)); }

// One instruction: left to the compiler, words that come from packed pairs may be stored one by one.
__device__ __forceinline__ void store(void* to, uint4 x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

// L2 policy of bytes that are read once: they go first when room is needed.
__device__ __forceinline__ std::uint64_t evict_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes from global to shared memory, past L1.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(cute::cast_smem_ptr_to_uint(shared)),
               "l"(global), "l"(policy) : "memory");
}

}  // namespace rooftile::tile
