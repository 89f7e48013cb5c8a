// SPDX-License-Identifier: Apache-2.0
// Loads of bytes that are read once: they leave no trace in the L1.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace rooftile::tile {

template <int Words>
struct alignas(4 * Words) Words32 {
  std::uint32_t w[Words];
};

template <int Words>
__device__ __forceinline__ Words32<Words> load_stream(const void* from) {
  Words32<Words> x;
  static_assert(Words == 2 || Words == 4);
  if constexpr (Words == 4)
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.w[0]), "=r"(x.w[1]), "=r"(x.w[2]), "=r"(x.w[3]) : "l"(from));
  else
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(x.w[0]), "=r"(x.w[1]) : "l"(from));
  return x;
}

}  // namespace rooftile::tile
