// SPDX-License-Identifier: Apache-2.0
// The checked arguments of one call that ops pass to a backend, the same for CPU and GPU.
#pragma once

#include "rooftile/attention.h"
#include "rooftile/fused.h"
#include "rooftile/gemm.h"
#include "rooftile/sampling.h"

namespace rooftile {

struct LogitParams {
  float scale = 1.0f;
  std::int64_t window = 0;            // 0: no window
  float softcap = 0.0f;               // 0: no soft cap
  const TensorView* sinks = nullptr;  // null: no sinks
  const TensorView* alibi_slopes = nullptr;
};

struct DecodeArgs {
  TensorView q, out, lse;  // always [B, T, Hq, D] and [B, T, Hq]; lse may be absent
  const KvCacheView* cache = nullptr;
  const std::int32_t* rows = nullptr;  // [B] or null; validated for the CPU only
  const std::int32_t* counts = nullptr;
  LogitParams logits;
};

// One sequence of a prefill. Offsets, in elements, of its first token in each tensor.
struct PrefillSequence {
  std::int64_t q = 0, k = 0, v = 0, out = 0, lse = 0;
  std::int64_t queries = 0;  // tokens of q, out and lse
  std::int64_t real = 0;     // the first `real` queries attend; the others get out 0 and lse -inf
  std::int64_t keys = 0;     // tokens of k and v that are attended
  std::int64_t cached = 0;   // tokens of the cache row; they precede k
  std::int32_t row = 0;      // cache row
  // Query i stands at position cached + keys - real + i: causal is aligned to the end.
  std::int64_t position(std::int64_t i) const { return cached + keys - real + i; }
};

struct PrefillArgs {
  TensorView q, k, v, out,
      lse;  // [token, H, D], lse [token, H]; lse may be absent; the strides of the token dimension apply
  std::int64_t batch = 0;
  const PrefillSequence* sequences = nullptr;  // [batch]
  bool causal = true;
  const KvCacheView* cache = nullptr;  // its tokens precede k
  LogitParams logits;
};

// append, and with cos and sin rope_append, on a GPU.
struct AppendArgs {
  const KvCacheView* cache = nullptr;
  TensorView k, v;                     // [B, T, Hkv, D]
  TensorView q, q_out;                 // rope_append: [B, T, Hq, D]
  TensorView cos, sin;                 // rope_append: [max_position, pairs]
  TensorView positions;                // rope_append: [B, T]
  const std::int32_t* rows = nullptr;  // [B] or null
  const std::int32_t* counts = nullptr;
};

// The arrays of a weight: codes, scales and offsets (zeros or minima; absent if symmetric). Canonical: uint8
// [N, K * bits / 8] and [N, K / group]; in packed layout (w4_layout.h): flat bytes.
struct W4Arrays {
  TensorView codes, scales, offsets;
};

struct W4MatmulArgs {
  TensorView x, y, bias, residual;  // rows of K and of outputs(); bias [N], residual like y: may be absent
  const W4View* w = nullptr;        // of 4 or 8 bits
  Activation activation = Activation::none;
  bool gated = false;  // the rows of W are [gate | up]: y = activation(gate) * up + residual
  std::int64_t outputs() const { return gated ? w->n / 2 : w->n; }
  bool batch_invariant = false;  // a row's bits are the same at every number of rows
};

struct LinearArgs {
  TensorView x, w, y, bias, residual;  // rows of K and of N; w [N, K]; bias [N], residual like y: may be absent
  Activation activation = Activation::none;
  static constexpr bool gated = false;
  std::int64_t outputs() const { return w.shape[0]; }
};

enum class Gate { silu, gelu_tanh, gelu_erf };

// rms_norm, layer_norm and their add_ forms: s = x (+ residual, rounded to the dtype and kept in res), y = norm(s).
struct NormArgs {
  TensorView x, residual, weight, bias, y, res;  // residual, weight, bias, res may be absent
  float eps = 0;
  float weight_offset = 0;  // rms_norm: added to the weight
  bool subtract_mean = false;
};

// The longest head of qk_rms_norm: a GPU reduces it in a warp.
inline constexpr int max_head_norm = 1024;

struct EmbeddingArgs {
  TensorView ids, weight, y;  // [...], [vocabulary, H], [..., H]
  float scale = 1;
};

struct SampleArgs {
  TensorView logits, token_ids, seeds, positions, tokens;  // token_ids, seeds, positions may be absent
  SampleSettings settings;
  bool greedy() const { return settings.temperature == 0; }
  bool penalises() const { return token_ids.given() && settings.repetition_penalty != 1; }
};

}  // namespace rooftile
