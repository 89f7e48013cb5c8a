// SPDX-License-Identifier: Apache-2.0
// What the CPU backend offers to ops: the same set of functions, compiled several times.
//
// `reference` (cpp/cpu/ref) is plain loops, the oracle of the C++ tests. `portable`, `avx2` and `avx512`
// (cpp/cpu/simd) are one source compiled per instruction set. Arguments have been checked by ops; every function takes
// any strides and allocates its own scratch on the host.
#pragma once

#include "core/parallel.h"
#include "rooftile/attention.h"
#include "rooftile/fused.h"
#include "rooftile/gemm.h"

namespace rooftile::cpu {

struct LogitParams {
  float scale = 1.0f;
  std::int64_t window = 0;            // 0: none
  float softcap = 0.0f;               // 0: none
  const TensorView* sinks = nullptr;        // null: none
  const TensorView* alibi_slopes = nullptr;
};

struct DecodeArgs {
  TensorView q, out, lse;             // always [B, T, Hq, D] and [B, T, Hq]; lse may be absent
  const KvCacheView* cache = nullptr;
  const std::int32_t* rows = nullptr;     // [B] or null; values checked
  const std::int32_t* counts = nullptr;
  LogitParams logits;
};

// One sequence of a prefill. Offsets, in elements, of its first token in each tensor.
struct PrefillSequence {
  std::int64_t q = 0, k = 0, v = 0, out = 0, lse = 0;
  std::int64_t queries = 0;   // tokens of q, out and lse
  std::int64_t real = 0;      // the first `real` of them attend; the rest get out 0 and lse -inf
  std::int64_t keys = 0;      // tokens of k and v that are attended
  std::int64_t cached = 0;    // tokens of the cache row, before k
  std::int32_t row = 0;       // cache row
  // Query i stands at position cached + keys - real + i: causal is aligned to the end.
  std::int64_t position(std::int64_t i) const { return cached + keys - real + i; }
};

struct PrefillArgs {
  TensorView q, k, v, out, lse;       // [token, H, D], lse [token, H]; lse may be absent; only the strides of `token` count
  std::int64_t batch = 0;
  const PrefillSequence* sequences = nullptr;   // [batch]
  bool causal = true;
  const KvCacheView* cache = nullptr;      // keys before k, as the cache stands
  LogitParams logits;
};

struct W4MatmulArgs {
  TensorView x, y, bias, residual;    // rows of K and of N; bias [N], residual like y: may be absent
  const W4View* w = nullptr;
  Activation activation = Activation::none;
};

enum class Gate { silu, gelu_tanh, gelu_erf };

// rms_norm, layer_norm and their add_ forms: s = x (+ residual, rounded to the dtype and kept in res), y = norm(s).
struct NormArgs {
  TensorView x, residual, weight, bias, y, res;   // residual, weight, bias, res may be absent
  float eps = 0;
  bool subtract_mean = false;
};

struct Kernels {
  const char* variant;

  void (*decode_attention)(const Parallel&, const DecodeArgs&);
  void (*prefill_attention)(const Parallel&, const PrefillArgs&);
  void (*merge_attention)(const Parallel&, const TensorView& out_a, const TensorView& lse_a, const TensorView& out_b,
                          const TensorView& lse_b, const TensorView& out, const TensorView& lse);

  // Stores tokens of k, v [B, T, Hkv, D] at positions lengths[row] .. ; lengths are advanced by ops afterwards.
  void (*kv_append)(const Parallel&, const KvCacheView&, const TensorView& k, const TensorView& v,
                    const std::int32_t* rows, const std::int32_t* counts);

  void (*w4a16_matmul)(const Parallel&, const W4MatmulArgs&);

  void (*norm)(const Parallel&, const NormArgs&);
  void (*rope)(const Parallel&, const TensorView& x, const TensorView& cos, const TensorView& sin,
               const TensorView& positions, const TensorView& y);
  void (*gated)(const Parallel&, const TensorView& x, const TensorView& h, Gate);
  void (*softmax)(const Parallel&, const TensorView& x, const TensorView& y);
};

const Kernels& reference_kernels();
const Kernels& portable_kernels();
#ifdef ROOFTILE_X86
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
#endif

// The best variant this machine runs, or the one named; raises NotSupported, naming `op`, for one it does not run or know.
const Kernels& kernels_for(const char* op, const char* variant);
// Names this machine can run, best first, comma separated.
const char* runnable_variants();

}  // namespace rooftile::cpu
