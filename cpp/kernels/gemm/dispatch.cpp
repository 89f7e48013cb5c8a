// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/dispatch.h"

#include <iterator>
#include <type_traits>
#include <utility>
#include <vector>

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

// Calls f(std::integral_constant<int, i>) for every i below n.
template <int n, class F>
void for_each_below(const F& f) {
  [&]<int... i>(std::integer_sequence<int, i...>) {
    (f(std::integral_constant<int, i>()), ...);
  }(std::make_integer_sequence<int, n>());
}

template <DType t>
void add_tables(std::vector<Table>& all) {
  for (const auto variants : {stream_bits16_variants<t>, tma_variants<t>, multistage_variants<t>})
    all.push_back({16, t, variants});
  for_each_below<std::size(linear_collective_tiles)>([&](auto config) {
    all.push_back({16, t, collective_variants<t, config(), false>});
    if constexpr (linear_may_split(linear_collective_tiles[config()]))
      all.push_back({16, t, collective_variants<t, config(), true>});
  });
  const auto add_codes = [&](auto bits) {
    for_each_below<std::size(w4_stream_configs)>(
        [&](auto config) { all.push_back({bits, t, stream_codes_variants<t, bits(), config()>}); });
    for_each_below<std::size(w4_wgmma_configs)>(
        [&](auto config) { all.push_back({bits, t, wgmma_codes_variants<t, bits(), config()>}); });
  };
  add_codes(std::integral_constant<int, 4>());
  add_codes(std::integral_constant<int, 8>());
}

const std::vector<Table>& tables() {
  static const std::vector<Table> all = [] {
    std::vector<Table> made;
    add_tables<DType::f16>(made);
    add_tables<DType::bf16>(made);
    return made;
  }();
  return all;
}

}  // namespace

const GemmVariant* find_variant(const GemmKey& key) {
  for (const Table& table : tables()) {
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

void load_gemm_kernels(const char* op, bool hopper) {
  for (const Table& table : tables())
    for (const GemmVariant& v : table.variants())
      if (hopper || !needs_hopper(v.key.path)) v.load(op);
  load_split_k_kernels(op);
  load_prepare_kernels(op);
}

}  // namespace rooftile::gpu
