// SPDX-License-Identifier: Apache-2.0
// Synchronisation beyond a CTA: programmatic dependent launch (PDL) between kernels, barriers and shared-memory
// addresses within a cluster, semaphores between CTAs of a grid.
#pragma once

#include <cstdint>
#include <cuda/atomic>

namespace rooftile::tile {

// PDL: waits until the previous kernel of the stream has ended and its writes are visible. Every thread that reads what
// the previous kernel wrote, or writes what it reads, calls this first.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
// PDL: the next kernel of the stream may start once all CTAs have called this or exited, and there is room for it.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// A semaphore in global memory between CTAs of one grid. A CTA that sees `value` also sees what the releasing thread
// wrote before, and what other threads wrote before a barrier with it. The waiting CTA must come later in the grid than
// the releasing one, so that the latter is resident.
__device__ __forceinline__ void release_semaphore(std::uint64_t* at, std::uint64_t value) {
  cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device>(*at).store(value, cuda::memory_order_release);
}
__device__ __forceinline__ void wait_semaphore(std::uint64_t* at, std::uint64_t value) {
  const cuda::atomic_ref<std::uint64_t, cuda::thread_scope_device> semaphore(*at);
  while (semaphore.load(cuda::memory_order_acquire) != value) {}
}

// Whether the architecture has clusters.
#if __CUDA_ARCH__ >= 900
inline constexpr bool has_clusters = true;
#else
inline constexpr bool has_clusters = false;
#endif

// The address of the same shared-memory variable in CTA `rank` of the cluster. Without clusters: the own address.
template <class X>
__device__ __forceinline__ X* map_shared_rank(X* own, int rank) {
#if __CUDA_ARCH__ >= 900
  X* other;
  asm("mapa.u64 %0, %1, %2;" : "=l"(other) : "l"(own), "r"(rank));
  return other;
#else
  return own;
#endif
}
// Index of this CTA's cluster in the grid, and the CTA's rank in the cluster. Without clusters: (blockIdx.x, 0).
struct ClusterCoord {
  int cluster, rank;
};
__device__ __forceinline__ ClusterCoord cluster_coord() {
#if __CUDA_ARCH__ >= 900
  return {static_cast<int>(__clusterIdx().x), static_cast<int>(__clusterRelativeBlockRank())};
#else
  return {static_cast<int>(blockIdx.x), 0};
#endif
}
// Barrier of all threads of the cluster (exited threads count as arrived); writes before it, to shared and global
// memory, are visible after it.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// The two halves of a cluster barrier without memory ordering: wait_for_cluster waits until all threads of the cluster
// have arrived or exited. A load that a thread has issued may still be on its way when the thread arrives; it is over
// once its value was used. Without clusters both do nothing.
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
