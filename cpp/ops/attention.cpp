// SPDX-License-Identifier: Apache-2.0
#include "rooftile/attention.h"

#include <cmath>
#include <initializer_list>
#include <vector>

#include "core/kernel_name.h"
#include "core/kv_layout.h"
#include "kernels/backend.h"
#include "ops/check.h"

namespace rooftile {
namespace {

using check::Arg;

// Values of a small int32 tensor on the host.
std::vector<std::int32_t> host_values(const char* op, const char* argument, const TensorView& t) {
  Arg(op, argument, t).ndim(1, 1).dtype({DType::i32}).device({}, "the host");
  std::vector<std::int32_t> values(static_cast<std::size_t>(t.shape[0]));
  for (std::int64_t i = 0; i < t.shape[0]; ++i)
    values[static_cast<std::size_t>(i)] = t.as<std::int32_t>()[i * t.stride[0]];
  return values;
}

void check_q(const char* op, const TensorView& q, std::int64_t kv_heads) {
  const std::int64_t heads = q.shape[q.ndim - 2], dim = q.last();
  ROOFTILE_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, op, ": q must have a multiple of the ", kv_heads,
                 " KV heads, got ", heads, " query heads in ", describe(q));
  ROOFTILE_CHECK_KIND(not_supported, heads <= check::max_heads, op, ": q must have at most ", check::max_heads,
                      " heads, got ", describe(q));
  ROOFTILE_CHECK_KIND(not_supported, dim >= 1 && dim <= max_head_dim, op, ": q has head_dim ", dim,
                      "; supported are 1 to ", max_head_dim);
}

void check_out(const char* op, const TensorView& q, const TensorView& out, const TensorView& lse) {
  Arg(op, "out", out).given().shape_of(q, "q").dtype({q.dtype}).device(q.device, "q").writable();
  if (!lse.given()) return;
  TensorView per_head = q;  // q without its last dimension
  --per_head.ndim;
  Arg(op, "lse", lse).shape_of(per_head, "q without head_dim").dtype({DType::f32}).device(q.device, "q").writable();
}

// Outputs share no memory with each other nor with an input.
void check_disjoint(const char* op, const TensorView& out, const TensorView& lse,
                    std::initializer_list<check::Named> inputs) {
  check::check_disjoint(op, "out", out, inputs);
  if (!lse.given()) return;
  check::check_disjoint(op, "lse", lse, inputs);
  check::check_disjoint(op, "lse", lse, {{"out", out}});
}

LogitParams logit_params(const char* op, const TensorView& q, const LogitOptions& o) {
  const std::int64_t heads = q.shape[q.ndim - 2];
  LogitParams p;
  p.scale = o.scale ? *o.scale : 1.0f / std::sqrt(static_cast<float>(q.last()));
  ROOFTILE_CHECK(std::isfinite(p.scale), op, ": scale must be finite, got ", p.scale);
  if (o.window) {
    ROOFTILE_CHECK(*o.window >= 1, op, ": window must be at least 1, got ", *o.window);
    p.window = *o.window;
  }
  if (o.softcap) {
    ROOFTILE_CHECK(std::isfinite(*o.softcap) && *o.softcap > 0, op, ": softcap must be positive and finite, got ",
                   *o.softcap);
    p.softcap = *o.softcap;
  }
  if (o.sinks.given()) {
    Arg(op, "sinks", o.sinks).shape({heads}, "[q_heads]").dtype({q.dtype, DType::f32}).device(q.device, "q");
    p.sinks = &o.sinks;
  }
  if (o.alibi_slopes.given()) {
    Arg(op, "alibi_slopes", o.alibi_slopes).shape({heads}, "[q_heads]").dtype({DType::f32}).device(q.device, "q");
    p.alibi_slopes = &o.alibi_slopes;
  }
  return p;
}

void check_cache(const char* op, const TensorView& q, const KvCacheView& cache) {
  Arg(op, "q", q).dtype({cache.dtype}).device(cache.device, "cache");
  ROOFTILE_CHECK(q.last() == cache.head_dim, op, ": q must have the cache's head_dim ", cache.head_dim, ", got ",
                 describe(q));
}

// [B, ...] -> [B, 1, ...]
void add_token_dimension(TensorView& t) {
  if (!t.given()) return;
  for (int i = t.ndim++; i > 1; --i) {
    t.shape[i] = t.shape[i - 1];
    t.stride[i] = t.stride[i - 1];
  }
  t.shape[1] = 1;
  t.stride[1] = 0;
}

// The cache row of every batch entry, in range and with pages that exist.
std::vector<std::int32_t> cache_rows(const char* op, const KvCacheView& cache, std::int64_t batch,
                                     const TensorView& rows) {
  std::vector<std::int32_t> result;
  if (rows.given()) {
    Arg(op, "rows", rows).shape({batch}, "[batch]");
    result = host_values(op, "rows", rows);
    for (std::size_t b = 0; b < result.size(); ++b)
      ROOFTILE_CHECK(result[b] >= 0 && result[b] < cache.max_rows, op, ": rows[", b, "] is ", result[b],
                     ", the cache has rows 0 to ", cache.max_rows - 1);
  } else {
    ROOFTILE_CHECK(batch <= cache.max_rows, op, ": q has a batch of ", batch, ", the cache has ", cache.max_rows,
                   " rows");
    for (std::int64_t b = 0; b < batch; ++b) result.push_back(static_cast<std::int32_t>(b));
  }
  for (std::int32_t row : result) {
    const std::int64_t length = cache.lengths[row];
    ROOFTILE_CHECK(length >= 0 && length <= cache.capacity(), op, ": cache holds length ", length, " for row ", row,
                   ", its capacity is ", cache.capacity());
    for (std::int64_t token = 0; token < length; token += cache.page_size) {
      const std::int64_t page = kv_page(cache, row, token);
      ROOFTILE_CHECK(page >= 0 && page < cache.pages, op, ": cache has block_table[", row, "][",
                     token / cache.page_size, "] = ", page, ", its pool has pages 0 to ", cache.pages - 1);
    }
  }
  return result;
}

std::vector<std::int32_t> count_values(const char* op, const TensorView& counts, std::int64_t batch,
                                       std::int64_t tokens) {
  std::vector<std::int32_t> result;
  if (!counts.given()) return result;
  Arg(op, "counts", counts).shape({batch}, "[batch]");
  result = host_values(op, "counts", counts);
  for (std::size_t b = 0; b < result.size(); ++b)
    ROOFTILE_CHECK(result[b] >= 0 && result[b] <= tokens, op, ": counts[", b, "] is ", result[b], ", q has ", tokens,
                   " tokens a row");
  return result;
}

// The query at `position` of a kivi row reads its own group raw: the ring must still hold it.
void check_raw(const char* op, const KvCacheView& cache, std::int32_t row, std::int64_t position) {
  if (!is_kivi(cache.format) || !cache.raw_from) return;
  ROOFTILE_CHECK(kivi_code_end(position) >= cache.raw_from[row], op, ": cache row ", row,
                 " was truncated: a query at position ", position, " needs the raw tokens from ",
                 kivi_code_end(position), ", the row still has them from ", cache.raw_from[row]);
}

KernelName attention_name(const cpu::Kernels& k, DType dtype, const char* format, std::int64_t head_dim) {
  return kernel_name("cpu_", k.variant, "_", name(dtype), format ? "_" : "", format ? format : "", "_d", head_dim);
}

}  // namespace

std::size_t decode_workspace(const Context& ctx, TensorView q, const KvCacheView& cache) {
  if (!check::on_gpu(ctx)) return 0;
  constexpr const char* op = "decode_attention";
  Arg(op, "q", q).given().ndim(3, 4).activation();
  check_cache(op, q, cache);
  check_q(op, q, cache.kv_heads);
  if (q.ndim == 3) add_token_dimension(q);
  return gpu::decode_workspace(ctx, {.q = q, .cache = &cache});
}

KernelName decode_attention(const Context& ctx, TensorView q, const KvCacheView& cache, TensorView out, TensorView lse,
                            TensorView rows, TensorView counts, const LogitOptions& options) {
  constexpr const char* op = "decode_attention";
  Arg(op, "q", q).given().ndim(3, 4).activation();
  check_cache(op, q, cache);
  check_q(op, q, cache.kv_heads);
  check_out(op, q, out, lse);
  ROOFTILE_CHECK(!options.alibi_slopes.given(), op, ": alibi_slopes is an option of prefill_attention");
  check_disjoint(op, out, lse, {{"q", q}, {"sinks", options.sinks}, {"rows", rows}, {"counts", counts}});
  check::check_disjoint(op, {{"out", out}, {"lse", lse}}, cache);
  DecodeArgs a{.q = q, .out = out, .lse = lse, .cache = &cache, .logits = logit_params(op, q, options)};
  if (q.ndim == 3)
    for (TensorView* t : {&a.q, &a.out, &a.lse}) add_token_dimension(*t);
  check::check_sequences(op, "q", q);
  const std::int64_t batch = a.q.shape[0], tokens = a.q.shape[1];
  ROOFTILE_CHECK_KIND(not_supported, !is_kivi(cache.format) || tokens <= kv_group, op, ": q has ", tokens,
                      " new tokens, with a ", name(cache.format), " cache at most ", kv_group,
                      "; use prefill_attention(..., cache=) before the append");
  if (check::on_gpu(ctx)) {
    check::check_gpu(op, ctx, "q", q, true);
    check::raise_fault(op, cache);
    a.rows = check::device_values(op, "rows", rows, batch, cache.device);
    a.counts = check::device_values(op, "counts", counts, batch, cache.device);
    ROOFTILE_CHECK(rows.given() || batch <= cache.max_rows, op, ": q has a batch of ", batch, ", the cache has ",
                   cache.max_rows, " rows");
    return gpu::decode_attention(ctx, a);
  }
  const cpu::Kernels& k = check::cpu_kernels(op, ctx);
  const std::vector<std::int32_t> row_values = cache_rows(op, cache, batch, rows);
  const std::vector<std::int32_t> real = count_values(op, counts, batch, tokens);
  for (std::size_t b = 0; b < row_values.size(); ++b) {
    const std::int64_t length = cache.lengths[row_values[b]], count = real.empty() ? tokens : real[b];
    if (count > 0 && length > 0) check_raw(op, cache, row_values[b], length > count ? length - count : 0);
  }
  a.rows = row_values.data();
  if (counts.given()) a.counts = real.data();
  if (q.numel() > 0) k.decode_attention(Parallel(ctx.threads), a);
  return attention_name(k, q.dtype, name(cache.format), cache.head_dim);
}

KernelName prefill_attention(const Context& ctx, TensorView q, TensorView k, TensorView v, TensorView out,
                             TensorView lse, const PrefillOptions& options) {
  constexpr const char* op = "prefill_attention";
  const bool packed = options.cu_seqlens_q.given() || options.cu_seqlens_k.given();
  const int ndim = packed ? 3 : 4;
  Arg(op, "q", q).given().ndim(ndim, ndim).activation();
  Arg(op, "k", k).given().ndim(ndim, ndim).dtype({q.dtype}).countable().device(q.device, "q");
  Arg(op, "v", v).given().shape_of(k, "k").dtype({q.dtype}).device(q.device, "q");
  ROOFTILE_CHECK(k.last() == q.last(), op, ": k must have q's head_dim ", q.last(), ", got ", describe(k));
  const std::int64_t kv_heads = k.shape[ndim - 2];
  check_q(op, q, kv_heads);
  check_out(op, q, out, lse);
  check_disjoint(op, out, lse,
                 {{"q", q},
                  {"k", k},
                  {"v", v},
                  {"sinks", options.sinks},
                  {"alibi_slopes", options.alibi_slopes},
                  {"cu_seqlens_q", options.cu_seqlens_q},
                  {"cu_seqlens_k", options.cu_seqlens_k},
                  {"rows", options.rows},
                  {"counts", options.counts}});
  const KvCacheView* cache = options.cache;
  if (cache) {
    check_cache(op, q, *cache);
    check::check_disjoint(op, {{"out", out}, {"lse", lse}}, *cache);
    ROOFTILE_CHECK(kv_heads == cache->kv_heads, op, ": k must have the cache's ", cache->kv_heads, " KV heads, got ",
                   describe(k));
  } else {
    ROOFTILE_CHECK(!options.rows.given(), op, ": rows picks rows of a cache, but cache is None");
  }
  const cpu::Kernels& kernels = check::cpu_kernels(op, ctx);
  PrefillArgs a{.q = q,
                .k = k,
                .v = v,
                .out = out,
                .lse = lse,
                .causal = options.causal,
                .cache = cache,
                .logits = logit_params(op, q, options)};

  std::vector<PrefillSequence> sequences;
  if (packed) {
    const auto begins = [&](const char* argument, const TensorView& t, const TensorView& of, const char* tensor) {
      Arg(op, argument, t).given();
      // the length is whatever a caller says: bounded before memory is made for it
      ROOFTILE_CHECK(t.ndim != 1 || t.shape[0] <= check::max_sequences, op, ": ", argument,
                     " must be [batch + 1] with at most ", check::max_sequences, " entries, got ", describe(t));
      const std::vector<std::int32_t> values = host_values(op, argument, t);
      ROOFTILE_CHECK(!values.empty() && values.front() == 0, op, ": ", argument,
                     " must be [batch + 1] and start with 0, got ", describe(t),
                     values.empty() ? "" : " starting with " + std::to_string(values.front()));
      for (std::size_t i = 1; i < values.size(); ++i)
        ROOFTILE_CHECK(values[i] >= values[i - 1], op, ": ", argument, " must not decrease, got ", values[i], " after ",
                       values[i - 1], " at index ", i);
      ROOFTILE_CHECK(values.back() == of.shape[0], op, ": ", argument, " must end with the ", of.shape[0],
                     " tokens of ", tensor, ", got ", values.back());
      return values;
    };
    const std::vector<std::int32_t> q_begin = begins("cu_seqlens_q", options.cu_seqlens_q, q, "q");
    const std::vector<std::int32_t> k_begin = begins("cu_seqlens_k", options.cu_seqlens_k, k, "k");
    ROOFTILE_CHECK(k_begin.size() == q_begin.size(), op, ": cu_seqlens_k must have cu_seqlens_q's length ",
                   q_begin.size(), ", got ", k_begin.size());
    for (std::size_t b = 0; b + 1 < q_begin.size(); ++b) {
      PrefillSequence s;
      s.q = q_begin[b] * q.stride[0];
      s.out = q_begin[b] * out.stride[0];
      s.lse = q_begin[b] * lse.stride[0];
      s.k = k_begin[b] * k.stride[0];
      s.v = k_begin[b] * v.stride[0];
      s.queries = q_begin[b + 1] - q_begin[b];
      s.keys = k_begin[b + 1] - k_begin[b];
      sequences.push_back(s);
    }
  } else {
    check::check_sequences(op, "q", q);
    ROOFTILE_CHECK(k.shape[0] == q.shape[0], op, ": k must have q's batch of ", q.shape[0], ", got ", describe(k));
    for (std::int64_t b = 0; b < q.shape[0]; ++b) {
      PrefillSequence s;
      s.q = b * q.stride[0];
      s.out = b * out.stride[0];
      s.lse = b * lse.stride[0];
      s.k = b * k.stride[0];
      s.v = b * v.stride[0];
      s.queries = q.shape[1];
      s.keys = k.shape[1];
      sequences.push_back(s);
    }
    for (TensorView* t : {&a.q, &a.k, &a.v, &a.out, &a.lse})
      if (t->given()) {  // [B, S, ...] -> [token, ...]
        --t->ndim;
        for (int i = 0; i < t->ndim; ++i) {
          t->shape[i] = t->shape[i + 1];
          t->stride[i] = t->stride[i + 1];
        }
      }
  }
  const std::int64_t batch = static_cast<std::int64_t>(sequences.size());
  if (cache) {
    const std::vector<std::int32_t> rows = cache_rows(op, *cache, batch, options.rows);
    for (std::size_t b = 0; b < rows.size(); ++b) {
      sequences[b].row = rows[b];
      sequences[b].cached = cache->lengths[rows[b]];
      if (sequences[b].cached % kv_group) check_raw(op, *cache, rows[b], sequences[b].cached);
    }
  }
  std::int64_t longest = 0;
  for (const PrefillSequence& s : sequences) longest = s.queries > longest ? s.queries : longest;
  const std::vector<std::int32_t> real = count_values(op, options.counts, batch, longest);
  for (std::size_t b = 0; b < sequences.size(); ++b) {
    PrefillSequence& s = sequences[b];
    if (cache || options.counts.given())
      ROOFTILE_CHECK(s.keys == s.queries, op, ": k must have as many tokens as q when ", cache ? "cache" : "counts",
                     " is given, got ", s.keys, " and ", s.queries, " in sequence ", b);
    s.real = s.queries;
    if (!options.counts.given()) continue;
    ROOFTILE_CHECK(real[b] <= s.queries, op, ": counts[", b, "] is ", real[b], ", sequence ", b, " has ", s.queries,
                   " tokens");
    s.real = s.keys = real[b];
  }
  a.batch = batch;
  a.sequences = sequences.data();
  if (q.numel() > 0) kernels.prefill_attention(Parallel(ctx.threads), a);
  return attention_name(kernels, q.dtype, cache ? name(cache->format) : nullptr, q.last());
}

KernelName merge_attention(const Context& ctx, TensorView out_a, TensorView lse_a, TensorView out_b, TensorView lse_b,
                           TensorView out, TensorView lse) {
  constexpr const char* op = "merge_attention";
  Arg(op, "out_a", out_a).given().ndim(2, TensorView::max_ndim).activation();
  ROOFTILE_CHECK(out_a.last() > 0, op, ": out_a must have a head_dim of at least 1, got ", describe(out_a));
  Arg(op, "out_b", out_b).given().shape_of(out_a, "out_a").dtype({out_a.dtype}).device(out_a.device, "out_a");
  Arg(op, "lse_a", lse_a).given();
  Arg(op, "lse_b", lse_b).given();
  TensorView per_head = out_a;  // out_a without its last dimension
  --per_head.ndim;
  for (const auto& [argument, t] : {std::pair{"lse_a", &lse_a}, {"lse_b", &lse_b}, {"lse", &lse}})
    if (t->given())
      Arg(op, argument, *t)
          .shape_of(per_head, "out_a without head_dim")
          .dtype({DType::f32})
          .device(out_a.device, "out_a");
  Arg(op, "out", out).given().shape_of(out_a, "out_a").dtype({out_a.dtype}).device(out_a.device, "out_a").writable();
  for (const auto& [argument, t] : {check::Named{"out_a", out_a}, {"out_b", out_b}})
    check::check_overlap(op, "out", out, argument, t);
  check::check_disjoint(op, "out", out, {{"lse_a", lse_a}, {"lse_b", lse_b}});
  if (lse.given()) {
    Arg(op, "lse", lse).writable();
    for (const auto& [argument, t] : {check::Named{"lse_a", lse_a}, {"lse_b", lse_b}})
      check::check_overlap(op, "lse", lse, argument, t);
    check::check_disjoint(op, "lse", lse, {{"out_a", out_a}, {"out_b", out_b}, {"out", out}});
  }
  if (check::on_gpu(ctx)) {
    check::check_gpu(op, ctx, "out_a", out_a);
    return gpu::merge_attention(ctx, out_a, lse_a, out_b, lse_b, out, lse);
  }
  const cpu::Kernels& k = check::cpu_kernels(op, ctx);
  if (out.numel() > 0) k.merge_attention(Parallel(ctx.threads), out_a, lse_a, out_b, lse_b, out, lse);
  return attention_name(k, out_a.dtype, nullptr, out_a.last());
}

}  // namespace rooftile
