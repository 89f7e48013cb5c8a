// SPDX-License-Identifier: Apache-2.0
// CUTLASS's mbarriers (cutlass/arch/barrier.h) between ordinary reads and writes of shared memory. sm_90 and later.
#pragma once

#include <cutlass/arch/barrier.h>

#include <cstdint>
#include <cuda/atomic>

namespace rooftile::tile {

// The compiler moves no access of memory across this point. CUTLASS's waits and arrivals are PTX without a "memory"
// clobber: alone they keep their order among each other and among CuTe's copies, but not among ordinary accesses.
__device__ __forceinline__ void compiler_fence() { cuda::atomic_signal_fence(cuda::memory_order_seq_cst); }

// Waits until the phase of that parity has completed; reads after it see what was written before the arrivals.
__device__ __forceinline__ void wait_barrier(const cutlass::arch::ClusterBarrier& barrier, std::uint32_t parity) {
  barrier.wait(parity);
  compiler_fence();
}
// Arrives once this thread's reads and writes before it are done.
__device__ __forceinline__ void arrive_at_barrier(const cutlass::arch::ClusterBarrier& barrier) {
  compiler_fence();
  barrier.arrive();
}
// The same at this barrier of CTA `rank` of the cluster.
__device__ __forceinline__ void arrive_at_barrier(const cutlass::arch::ClusterBarrier& barrier, int rank) {
  compiler_fence();
  barrier.arrive(rank);
}
// Arrives when this thread's cp.async copies so far have landed.
__device__ __forceinline__ void arrive_on_copies(const cutlass::arch::ClusterBarrier& barrier) {
  cutlass::arch::cpasync_barrier_arrive_noinc(reinterpret_cast<const std::uint64_t*>(&barrier));
}

}  // namespace rooftile::tile
