// SPDX-License-Identifier: Apache-2.0
#include <cstdint>
#include <limits>

#include "bind.h"
#include "calls.h"
#include "kv_cache_handle.h"
#include "rooftile/attention.h"
#include "tensor_caster.h"

namespace rooftile::python {

using namespace nb::literals;
using nb::handle;

namespace {

void read_logits(Args& args, LogitOptions& o, handle scale, handle window, handle softcap, handle sinks) {
  if (!scale.is_none()) o.scale = static_cast<float>(args.number(scale, "scale"));
  if (!window.is_none()) {
    const std::int64_t w = args.integer(window, "window");
    ROOFTILE_CHECK(w >= 1, args.op(), ": window must be at least 1, got ", w);
    constexpr std::int64_t largest = std::numeric_limits<int>::max();  // longer than any sequence
    o.window = static_cast<int>(w < largest ? w : largest);
  }
  if (!softcap.is_none()) o.softcap = static_cast<float>(args.number(softcap, "softcap"));
  o.sinks = args.optional(sinks, "sinks");
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def(
      "decode_attention",
      [](handle q, handle cache, handle out, handle lse, handle rows, handle counts, handle scale, handle window,
         handle softcap, handle sinks, handle workspace, handle stream, handle plan) {
        Args args("decode_attention");
        const TensorView tq = args.in(q, "q"), to = args.out(out, "out"), tl = args.optional_out(lse, "lse");
        const TensorView tr = args.optional(rows, "rows"), tc = args.optional(counts, "counts");
        LogitOptions options;
        read_logits(args, options, scale, window, softcap, sinks);
        const LockedCache on = locked_cache(args, cache);
        Context ctx = args.context(tq, stream, plan);
        args.lend_to(ctx, workspace, q);
        return run_repeatable(ctx, cache, on, CacheUse::reads, [=](const Context& c, const KvCacheView& view) {
          return decode_attention(c, tq, view, to, tl, tr, tc, options);
        });
      },
      "q"_a.none(), "cache"_a.none(), "out"_a.none(), "lse"_a.none(), "rows"_a.none(), "counts"_a.none(),
      "scale"_a.none(), "window"_a.none(), "softcap"_a.none(), "sinks"_a.none(), "workspace"_a.none(),
      "stream"_a.none(), "plan"_a.none());

  m.def(
      "prefill_attention",
      [](handle q, handle k, handle v, handle out, handle lse, bool causal, handle scale, handle window, handle softcap,
         handle sinks, handle alibi_slopes, handle cu_seqlens_q, handle cu_seqlens_k, handle cache, handle rows,
         handle counts, handle stream, handle plan) {
        Args args("prefill_attention");
        const TensorView tq = args.in(q, "q"), tk = args.in(k, "k"), tv = args.in(v, "v");
        const TensorView to = args.out(out, "out"), tl = args.optional_out(lse, "lse");
        PrefillOptions options;
        read_logits(args, options, scale, window, softcap, sinks);
        options.causal = causal;
        options.alibi_slopes = args.optional(alibi_slopes, "alibi_slopes");
        options.cu_seqlens_q = args.optional(cu_seqlens_q, "cu_seqlens_q");
        options.cu_seqlens_k = args.optional(cu_seqlens_k, "cu_seqlens_k");
        options.rows = args.optional(rows, "rows");
        options.counts = args.optional(counts, "counts");
        const Context ctx = args.context(tq, stream, plan);
        if (cache.is_none()) return run([&] { return prefill_attention(ctx, tq, tk, tv, to, tl, options); });
        const LockedCache on = locked_cache(args, cache);
        options.cache = &on.view;
        return kernel_of(
            run_locked(on, CacheUse::reads, [&] { return prefill_attention(ctx, tq, tk, tv, to, tl, options); }));
      },
      "q"_a.none(), "k"_a.none(), "v"_a.none(), "out"_a.none(), "lse"_a.none(), "causal"_a, "scale"_a.none(),
      "window"_a.none(), "softcap"_a.none(), "sinks"_a.none(), "alibi_slopes"_a.none(), "cu_seqlens_q"_a.none(),
      "cu_seqlens_k"_a.none(), "cache"_a.none(), "rows"_a.none(), "counts"_a.none(), "stream"_a.none(),
      "plan"_a.none());

  m.def(
      "merge_attention",
      [](handle out_a, handle lse_a, handle out_b, handle lse_b, handle out, handle lse, handle stream, handle plan) {
        Args args("merge_attention");
        const TensorView oa = args.in(out_a, "out_a"), la = args.in(lse_a, "lse_a");
        const TensorView ob = args.in(out_b, "out_b"), lb = args.in(lse_b, "lse_b");
        const TensorView to = args.out(out, "out"), tl = args.out(lse, "lse");
        const Context ctx = args.context(oa, stream, plan);
        return run([&] { return merge_attention(ctx, oa, la, ob, lb, to, tl); });
      },
      "out_a"_a.none(), "lse_a"_a.none(), "out_b"_a.none(), "lse_b"_a.none(), "out"_a.none(), "lse"_a.none(),
      "stream"_a.none(), "plan"_a.none());
}

}  // namespace rooftile::python
