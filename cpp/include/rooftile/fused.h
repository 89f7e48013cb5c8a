// SPDX-License-Identifier: Apache-2.0
// The small ops between the products. Arithmetic in fp32 or wider; results rounded once to the output's dtype.
// Unless said otherwise an output may be exactly one of its inputs; it may not overlap an input in part.
#pragma once

#include "rooftile/context.h"
#include "rooftile/kv_cache.h"
#include "rooftile/tensor.h"

namespace rooftile {

// y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset) over the last dimension. x, y [..., H]; weight [H], may be
// absent where the offset is 0.
KernelName rms_norm(const Context&, TensorView x, TensorView weight, float eps, TensorView y, float weight_offset = 0);
// res = x + residual rounded to the dtype; y = rms_norm(res). y and res are two tensors; each may be x or residual.
KernelName add_rms_norm(const Context&, TensorView x, TensorView residual, TensorView weight, float eps, TensorView y,
                        TensorView res, float weight_offset = 0);
// rms_norm of every head of q and of k, on a GPU in one launch. q, q_out [..., Hq, D]; k, k_out [..., Hkv, D] with q's
// leading dimensions; q_weight, k_weight [D], may be absent where the offset is 0. D is at most 1024.
KernelName qk_rms_norm(const Context&, TensorView q, TensorView k, TensorView q_weight, TensorView k_weight, float eps,
                       TensorView q_out, TensorView k_out, float weight_offset = 0);
// y = (x - mean) * rsqrt(var + eps) * weight + bias; weight and bias may be absent.
KernelName layer_norm(const Context&, TensorView x, TensorView weight, TensorView bias, float eps, TensorView y);
KernelName add_layer_norm(const Context&, TensorView x, TensorView residual, TensorView weight, TensorView bias,
                          float eps, TensorView y, TensorView res);

// y[...] = scale * weight[ids[...]]. ids [...] int32 or int64; weight [vocabulary, H]; y [..., H]. With a scale of 1
// the rows are copied bit for bit. On the CPU ids are checked; on a GPU the row of an id outside the vocabulary is NaN.
KernelName embedding(const Context&, TensorView ids, TensorView weight, float scale, TensorView y);

// Half-split rotary embedding of q and k. cos, sin [max_position, R] with R <= D/2 pairs (dims i and i + R are
// rotated together, the rest is copied), q's dtype or fp32; positions int32 or int64 with the leading shape of q [...,
// Hq, D] and k [..., Hkv, D]. On the CPU they are checked; on a GPU a position outside the tables makes that token's
// outputs NaN. q_out may be q, k_out k.
KernelName rope(const Context&, TensorView q, TensorView k, TensorView cos, TensorView sin, TensorView positions,
                TensorView q_out, TensorView k_out);

// rope on q (into q_out, which may be q) and on k, then append of k and v.  Shapes as rope and kv_append: q, q_out
// [B, T, Hq, D], k, v [B, T, Hkv, D], positions [B, T]. Nothing is written when an argument is refused.
KernelName rope_append(const Context&, TensorView q, TensorView k, TensorView v, TensorView cos, TensorView sin,
                       TensorView positions, const KvCacheView&, TensorView rows, TensorView counts, TensorView q_out);

// h = f(gate) * up, x [..., 2H] = [gate | up], h [..., H]; h may be the gate half of x.
KernelName silu_mul(const Context&, TensorView x, TensorView h);
enum class Gelu : std::uint8_t { tanh, erf };
KernelName gelu_mul(const Context&, TensorView x, Gelu approximate, TensorView h);
// exp(x - max) / sum over the last dimension. A row whose maximum is -inf, or that holds +inf or NaN, becomes NaN.
KernelName softmax(const Context&, TensorView x, TensorView y);

}  // namespace rooftile
