// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>

#include "rooftile/context.h"
#include "rooftile/kv_cache.h"
#include "rooftile/tensor.h"

namespace rooftile {

// What changes a logit before the softmax. s = scale * dot(q, k); softcap c: c * tanh(s / c); window W: a query at
// position t sees keys t-W+1 .. t; alibi: + slope[head] * (j - t); sinks: one extra logit per head with no value.
struct LogitOptions {
  std::optional<float> scale;  // default head_dim ** -0.5
  std::optional<int> window;
  std::optional<float> softcap;
  TensorView sinks;         // [q_heads], activation dtype or fp32
  TensorView alibi_slopes;  // fp32 [q_heads]; prefill only
};

// q, out [B, Hq, D] or [B, T, Hq, D]: the newest T tokens of each row, already appended, causal among themselves.
// lse fp32 [B, Hq] or [B, T, Hq], natural log, sinks included; may be absent. No visible key: out 0, lse -inf.
// rows, counts int32 [B], may be absent. rows: cache row of each batch entry, default b. counts: how many of its T
// queries are real, default T: query i < counts[b] stands at position length - counts[b] + i, the others get out 0 and
// lse -inf.
KernelName decode_attention(const Context&, TensorView q, const KvCacheView&, TensorView out, TensorView lse,
                            TensorView rows, TensorView counts, const LogitOptions&);
// Bytes of workspace that call needs on ctx.device: bounded by the device, 0 on a CPU.
std::size_t decode_workspace(const Context&, TensorView q, const KvCacheView&);

struct PrefillOptions : LogitOptions {
  bool causal = true;                     // aligned to the end when k is longer than q
  TensorView cu_seqlens_q, cu_seqlens_k;  // int32 [batch + 1], both or none (packed: q [total, Hq, D])
  const KvCacheView* cache = nullptr;     // attend these tokens first; k, v are the new ones, not yet appended
  TensorView rows;                        // int32 [B], with cache
  TensorView counts;                      // int32 [B]: row b's first counts[b] new tokens are real; the rest get out 0
};

// q, out [B, S, Hq, D] with k, v [B, Sk, Hkv, D]; packed: q [total_q, Hq, D], k, v [total_k, Hkv, D].
// lse fp32 [B, S, Hq] or [total_q, Hq]; may be absent.
KernelName prefill_attention(const Context&, TensorView q, TensorView k, TensorView v, TensorView out, TensorView lse,
                             const PrefillOptions&);

// Two partial results over disjoint keys become one. out_* [..., H, D], lse_* fp32 [..., H].
KernelName merge_attention(const Context&, TensorView out_a, TensorView lse_a, TensorView out_b, TensorView lse_b,
                           TensorView out, TensorView lse);

}  // namespace rooftile
