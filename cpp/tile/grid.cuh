// SPDX-License-Identifier: Apache-2.0
// Who waits for whom among blocks. Programmatic dependent launch: a kernel may start before the one before it in the
// stream has ended.
#pragma once

#include <cstdint>

namespace rooftile::tile {

// Everything the previous kernel wrote is there. Needed before the first read of it, in every thread that reads.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
// The next kernel may start as soon as all blocks have said so (or ended) and there is room for it.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// A word in global memory by which one block tells another of the same grid that something is there: what this thread
// wrote, or was told by a barrier that others wrote, is seen by whoever finds the ticket. The block that waits must be
// a later one.
__device__ __forceinline__ void publish(std::uint64_t* at, std::uint64_t ticket) {
  asm volatile("st.release.gpu.u64 [%0], %1;" ::"l"(at), "l"(ticket) : "memory");
}
__device__ __forceinline__ void wait_for_ticket(const std::uint64_t* at, std::uint64_t ticket) {
  std::uint64_t found;
  do asm volatile("ld.acquire.gpu.u64 %0, [%1];" : "=l"(found) : "l"(at) : "memory");
  while (found != ticket);
}

// Whether blocks can be launched as clusters at all.
#if __CUDA_ARCH__ >= 900
inline constexpr bool has_clusters = true;
#else
inline constexpr bool has_clusters = false;
#endif

// Where the same shared variable lies in block `rank` of the cluster; only where there are clusters.
template <class X>
__device__ __forceinline__ X* in_block(X* own, int rank) {
#if __CUDA_ARCH__ >= 900
  X* other;
  asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(own), "r"(rank));
  return other;
#else
  return own;
#endif
}
// Which cluster of the grid this block belongs to, and which of its blocks it is.
struct InCluster {
  int cluster, rank;
};
__device__ __forceinline__ InCluster place_in_cluster() {
#if __CUDA_ARCH__ >= 900
  InCluster at;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(at.cluster));
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(at.rank));
  return at;
#else
  return {static_cast<int>(blockIdx.x), 0};
#endif
}
// All threads of all blocks of the cluster have come here (one that has ended counts as there), and see what the others
// wrote before, in shared and in global memory.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// All threads of all blocks of the cluster say that they have come so far, and wait later until all have said so (one
// that has ended counts as there). What a thread had read, it has read when it says so; what it had written, nobody is
// promised to see. Where there are no clusters a block is one.
__device__ __forceinline__ void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait;" ::: "memory");
#endif
}

}  // namespace rooftile::tile
