// SPDX-License-Identifier: Apache-2.0
// Online-softmax partials that can be merged: maximum m of the base-2 logits x (logit * log2 e), sum l of 2^(x - m),
// and o, the sum of the values weighted by 2^(x - m). A merge consists of explicitly rounded operations, so its result
// has the same bits in every kernel.
#pragma once

#include <cuda_runtime.h>
#include <cutlass/functional.h>

namespace rooftile::tile {

inline constexpr float log2_e = 1.4426950408889634f, ln_2 = 0.6931471805599453f;

// 2^x to 2 units in the last place; results below 2^-126 become 0. CUTLASS has no ex2, and CUDA's exp2f scales its
// argument and result for the sake of subnormals.
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x to 1 unit in the last place; 0 for an infinity.
__device__ __forceinline__ float fast_reciprocal(float x) { return cutlass::reciprocal_approximate_ftz<float>{}(x); }

// The factors of a merge of partials a and b. A partial without keys has m = -inf and l = 0.
struct MergeWeights {
  float m, a, b;  // merged maximum; factors of a's and b's l and o
};
__device__ __forceinline__ MergeWeights merge_weights(float m_a, float m_b) {
  const float m = fmaxf(m_a, m_b), base = m == -INFINITY ? 0.0f : m;
  return {m, exp2f(__fsub_rn(m_a, base)), exp2f(__fsub_rn(m_b, base))};
}
__device__ __forceinline__ float merge_values(float a, float b, const MergeWeights& w) {
  return __fmaf_rn(b, w.b, __fmul_rn(a, w.a));
}

// The result of a row's softmax: out = o * factor; lse is a natural logarithm.
struct SoftmaxResult {
  float factor, lse;
};
// Finalises a row from its merged m and l. sink: one more base-2 logit, without a value; -inf if absent.
__device__ __forceinline__ SoftmaxResult finalize_softmax(float m, float l, float sink) {
  const float top = fmaxf(m, sink);
  if (top == -INFINITY && l == 0.0f) return {0.0f, -INFINITY};
  const float weight = exp2f(__fsub_rn(m, top)), sum = __fmaf_rn(l, weight, exp2f(__fsub_rn(sink, top)));
  return {__fdiv_rn(weight, sum), __fmul_rn(__fadd_rn(top, log2f(sum)), ln_2)};
}

}  // namespace rooftile::tile
