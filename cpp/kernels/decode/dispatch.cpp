// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "core/kernel_name.h"
#include "kernels/backend.h"
#include "kernels/decode/plan.h"
#include "kernels/decode/schedule.h"
#include "kernels/launch.h"
#include "kernels/warmup.h"

namespace rooftile::gpu {
namespace {

constexpr const char* op = "decode_attention";

// Calls visit(variant) for every compiled variant.
template <class Visit>
void for_each_variant(const Visit& visit) {
  for (std::span<const DecodeVariant> variants : {bits16_variants(), int8_variants(), fp8_variants(), int4_variants(),
                                                  int4_kivi_variants(), int4_kivi_sym_variants()})
    for (const DecodeVariant& v : variants) visit(v);
}

// Of the variants for this cache the one of the most columns that a task fills to more than half; tables begin with the
// smallest.
const DecodeVariant& variant_of(const DecodeArgs& a) {
  DecodeKey key{a.q.dtype, a.cache->format, a.cache->head_dim, 0};
  const std::int64_t wanted = a.q.shape[1] * (a.q.shape[2] / a.cache->kv_heads);
  const DecodeVariant* found = nullptr;
  for_each_variant([&](const DecodeVariant& v) {
    key.columns = v.key.columns;
    if (v.key == key && (!found || 2 * wanted > v.key.columns)) found = &v;
  });
  if (found) return *found;
  // Every dtype and format has the same head_dims.
  std::string stores, dims;
  const auto add = [](std::string& list, const std::string& next) { list += (list.empty() ? "" : ", ") + next; };
  const DecodeKey& first = bits16_variants()[0].key;
  for_each_variant([&](const DecodeVariant& v) {
    if (v.key.columns != first.columns) return;
    if (v.key.head_dim == first.head_dim) add(stores, std::string(name(v.key.dtype)) + " " + name(v.key.format));
    if (v.key.dtype == first.dtype && v.key.format == first.format) add(dims, std::to_string(v.key.head_dim));
  });
  fail(ErrorKind::not_supported, op, ": no GPU kernel for cache ", text(key), "; compiled: ", stores, "; head_dim ",
       dims);
}

DecodePlan plan_of(const DeviceScope& scope, const DecodeArgs& a, const DecodeVariant& v) {
  const std::int64_t tokens = a.q.shape[1], capacity = a.cache->capacity();
  // what one query sees, the other queries' steps, and what starts at a multiple of 32
  const std::int64_t visible = a.logits.window > 0 ? std::min(capacity, a.logits.window + tokens + 31) : capacity;
  return plan_decode({a.q.shape[0], tokens, a.cache->kv_heads, static_cast<int>(a.q.shape[2] / a.cache->kv_heads),
                      a.cache->head_dim, v.key.columns, visible},
                     {scope.sms(), std::min(v.blocks_per_sm, scope.blocks_that_fit(v.shared_bytes)),
                      v.clusters ? scope.largest_cluster() : 1});
}

// What the vector loads need; the caches this library makes have it.
void check_alignment(const KvCacheView& c) {
  for (const auto& [side, plane] : {std::pair{"K", &c.k}, {"V", &c.v}})
    ROOFTILE_CHECK_KIND(not_supported,
                        reinterpret_cast<std::uintptr_t>(plane->codes) % 16 == 0 && plane->page_stride % 16 == 0 &&
                            plane->head_stride % 16 == 0 && plane->token_stride % 16 == 0,
                        op, ": cache has ", side,
                        " rows that do not all start at multiples of 16 bytes, which the GPU kernels need");
  for (const std::byte* ring : {c.ring_k, c.ring_v})
    ROOFTILE_CHECK_KIND(not_supported, reinterpret_cast<std::uintptr_t>(ring) % 16 == 0, op,
                        ": cache has a ring that does not start at a multiple of 16 bytes, which the GPU kernels need");
}

// Whether every 8 elements of a 16-bit tensor's rows are one 16-byte word.
bool rows_are_vectors(const TensorView& t) {
  if (t.last_stride() != 1 || reinterpret_cast<std::uintptr_t>(t.data) % 16 != 0) return false;
  return std::all_of(t.stride, t.stride + t.ndim - 1, [](std::int64_t stride) { return stride % 8 == 0; });
}

// Work is counted in 32 bits: the units of all tasks, half as much again as their tokens if leaves are short, and a
// fifteenth more where shares are rounded.
void check_size(const DecodeArgs& a) {
  const double columns_all =
      static_cast<double>(a.q.shape[1]) * static_cast<double>(a.q.shape[2]) / columns + a.cache->kv_heads;
  const double of_task = 1.5 * static_cast<double>(a.cache->capacity()) / unit_tokens + 16;
  const double units = static_cast<double>(a.q.shape[0]) * columns_all * of_task;
  ROOFTILE_CHECK_KIND(not_supported, units < 0x1p30 && a.q.shape[1] < (1 << 24), op, ": q ", describe(a.q),
                      " over a cache of capacity ", a.cache->capacity(),
                      " is more than one call counts (2^30 units of 32 tokens x 8 query columns)");
}

}  // namespace

void load_decode_kernels(const char* op) {
  for_each_variant([op](const DecodeVariant& v) { v.load(op); });
}

std::size_t decode_workspace(const Context& ctx, const DecodeArgs& a) {
  const DeviceScope scope(op, ctx);
  check_size(a);
  return plan_of(scope, a, variant_of(a)).workspace_bytes;
}

KernelName decode_attention(const Context& ctx, const DecodeArgs& a) {
  const DeviceScope scope(op, ctx);
  const DecodeVariant& variant = variant_of(a);
  check_alignment(*a.cache);
  check_size(a);
  const DecodePlan plan = plan_of(scope, a, variant);
  const char *const dtype = name(a.q.dtype), *const format = name(a.cache->format);
  const KernelName ran =
      variant.key.columns > columns  // step_kv
          ? kernel_name("cuda_", dtype, "_", format, "_d", a.cache->head_dim, "_c", variant.key.columns)
          : kernel_name("cuda_", dtype, "_", format, "_d", a.cache->head_dim);
  if (plan.blocks == 0) return ran;  // no query
  std::byte* const workspace = workspace_of(op, ctx, plan.workspace_bytes);
  DecodeParams p = {};
  p.q = a.q;
  p.out = a.out;
  p.lse = a.lse;
  if (a.logits.sinks) p.sinks = *a.logits.sinks;
  p.cache = *a.cache;
  p.rows = a.rows;
  p.counts = a.counts;
  p.batch = static_cast<int>(a.q.shape[0]);
  p.tokens = static_cast<int>(a.q.shape[1]);
  p.q_per_kv = static_cast<int>(a.q.shape[2] / a.cache->kv_heads);
  p.columns = variant.key.columns;
  p.passes = plan.passes;
  p.columns_used = static_cast<int>(std::min<std::int64_t>(p.columns, a.q.shape[1] * p.q_per_kv));
  p.tasks = a.cache->kv_heads * plan.passes;
  p.vector_queries = rows_are_vectors(a.q);
  p.scale = a.logits.scale;
  p.softcap = a.logits.softcap;
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  p.window = static_cast<int>(std::min(a.logits.window, most));
  p.capacity = static_cast<int>(std::min(a.cache->capacity(), most));
  p.row_begin = reinterpret_cast<std::int32_t*>(workspace);
  p.node_o = reinterpret_cast<float*>(workspace + plan.node_o);
  p.node_ml = reinterpret_cast<float*>(workspace + plan.node_ml);
  p.fold = reinterpret_cast<float*>(workspace + plan.fold);
  p.blocks = plan.blocks;
  p.layers = plan.layers;
  p.ranks = plan.ranks;
  p.cluster = plan.cluster;
  p.by_q_per_kv = Divisor(p.q_per_kv);
  p.by_passes = Divisor(p.passes);
  p.by_tasks = Divisor(p.tasks);
  p.by_ranks = Divisor(std::max(p.ranks, 1));
  p.by_columns_used = Divisor(p.columns_used);
  variant.launch(scope, p);
  return ran;
}

}  // namespace rooftile::gpu
