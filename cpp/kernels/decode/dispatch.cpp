// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>

#include "kernels/backend.h"
#include "kernels/decode/plan.h"
#include "kernels/decode/scheduler.h"
#include "kernels/launch.h"
#include "kernels/warmup.h"

namespace rooftile::gpu {
namespace {

constexpr const char* op = "decode_attention";

// Calls visit(variant) for every compiled variant of a format.
template <class Visit>
void for_each_variant(KvFormat of, const Visit& visit) {
  with_kv_format(of, [&](auto format) {
    constexpr KvFormat F = format();
    const auto visit_dtype = [&]<DType dtype>() {
      for (const DecodeVariant& v : decode_variants<F, dtype, HeadDims::up_to_96>()) visit(v);
      for (const DecodeVariant& v : decode_variants<F, dtype, HeadDims::of_128>()) visit(v);
      for (const DecodeVariant& v : decode_variants<F, dtype, HeadDims::up_to_256>()) visit(v);
      for (const DecodeVariant& v : decode_variants<F, dtype, HeadDims::up_to_512>()) visit(v);
    };
    // a cache of elements takes queries of their dtype; fp32 has no variant
    if constexpr (F == KvFormat::fp16 || !is_element_format(F)) visit_dtype.template operator()<DType::f16>();
    if constexpr (F == KvFormat::bf16 || !is_element_format(F)) visit_dtype.template operator()<DType::bf16>();
  });
}
// The same for all formats.
template <class Visit>
void for_each_variant(const Visit& visit) {
  for (int i = 0; i < kv_format_count; ++i) for_each_variant(static_cast<KvFormat>(i), visit);
}

// Among the variants for this cache, the one with the largest block_m that the packed rows fill by more than half.
// Tables begin with the smallest block_m. block_m: of a forced plan, else 0.
const DecodeVariant& variant_of(const DecodeArgs& a, int block_m) {
  DecodeKey key{a.q.dtype, a.cache->format, a.cache->head_dim, 0};
  const std::int64_t packed_rows = a.q.shape[1] * (a.q.shape[2] / a.cache->kv_heads);
  const DecodeVariant* found = nullptr;
  std::string compiled;  // every block_m
  for_each_variant(key.format, [&](const DecodeVariant& v) {
    key.block_m = v.key.block_m;
    if (v.key != key) return;
    if (block_m > 0) compiled += (compiled.empty() ? "" : " or ") + std::to_string(key.block_m);
    if (block_m > 0 ? key.block_m == block_m : !found || fills(packed_rows, key.block_m)) found = &v;
  });
  if (found) return *found;
  ROOFTILE_CHECK(compiled.empty(), op, ": plan does not fit this call: block_m must be ", compiled, " for ", text(key),
                 ", got ", block_m);
  // Every dtype and format is compiled for the same head_dims.
  std::string stores, dims;
  const auto add = [](std::string& list, const std::string& next) { list += (list.empty() ? "" : ", ") + next; };
  const DecodeKey& first = decode_variants<KvFormat::fp16, DType::f16, HeadDims::up_to_96>()[0].key;
  for_each_variant([&](const DecodeVariant& v) {
    if (v.key.block_m != first.block_m) return;
    if (v.key.head_dim == first.head_dim) add(stores, std::string(name(v.key.dtype)) + " " + name(v.key.format));
    if (v.key.dtype == first.dtype && v.key.format == first.format) add(dims, std::to_string(v.key.head_dim));
  });
  fail(ErrorKind::not_supported, op, ": no GPU kernel for cache ", text(key), "; compiled: ", stores, "; head_dim ",
       dims);
}

DecodePlan plan_of(const DeviceScope& scope, const DecodeArgs& a, const DecodeVariant& v, const char* forced) {
  const std::int64_t tokens = a.q.shape[1];
  return plan_decode(op,
                     {a.q.shape[0], tokens, a.cache->kv_heads, static_cast<int>(a.q.shape[2] / a.cache->kv_heads),
                      a.cache->head_dim, v.key.block_m, visible_tokens(a.cache->capacity(), a.logits.window, tokens)},
                     {scope.sms(), std::min(v.ctas_per_sm, scope.ctas_that_fit(v.smem_bytes)),
                      v.clusters ? scope.largest_cluster() : 1},
                     forced);
}

// Vector loads need this alignment; caches that this library makes have it.
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

// Whether every 8 elements of a 16-bit tensor's rows are one aligned 16-byte vector.
bool rows_are_vectors(const TensorView& t) {
  if (t.last_stride() != 1 || reinterpret_cast<std::uintptr_t>(t.data) % 16 != 0) return false;
  return std::all_of(t.stride, t.stride + t.ndim - 1, [](std::int64_t stride) { return stride % 8 == 0; });
}

// The cost is counted in 32 bits. Upper bound of all work tiles, in KV tiles: tokens / 32, a quarter more for the
// ends of KV splits (2 KV tiles for 8 at least), a sixteenth more where work ranges are rounded up: less than 1.5
// times.
void check_size(const DecodeArgs& a) {
  const double m_blocks_all =
      static_cast<double>(a.q.shape[1]) * static_cast<double>(a.q.shape[2]) / mma_n + a.cache->kv_heads;
  const double tile_cost = 1.5 * static_cast<double>(a.cache->capacity()) / kv_tile_tokens + 16;
  const double cost = static_cast<double>(a.q.shape[0]) * m_blocks_all * tile_cost;
  ROOFTILE_CHECK_KIND(not_supported, cost < 0x1p30 && a.q.shape[1] < (1 << 24), op, ": q ", describe(a.q),
                      " over a cache of capacity ", a.cache->capacity(),
                      " is more than one call counts (2^30 KV tiles of 32 tokens x 8 packed query rows)");
}

}  // namespace

DecodeFacts decode_facts(const DecodeKey& key) {
  DecodeFacts facts;
  for_each_variant(key.format, [&](const DecodeVariant& v) {
    if (v.key == key) facts = {v.ctas_per_sm, v.clusters, v.smem_bytes};
  });
  return facts;
}

void load_decode_kernels(const char* op) {
  for_each_variant([op](const DecodeVariant& v) { v.load(op); });
}

std::size_t decode_workspace(const Context& ctx, const DecodeArgs& a) {
  const DeviceScope scope(op, ctx);
  check_size(a);
  return plan_of(scope, a, variant_of(a, forced_block_m(op, ctx.variant)), ctx.variant).workspace_bytes;
}

KernelName decode_attention(const Context& ctx, const DecodeArgs& a) {
  const DeviceScope scope(op, ctx);
  const DecodeVariant& variant = variant_of(a, forced_block_m(op, ctx.variant));
  check_alignment(*a.cache);
  check_size(a);
  const DecodePlan plan = plan_of(scope, a, variant, ctx.variant);
  const KernelName ran = kernel_of(variant.key);
  if (plan.ctas == 0) return ran;  // no work tile
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
  p.block_m = variant.key.block_m;
  p.m_blocks = plan.m_blocks;
  p.rows_used = static_cast<int>(std::min<std::int64_t>(p.block_m, a.q.shape[1] * p.q_per_kv));
  p.tiles_per_entry = a.cache->kv_heads * plan.m_blocks;
  p.vector_queries = rows_are_vectors(a.q);
  p.scale = a.logits.scale;
  p.softcap = a.logits.softcap;
  constexpr std::int64_t int32_max = std::numeric_limits<std::int32_t>::max();
  p.window = static_cast<int>(std::min(a.logits.window, int32_max));
  p.capacity = static_cast<int>(std::min(a.cache->capacity(), int32_max));
  p.work_prefix = workspace_at<std::int32_t>(workspace, 0);
  p.partial_o = workspace_at<float>(workspace, plan.partial_o);
  p.partial_ml = workspace_at<float>(workspace, plan.partial_ml);
  p.reduction_o = workspace_at<float>(workspace, plan.reduction_o);
  p.ctas = plan.ctas;
  p.ctas_per_sm = plan.ctas_per_sm;
  p.ctas_per_tile = plan.ctas_per_tile;
  p.cluster_size = plan.cluster_size;
  p.by_q_per_kv = Divisor(p.q_per_kv);
  p.by_m_blocks = Divisor(p.m_blocks);
  p.by_tiles_per_entry = Divisor(p.tiles_per_entry);
  p.by_ctas_per_tile = Divisor(std::max(p.ctas_per_tile, 1));
  variant.launch(scope, p);
  return ran;
}

}  // namespace rooftile::gpu
