// SPDX-License-Identifier: Apache-2.0
// A few warps of a block that work on the same data.
#pragma once

namespace rooftile::tile {

// All threads of the block's team number `team` have come here, and see what the others wrote to shared memory before.
// Warps: of every team; a block has 15 teams at most.
template <int Warps>
__device__ __forceinline__ void sync_team(int team) {
  if constexpr (Warps == 1) __syncwarp();
  else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(32 * Warps) : "memory");  // barrier 0 is the block's
}

// What all lanes of a warp have, so that the compiler knows it too: branches on it are no divergence to prepare for,
// and it may lie in a uniform register. A warp's work.
__device__ __forceinline__ int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

}  // namespace rooftile::tile
