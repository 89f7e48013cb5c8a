// SPDX-License-Identifier: Apache-2.0
// TMA loads and the mbarriers they complete on. Barrier operations keep PTX's default scope: with the cluster's, every
// step of a main loop fenced the whole GPU and emptied L1. sm_90 and later.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace rooftile::tile {

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// An mbarrier in shared memory. A phase completes when `arrivals` threads have arrived and all expected bytes have
// landed.
struct Barrier {
  std::uint64_t state;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
  }
  // One thread arrives and adds `bytes` to the bytes expected in this phase.
  __device__ __forceinline__ void arrive_and_expect_tx(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  // Arrives at the same barrier of CTA `rank` of the cluster.
  __device__ __forceinline__ void arrive_at_cta(int rank) {
    asm volatile("{\n\t.reg .b32 at;\n\tmapa.shared::cluster.u32 at, %0, %1;\n\tmbarrier.arrive.shared::cluster.b64 _, "
                 "[at];\n\t}" ::"r"(shared_address(this)),
                 "r"(rank)
                 : "memory");
  }
  // This thread arrives when all its cp.async copies so far have landed.
  __device__ __forceinline__ void arrive_on_cp_async() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(this)) : "memory");
  }
  // Waits until the phase of that parity has completed; phases have parity 0, 1, 0, ... A new barrier counts as one
  // whose phase of parity 1 has completed.
  __device__ __forceinline__ void wait(int parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@done bra ended;\n\tbra again;\n"
        "ended:\n\t}" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};
// Makes initialised barriers visible to the other CTAs of the cluster and to TMA; a cluster barrier must follow.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void prefetch_tma_descriptor(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Loads the TMA tile of `map` at element (column, row) into shared memory, at the same offset in every CTA of the
// cluster whose bit is set in cta_mask; its bytes count at the same barrier of each of these CTAs. Elements outside of
// the tensor are zero-filled.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, int column, int row, Barrier& barrier,
                                         std::uint16_t cta_mask) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
               "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
               "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier)), "h"(cta_mask)
               : "memory");
}
// Loads into this CTA alone.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& map, int column, int row, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier))
      : "memory");
}
// Prefetches the TMA tile into L2.
__device__ __forceinline__ void tma_prefetch(const CUtensorMap& map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(column), "r"(row)
               : "memory");
}

#endif

}  // namespace rooftile::tile
