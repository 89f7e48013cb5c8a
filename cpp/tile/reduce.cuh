// SPDX-License-Identifier: Apache-2.0
// Reductions over the lanes of a warp and the warps of a block. The order is fixed by the number of threads alone, and
// every thread ends with the same bits: butterflies of commutative operations.
#pragma once

namespace rooftile::tile {

struct Sum {
  static constexpr float identity = 0.0f;
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Max {  // a NaN does not win; who must see it sees it in a sum
  static constexpr float identity = -__builtin_huge_valf();
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// Over groups of `lanes` neighbouring lanes, a power of two. All 32 lanes of the warp take part.
template <class Op>
__device__ __forceinline__ float reduce_lanes(float x, int lanes, Op op) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2)
    if (mask < lanes) x = op(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

// Over a team: `lanes` lanes of a warp or, above 32, the whole block. shared: 32 floats that no other reduction of the
// launch uses.
template <class Op>
__device__ __forceinline__ float reduce_team(float x, int lanes, float* shared, Op op) {
  x = reduce_lanes(x, lanes, op);
  if (lanes <= 32) return x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (lane == 0) shared[warp] = x;
  __syncthreads();  // every warp's part is in shared memory
  return reduce_lanes(lane < warps ? shared[lane] : Op::identity, 32, op);
}

}  // namespace rooftile::tile
