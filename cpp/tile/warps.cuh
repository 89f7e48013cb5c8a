// SPDX-License-Identifier: Apache-2.0
// Synchronisation of the warps that share a tile, and what the compiler is told of values: equal in all lanes of a warp,
// or not to be computed again.
#pragma once

namespace rooftile::tile {

// Barrier over the `Warps` warps of tile `tile`; orders their shared-memory accesses. Every tile of the CTA has the
// same number of warps, and a CTA has at most 15 tiles: hardware barrier 0 belongs to __syncthreads, tile i takes i +
// 1.
template <int Warps>
__device__ __forceinline__ void sync_tile_warps(int tile) {
  if constexpr (Warps == 1) __syncwarp();
  else asm volatile("bar.sync %0, %1;" ::"r"(tile + 1), "n"(32 * Warps) : "memory");
}

// x, which all lanes of the warp hold with the same value, in a form the compiler knows to be warp-uniform: branches on
// the result need no reconvergence, and the result may live in a uniform register.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// Hides from the compiler where the values come from: it keeps them in registers, and neither moves their computation
// behind this point nor repeats it there.
template <class... X>
__device__ __forceinline__ void hide_origin(X&... values) {
  const auto hide = [](auto& x) {
    if constexpr (sizeof(x) == 8) asm volatile("" : "+l"(x));
    else asm volatile("" : "+r"(x));
  };
  (hide(values), ...);
}

}  // namespace rooftile::tile
