// SPDX-License-Identifier: Apache-2.0
// A few warps of a block that work on the same data.
#pragma once

namespace rooftile::tile {

// All threads of the block's team number `team` have come here, and see what the others wrote to shared memory before.
// Warps: of every team; a block has 15 teams at most.
template <int Warps>
__device__ __forceinline__ void sync_team(int team) {
  if constexpr (Warps == 1) __syncwarp();
  else asm volatile("bar.sync %0, %1;" ::"r"(team + 1), "n"(32 * Warps) : "memory");   // barrier 0 is the block's
}

}  // namespace rooftile::tile
