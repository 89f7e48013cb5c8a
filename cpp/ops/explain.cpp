// SPDX-License-Identifier: Apache-2.0
#include "rooftile/explain.h"

#include <algorithm>
#include <limits>

#include "core/kv_layout.h"
#include "core/op_args.h"
#include "kernels/decode/plan.h"
#include "kernels/decode/scheduler.h"
#include "kernels/gemm/plan.h"
#include "kernels/kv_cache/plan.h"
#include "ops/check.h"
#include "rooftile/names.h"

namespace rooftile {
namespace {

// Shared memory of an SM, of which each CTA takes 1 KB for the system. CUDA C++ programming guide, table of technical
// specifications per compute capability.
int sm_shared_kb(const GpuTarget& gpu) {
  if (gpu.major == 8) return gpu.minor == 6 || gpu.minor == 9 ? 100 : 164;
  return gpu.major == 12 ? 100 : 228;
}

// The largest block_m among the variants for this cache that the call takes, or the forced one. 0: there is none.
int block_m_of(gpu::DecodeKey key, std::int64_t packed_rows, int forced) {
  int found = 0;
  for (const int block_m : {gpu::mma_n, 2 * gpu::mma_n}) {
    key.block_m = block_m;
    const bool wanted = forced > 0 ? forced == block_m : found == 0 || gpu::fills(packed_rows, block_m);
    if (wanted && gpu::decode_facts(key).ctas_per_sm > 0) found = block_m;
  }
  return found;
}

}  // namespace

PlanFacts explain_decode(const GpuTarget& gpu, const DecodeSizes& s, const char* forced) {
  constexpr const char* op = "decode_attention";
  ROOFTILE_CHECK(s.kv_heads > 0 && s.q_heads > 0 && s.q_heads % s.kv_heads == 0, op, ": q must have a multiple of the ",
                 s.kv_heads, " KV heads, got ", s.q_heads, " query heads");
  ROOFTILE_CHECK_KIND(not_supported, s.q_heads <= check::max_heads && s.head_dim >= 1 && s.head_dim <= max_head_dim, op,
                      ": q must have at most ", check::max_heads, " heads of 1 to ", max_head_dim, ", got ", s.q_heads,
                      " of ", s.head_dim);
  ROOFTILE_CHECK_KIND(not_supported, !is_kivi(s.format) || s.tokens <= kv_group, op, ": q has ", s.tokens,
                      " new tokens, with a ", name(s.format), " cache at most ", kv_group);
  // the cost is counted in 32 bits, in KV tiles of 32 tokens x 8 packed rows, as dispatch.cpp has it
  const double cost = static_cast<double>(s.batch) *
                      (static_cast<double>(s.tokens * s.q_heads) / gpu::mma_n + static_cast<double>(s.kv_heads)) *
                      (1.5 * static_cast<double>(s.capacity) / gpu::kv_tile_tokens + 16);
  ROOFTILE_CHECK_KIND(not_supported, cost < 0x1p30 && s.tokens < (1 << 24), op, ": the call is more than one counts");
  gpu::DecodeKey key{s.dtype, s.format, static_cast<int>(s.head_dim)};
  const std::int64_t q_per_kv = s.q_heads / s.kv_heads;
  const int wanted = gpu::forced_block_m(op, forced);
  key.block_m = block_m_of(key, s.tokens * q_per_kv, wanted);
  ROOFTILE_CHECK(key.block_m > 0 || block_m_of(key, 0, 0) == 0, op, ": plan ", quoted(forced ? forced : ""),
                 " does not fit this call: block_m must be one that is compiled for ", text(key), ", got ", wanted);
  ROOFTILE_CHECK_KIND(not_supported, key.block_m > 0, op, ": no GPU kernel for cache ", text(key));
  const gpu::DecodeFacts facts = gpu::decode_facts(key);
  const int shared = sm_shared_kb(gpu) << 10;
  // 99 KB, the most of any variant, where the build does not know; on GPUs with 164 KB or more all variants fit
  const int fit = facts.smem_bytes > 0  ? shared / (static_cast<int>(facts.smem_bytes) + 1024)
                  : shared >= 164 << 10 ? facts.ctas_per_sm
                                        : 1;
  const gpu::DecodeShape shape{s.batch,
                               s.tokens,
                               static_cast<int>(s.kv_heads),
                               static_cast<int>(q_per_kv),
                               static_cast<int>(s.head_dim),
                               key.block_m,
                               gpu::visible_tokens(s.capacity, s.window, s.tokens)};
  const gpu::DecodePlan plan = gpu::plan_decode(
      op, shape, {gpu.sms, std::min(facts.ctas_per_sm, fit), facts.clusters ? gpu.largest_cluster() : 1}, forced);
  return {gpu::text(plan), plan.why, gpu::kernel_of(key), plan.workspace_bytes};
}

PlanFacts explain_append(const char* op, const GpuTarget& gpu, const AppendSizes& s, const char* forced) {
  const gpu::AppendProblem problem{.batch = s.batch,
                                   .tokens = s.tokens,
                                   .kv_heads = s.kv_heads,
                                   .q_heads = s.q_heads,
                                   .head_dim = static_cast<int>(s.head_dim),
                                   .kivi = is_kivi(s.format)};
  const gpu::AppendPlan plan =
      gpu::plan_append(op, problem, {.sms = gpu.sms, .largest_cluster = gpu.largest_cluster()}, forced);
  return {gpu::text(plan), plan.why, gpu::kernel_of(op, s.dtype, s.format), 0};
}

PlanFacts explain_w4a16(const char* op, const GpuTarget& gpu, TensorView x, const W4View& w, TensorView y,
                        const MatmulOptions& options, const char* forced) {
  const W4MatmulArgs args{.x = x,
                          .y = y,
                          .bias = options.bias,
                          .residual = options.residual,
                          .w = &w,
                          .activation = options.activation,
                          .gated = options.gated,
                          .batch_invariant = options.batch_invariant};
  check::Arg(op, "x", x).given().activation().ndim(1, TensorView::max_ndim);
  ROOFTILE_CHECK(x.last() == w.k, op, ": x must have a last dimension of K = ", w.k, ", got ", describe(x));
  ROOFTILE_CHECK(!options.gated || w.n % 2 == 0, op, ": activation \"", name(options.activation),
                 "_mul\" needs a weight of rows [gate | up], an even number N, got N = ", w.n);
  const gpu::GemmProblem problem = gpu::problem_of(args, gpu.sms, gpu.hopper);
  const gpu::GemmPlan plan = gpu::plan_gemm(op, problem, forced);
  return {gpu::text(plan), plan.why, gpu::kernel_of(plan, problem), plan.workspace_bytes};
}

PlanFacts explain_linear(const GpuTarget& gpu, TensorView x, TensorView weight, TensorView y,
                         const LinearOptions& options, const char* forced) {
  constexpr const char* op = "linear";
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  check::Arg(op, "x", x).given().activation().ndim(1, TensorView::max_ndim);
  check::Arg(op, "weight", weight).given().ndim(2, 2).dtype({x.dtype});
  ROOFTILE_CHECK(weight.shape[1] == x.last(), op, ": weight must be [N, K] with x's K = ", x.last(), ", got ",
                 describe(weight));
  ROOFTILE_CHECK(weight.shape[0] <= most && weight.shape[1] <= most, op, ": weight must have N and K of at most ", most,
                 ", got ", describe(weight));
  const LinearArgs args{.x = x, .w = weight, .y = y, .bias = options.bias, .residual = options.residual};
  const gpu::GemmProblem problem = gpu::problem_of(args, gpu.sms, gpu.hopper);
  const gpu::GemmPlan plan = gpu::plan_gemm(op, problem, forced);
  return {gpu::text(plan), plan.why, gpu::kernel_of(plan, problem), plan.workspace_bytes};
}

const char* explain_cpu(const char* op, const char* forced) { return cpu::kernels_for(op, forced).variant; }

}  // namespace rooftile
