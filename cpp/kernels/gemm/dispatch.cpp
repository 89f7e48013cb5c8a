// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/dispatch.h"

#include "kernels/gemm/prepare.h"
#include "kernels/gemm/split_k.h"
#include "kernels/launch.h"
#include "kernels/warmup.h"

namespace rooftile::gpu {
namespace {

struct Table {
  int bits;
  DType dtype;
  std::span<const GemmVariant> (*variants)();
};
constexpr Table tables[] = {
    {16, DType::f16, stream_bits16_half_variants},
    {16, DType::bf16, stream_bits16_bf16_variants},
    {16, DType::f16, tma_half_variants},
    {16, DType::bf16, tma_bf16_variants},
    {16, DType::f16, collective_half_variants},
    {16, DType::bf16, collective_bf16_variants},
    {16, DType::f16, multistage_half_variants},
    {16, DType::bf16, multistage_bf16_variants},
    {4, DType::f16, w4_half_variants},
    {4, DType::bf16, w4_bf16_variants},
    {8, DType::f16, w8_half_variants},
    {8, DType::bf16, w8_bf16_variants},
};

}  // namespace

const GemmVariant* find_variant(const GemmKey& key) {
  for (const Table& table : tables) {
    if (table.bits != key.bits || table.dtype != key.dtype) continue;
    for (const GemmVariant& v : table.variants())
      if (v.key == key) return &v;
  }
  return nullptr;
}

GemmKey key_of(const GemmPlan& plan, const GemmProblem& p) {
  GemmKey key{.path = plan.path, .bits = p.bits, .dtype = p.dtype, .config = plan.config};
  switch (plan.path) {
    case GemmPath::stream:
      key.vec = p.vec;
      break;
    case GemmPath::collective:
      key.partial = plan.splits > 1;
      break;
    case GemmPath::codes_stream: {
      const bool minima = p.zeros == W4Zeros::minima;
      key.own_scale = w4_specialises(plan.config) && p.scale_dtype == p.dtype;
      key.small_groups = minima || plan.scale_k < w4_step_k;
      key.zeros = minima                               ? W4StreamZeros::minima
                  : !key.own_scale || key.small_groups ? W4StreamZeros::either
                  : p.zeros == W4Zeros::integer        ? W4StreamZeros::integer
                                                       : W4StreamZeros::symmetric;
      break;
    }
    case GemmPath::codes_wgmma:
      key.operand = plan.operand;
      break;
    default:
      break;
  }
  return key;
}

void launch_variant(const DeviceScope& scope, const GemmPlan& plan, const GemmProblem& problem, std::int64_t ctas,
                    const GemmParams& p) {
  const GemmVariant* const variant = find_variant(key_of(plan, problem));
  ROOFTILE_CHECK_KIND(not_supported, variant, scope.op(), ": no GPU kernel for the plan \"", text(plan), "\" and ",
                      name(problem.dtype), " activations");
  variant->launch(scope, plan, ctas, p);
}

void load_gemm_kernels(const char* op) {
  for (const Table& table : tables)
    for (const GemmVariant& v : table.variants()) v.load(op);
  load_split_k_kernels(op);
  load_prepare_kernels(op);
}

}  // namespace rooftile::gpu
