// SPDX-License-Identifier: Apache-2.0
// A semaphore in global memory between CTAs of one grid. A CTA that sees `value` also sees what the releasing thread
// wrote before, and what other threads wrote before a barrier with it. The waiting CTA must come later in the grid than
// the releasing one, so that the latter is resident.
#pragma once

#include <cstdint>
#include <cuda/atomic>

namespace rooftile::tile {

__device__ __forceinline__ void release_semaphore(std::uint64_t* at, std::uint64_t value) {
  cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device>(*at).store(value, cuda::memory_order_release);
}
__device__ __forceinline__ void wait_semaphore(std::uint64_t* at, std::uint64_t value) {
  const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device> semaphore(*at);
  while (semaphore.load(cuda::memory_order_acquire) != value) {}
}

}  // namespace rooftile::tile
