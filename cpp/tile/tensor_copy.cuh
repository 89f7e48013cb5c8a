// SPDX-License-Identifier: Apache-2.0
// Copies by Hopper's copy engine, and the barriers in shared memory that say when they have come. sm_90 and later.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace rooftile::tile {

#if __CUDA_ARCH__ >= 900

__device__ __forceinline__ std::uint32_t shared_address(const void* p) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(p));
}

// A phase of a barrier ends when `arrivals` threads have arrived and all bytes that were expected have come.
struct Barrier {
  std::uint64_t state;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)), "r"(arrivals) : "memory");
  }
  // One thread arrives and expects that many bytes more.
  __device__ __forceinline__ void arrive_and_expect(int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)), "r"(bytes)
                 : "memory");
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  // At the same barrier of block `rank` of the cluster.
  __device__ __forceinline__ void arrive_in_block(int rank) {
    asm volatile("{\n\t.reg .b32 at;\n\tmapa.shared::cluster.u32 at, %0, %1;\n\tmbarrier.arrive.shared::cluster.b64 _, "
                 "[at];\n\t}" ::"r"(shared_address(this)),
                 "r"(rank)
                 : "memory");
  }
  // This thread arrives when all it copies by cp.async has come.
  __device__ __forceinline__ void arrive_with_copies() {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(shared_address(this)) : "memory");
  }
  // Until the phase of that parity has ended; phases are 0, 1, 0 ... The one before the first counts as ended, with
  // parity 1.
  __device__ __forceinline__ void wait(int parity) {
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@done bra ended;\n\tbra again;\n"
        "ended:\n\t}" ::"r"(shared_address(this)),
        "r"(parity)
        : "memory");
  }
};
// What init wrote is seen by other blocks of the cluster and by the copy engine; a cluster barrier follows.
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// What the map says will be needed soon.
__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// A box of the tensor behind `map`, from element (column, row) on, to the same place in the shared memory of every
// block of the cluster whose bit is set, where its bytes count at the same barrier. What lies outside of the tensor
// becomes 0.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, int column, int row, Barrier& barrier,
                                         std::uint16_t blocks) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
               "[%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
               "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier)), "h"(blocks)
               : "memory");
}
// The same to this block alone.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap& map, int column, int row, Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(to)),
      "l"(&map), "r"(column), "r"(row), "r"(shared_address(&barrier))
      : "memory");
}
// Starts a box on its way to L2.
__device__ __forceinline__ void prefetch_box(const CUtensorMap& map, int column, int row) {
  asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global [%0, {%1, %2}];" ::"l"(&map), "r"(column), "r"(row)
               : "memory");
}

#endif

}  // namespace rooftile::tile
