// SPDX-License-Identifier: Apache-2.0
// Copies that CuTe's atoms have no cache hint for.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm80.hpp"
#include "cute/arch/util.hpp"

namespace rooftile::tile {

// L2 policy of bytes that are read once: they go first when room is needed.
__device__ __forceinline__ std::uint64_t evict_first() {
  std::uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes from global to shared memory, past L1. Both ends are aligned to 16.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, std::uint64_t policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2;" ::"r"(cute::cast_smem_ptr_to_uint(shared)),
               "l"(global), "l"(policy) : "memory");
}

}  // namespace rooftile::tile
