// SPDX-License-Identifier: Apache-2.0
// Synchronisation of the warps that share a tile, and values that are equal in all lanes of a warp.
#pragma once

namespace rooftile::tile {

// Barrier over the `Warps` warps of tile `tile`; orders their shared-memory accesses. Every tile of the CTA has the
// same number of warps, and a CTA has at most 15 tiles: hardware barrier 0 belongs to __syncthreads, tile i takes i +
// 1. CUTLASS's NamedBarrier keeps eight of the sixteen to itself and lets the compiler move accesses across it; CUDA's
// __barrier_sync_count is not .aligned, which costs split_kv up to 80 instructions.
template <int Warps>
__device__ __forceinline__ void sync_tile_warps(int tile) {
  if constexpr (Warps == 1) __syncwarp();
  else asm volatile("bar.sync %0, %1;" ::"r"(tile + 1), "n"(32 * Warps) : "memory");
}

// x, which all lanes of the warp hold with the same value, in a form the compiler knows to be warp-uniform: branches on
// the result need no reconvergence, and the result may live in a uniform register.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

}  // namespace rooftile::tile
