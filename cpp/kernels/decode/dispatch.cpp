// SPDX-License-Identifier: Apache-2.0
#include "kernels/backend.h"
#include "kernels/decode/plan.h"
#include "kernels/decode/schedule.h"
#include "kernels/kernel_name.h"
#include "kernels/launch.h"
#include "kernels/warmup.h"

namespace rooftile::gpu {
namespace {

constexpr const char* op = "decode_attention";

// Calls visit(variant) for every compiled variant.
template <class Visit>
void for_each_variant(const Visit& visit) {
  for (std::span<const DecodeVariant> variants : {bits16_variants(), int8_variants(), int4_kivi_variants()})
    for (const DecodeVariant& v : variants) visit(v);
}

const DecodeVariant& find_variant(const DecodeKey& key) {
  const DecodeVariant* found = nullptr;
  for_each_variant([&](const DecodeVariant& v) { found = v.key == key ? &v : found; });
  if (found) return *found;
  std::string compiled;
  for_each_variant([&](const DecodeVariant& v) { compiled += (compiled.empty() ? "" : ", ") + text(v.key); });
  fail(ErrorKind::not_supported, op, ": no GPU kernel for cache ", text(key), "; compiled: ", compiled);
}

DecodeKey key_of(const DecodeArgs& a) { return {a.q.dtype, a.cache->format, a.cache->head_dim}; }

DecodePlan plan_of(const DecodeArgs& a, const DecodeVariant& v, int sms) {
  return plan_decode(a.q.shape[0], a.q.shape[1], a.cache->kv_heads, static_cast<int>(a.q.shape[2] / a.cache->kv_heads),
                     a.cache->head_dim, sms, v.blocks_per_sm);
}

// What the vector loads need; the caches this library makes have it.
void check_alignment(const KvCacheView& c) {
  for (const auto& [side, plane] : {std::pair{"K", &c.k}, {"V", &c.v}})
    ROOFTILE_CHECK_KIND(not_supported,
                        reinterpret_cast<std::uintptr_t>(plane->codes) % 16 == 0 && plane->page_stride % 16 == 0 &&
                            plane->head_stride % 16 == 0 && plane->token_stride % 16 == 0,
                        op, ": cache has ", side, " rows that do not all start at multiples of 16 bytes, which the GPU kernels need");
}

// Work is counted in 32 bits.
void check_size(const DecodeArgs& a) {
  const double columns_all = static_cast<double>(a.q.shape[1]) * static_cast<double>(a.q.shape[2]) / columns + a.cache->kv_heads;
  const double units = static_cast<double>(a.q.shape[0]) * columns_all * (static_cast<double>(a.cache->capacity()) / unit_tokens + 2);
  ROOFTILE_CHECK_KIND(not_supported, units < 0x1p31 && a.q.shape[1] < (1 << 24), op, ": q ", describe(a.q), " over a cache of capacity ",
                      a.cache->capacity(), " is more than one call counts (2^31 units of 128 tokens x 8 query columns)");
}

}  // namespace

void load_decode_kernels(const char* op) {
  for_each_variant([op](const DecodeVariant& v) { v.load(op); });
}

std::size_t decode_workspace(const Context& ctx, const DecodeArgs& a) {
  const DeviceScope scope(op, ctx);
  return plan_of(a, find_variant(key_of(a)), scope.sms()).workspace_bytes;
}

KernelName decode_attention(const Context& ctx, const DecodeArgs& a) {
  const DeviceScope scope(op, ctx);
  const DecodeVariant& variant = find_variant(key_of(a));
  check_alignment(*a.cache);
  check_size(a);
  const DecodePlan plan = plan_of(a, variant, scope.sms());
  ROOFTILE_CHECK(ctx.workspace_bytes >= plan.workspace_bytes, op, ": workspace must have ", plan.workspace_bytes, " bytes, got ",
                 ctx.workspace_bytes);
  auto* workspace = static_cast<std::byte*>(ctx.workspace);
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
  p.passes = plan.passes;
  p.scale = a.logits.scale;
  p.softcap = a.logits.softcap;
  p.window = a.logits.window;
  p.row_begin = reinterpret_cast<std::int32_t*>(workspace);
  p.node_o = reinterpret_cast<float*>(workspace + plan.node_o);
  p.node_ml = reinterpret_cast<float*>(workspace + plan.node_ml);
  p.blocks = plan.blocks;
  if (plan.blocks > 0) variant.launch(scope, p);
  std::string dim = "d";
  dim += std::to_string(a.cache->head_dim);
  return kernel_name({"cuda", name(a.q.dtype), name(a.cache->format), dim.c_str()});
}

}  // namespace rooftile::gpu
