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

// One value of each warp of a CTA of up to 512 threads, in shared memory.
struct alignas(16) WarpPartials {
  static constexpr int most = 16;
  float at[most];  // (warps); the identity past the last warp
};

// Values first, first + step, first + 2 step .. of the warps in the order of a butterfly over them, 8 apart first.
template <int first, int step, class Op>
__device__ __forceinline__ float reduce_tree(const WarpPartials& x, Op op) {
  if constexpr (step == WarpPartials::most) return x.at[first];
  else return op(reduce_tree<first, 2 * step>(x, op), reduce_tree<first + step, 2 * step>(x, op));
}

// All-reduces each x[0][i] over the threads of a row: `lanes` neighbouring lanes of a warp or, above 32, the whole CTA,
// with one barrier for all of them. With coarsening a thread stands for `coarsening` threads of a CTA as many times as
// large, thread + c * blockDim.x, and x[c] is theirs: the result has the bits that such a CTA gets. partials: shared
// memory that no other reduction of the launch uses.
template <int coarsening, int count, class Op>
__device__ __forceinline__ void reduce_row(float (&x)[coarsening][count], int lanes, WarpPartials (&partials)[count],
                                           Op op) {
  if (coarsening == 1 && lanes <= 32) {
#pragma unroll
    for (int i = 0; i < count; ++i) x[0][i] = reduce_lanes(x[0][i], lanes, op);
    return;
  }
  const int thread = threadIdx.x, warps = blockDim.x / 32;
#pragma unroll
  for (int i = 0; i < count; ++i) {
#pragma unroll
    for (int c = 0; c < coarsening; ++c) {
      x[c][i] = reduce_lanes(x[c][i], 32, op);
      if (thread % 32 == 0) partials[i].at[thread / 32 + c * warps] = x[c][i];
    }
    if (thread >= coarsening * warps && thread < WarpPartials::most) partials[i].at[thread] = Op::identity;
  }
  __syncthreads();  // all warps -> all warps: every warp's value is in `partials`
#pragma unroll
  for (int i = 0; i < count; ++i) x[0][i] = reduce_tree<0, 1>(partials[i], op);
}

}  // namespace rooftile::tile
