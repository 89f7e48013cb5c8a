// SPDX-License-Identifier: Apache-2.0
// Synchronisation beyond a CTA: programmatic dependent launch (PDL) between kernels, barriers and shared-memory
// addresses within a cluster. CUDA's functions, not CuTe's: cute::cluster_arrive and cluster_wait are .aligned, so all
// lanes of a warp would have to arrive together, and CUTLASS's PDL waits let the compiler move loads across them.
#pragma once

#include <cuda_runtime.h>

namespace rooftile::tile {

// PDL: waits until the previous kernel of the stream has ended and its writes are visible. Every thread that reads what
// the previous kernel wrote, or writes what it reads, calls this first.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
// PDL: the next kernel of the stream may start once a thread of each CTA has called this, or the CTA has exited, and
// there is room for it.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Whether the architecture has clusters.
#if __CUDA_ARCH__ >= 900
inline constexpr bool has_clusters = true;
#else
inline constexpr bool has_clusters = false;
#endif

// The address of the same shared-memory variable in CTA `rank` of the cluster. Without clusters: the own address.
// CuTe's set_block_rank returns no pointer but an address of the shared::cluster window. CUDA's
// __cluster_map_shared_rank is pure: the compiler computes it before a main loop, which then has fewer registers.
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
// Index of this CTA's cluster in the grid, and the CTA's rank in the cluster. Without clusters: (blockIdx.x, 0). CuTe's
// cluster_id_in_grid and block_rank_in_cluster are volatile, so the compiler does not read them again where they
// are used, but keeps them: up to 16 registers more in split_kv of head_dim 64.
struct ClusterCoord {
  int cluster, rank;
};
__device__ __forceinline__ ClusterCoord cluster_coord() {
#if __CUDA_ARCH__ >= 900
  ClusterCoord coord;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(coord.cluster));
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(coord.rank));
  return coord;
#else
  return {static_cast<int>(blockIdx.x), 0};
#endif
}
// Barrier of all threads of the cluster (exited threads count as arrived); writes before it, to shared and global
// memory, are visible after it.
__device__ __forceinline__ void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  __cluster_barrier_arrive();
  __cluster_barrier_wait();
#endif
}

// The two halves of a cluster barrier without memory ordering: wait_for_cluster waits until all threads of the cluster
// have arrived or exited. A load that a thread has issued may still be on its way when the thread arrives; it is over
// once its value was used. Without clusters both do nothing.
__device__ __forceinline__ void arrive_at_cluster() {
#if __CUDA_ARCH__ >= 900
  __cluster_barrier_arrive_relaxed();
#endif
}
__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  __cluster_barrier_wait();
#endif
}

}  // namespace rooftile::tile
