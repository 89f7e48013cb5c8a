// SPDX-License-Identifier: Apache-2.0
// The small ops between the products. Statistics in fp32; results rounded once to the output's dtype.
#pragma once

#include "rooftile/context.h"
#include "rooftile/kv_cache.h"
#include "rooftile/tensor.h"

namespace rooftile {

// y = x * rsqrt(mean(x^2) + eps) * weight over the last dimension. x, y [..., H]; weight [H], may be absent.
KernelName rms_norm(const Context&, TensorView x, TensorView weight, float eps, TensorView y);
// res = x + residual rounded to the dtype; y = rms_norm(res). res may be residual itself.
KernelName add_rms_norm(const Context&, TensorView x, TensorView residual, TensorView weight, float eps, TensorView y,
                        TensorView res);
// y = (x - mean) * rsqrt(var + eps) * weight + bias; weight and bias may be absent.
KernelName layer_norm(const Context&, TensorView x, TensorView weight, TensorView bias, float eps, TensorView y);
KernelName add_layer_norm(const Context&, TensorView x, TensorView residual, TensorView weight, TensorView bias, float eps,
                          TensorView y, TensorView res);

// Half-split rotary embedding. x, y [..., H, D]; cos, sin [max_position, R] with R <= D/2 pairs (dims i and i + R
// turn together, the rest is copied), any activation dtype or fp32; positions int32 or int64 with x's leading shape.
// y may be x itself.
KernelName rope(const Context&, TensorView x, TensorView cos, TensorView sin, TensorView positions, TensorView y);

// rope on q (into q_out) and on k, then append of k and v.  Shapes as rope and kv_append: q, q_out [B, T, Hq, D],
// k, v [B, T, Hkv, D], positions [B, T].
KernelName rope_append(const Context&, TensorView q, TensorView k, TensorView v, TensorView cos, TensorView sin,
                       TensorView positions, const KvCacheView&, TensorView rows, TensorView counts, TensorView q_out);

// h = silu(g) * u, x [..., 2H] = [gate | up], h [..., H].
KernelName silu_mul(const Context&, TensorView x, TensorView h);
enum class Gelu : std::uint8_t { tanh, erf };
KernelName gelu_mul(const Context&, TensorView x, Gelu approximate, TensorView h);
KernelName softmax(const Context&, TensorView x, TensorView y);   // over the last dimension

}  // namespace rooftile
