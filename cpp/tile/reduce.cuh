// SPDX-License-Identifier: Apache-2.0
// All-reductions over the lanes of a warp and over the warps of a CTA. The number of threads alone fixes the order of
// the operations. Every thread gets the same bits, because the butterfly's operations are commutative.
#pragma once

namespace rooftile::tile {

struct Sum {
  static constexpr float identity = 0.0f;
  __device__ float operator()(float a, float b) const { return a + b; }
};
struct Max {  // ignores NaN; a caller that must notice a NaN finds it in a sum
  static constexpr float identity = -__builtin_huge_valf();
  __device__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

// All-reduces x over each group of `lanes` neighbouring lanes; `lanes` is a power of two. All 32 lanes of the warp
// call.
template <class Op>
__device__ __forceinline__ float reduce_lanes(float x, int lanes, Op op) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2)
    if (mask < lanes) x = op(x, __shfl_xor_sync(0xffffffffu, x, mask));
  return x;
}

// All-reduces x over the threads of a row: `lanes` neighbouring lanes of a warp or, above 32, the whole CTA.
// shared: 32 floats of shared memory that no other reduction of the launch uses, so one barrier suffices.
template <class Op>
__device__ __forceinline__ float reduce_row(float x, int lanes, float* shared, Op op) {
  x = reduce_lanes(x, lanes, op);
  if (lanes <= 32) return x;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
  if (lane == 0) shared[warp] = x;
  __syncthreads();  // all warps -> all warps: every warp's partial result is in `shared`
  return reduce_lanes(lane < warps ? shared[lane] : Op::identity, 32, op);
}

}  // namespace rooftile::tile
