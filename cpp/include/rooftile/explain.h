// SPDX-License-Identifier: Apache-2.0
// The plan of a call on a GPU that need not be there: a function of the call's shapes and the device alone. No tensor's
// data are read; a view without memory counts as aligned.
#pragma once

#include <cstddef>
#include <string>

#include "rooftile/context.h"
#include "rooftile/gemm.h"
#include "rooftile/kv_cache.h"

namespace rooftile {

struct GpuTarget {
  int major = 0, minor = 0;  // compute capability
  int sms = 0;
  bool hopper = false;  // runs machine code for sm_90a

  int largest_cluster() const { return hopper ? 8 : 1; }  // CTAs
};

struct PlanFacts {
  std::string plan;  // as Context::variant takes it
  std::string why;
  KernelName kernel;
  std::size_t workspace_bytes = 0;
};

struct DecodeSizes {
  DType dtype = DType::f16;
  KvFormat format = KvFormat::fp16;
  std::int64_t batch = 0, tokens = 0, q_heads = 0, kv_heads = 0, head_dim = 0;
  std::int64_t capacity = 0;  // tokens of a cache row
  std::int64_t window = 0;    // 0: none
};

struct AppendSizes {
  DType dtype = DType::f16;
  KvFormat format = KvFormat::fp16;
  std::int64_t batch = 0, tokens = 0, q_heads = 0, kv_heads = 0, head_dim = 0;  // q_heads: 0 without RoPE
};

// forced: the text of a plan, or null for the one that the call takes. Errors are those of the call.
PlanFacts explain_decode(const GpuTarget&, const DecodeSizes&, const char* forced);
// op: append or rope_append
PlanFacts explain_append(const char* op, const GpuTarget&, const AppendSizes&, const char* forced);
PlanFacts explain_w4a16(const char* op, const GpuTarget&, TensorView x, const W4View&, TensorView y,
                        const MatmulOptions&, const char* forced);
PlanFacts explain_linear(const GpuTarget&, TensorView x, TensorView weight, TensorView y, const LinearOptions&,
                         const char* forced);
// The CPU variant that a call takes, of which `forced` is the name or null: "avx512".
const char* explain_cpu(const char* op, const char* forced);

}  // namespace rooftile
