// SPDX-License-Identifier: Apache-2.0
#include <cstring>
#include <string>

#include "bind.h"
#include "calls.h"
#include "kv_cache_handle.h"
#include "rooftile/fused.h"
#include "rooftile/names.h"
#include "rooftile/roof.h"
#include "tensor_caster.h"

namespace rooftile::python {

using namespace nb::literals;
using nb::handle;

namespace {

// torch's own names for the two forms of GELU.
Gelu gelu_form(Args& args, handle h) {
  const char* text = args.text(h, "approximate");
  if (std::strcmp(text, "tanh") == 0) return Gelu::tanh;
  if (std::strcmp(text, "none") == 0) return Gelu::erf;
  const std::string known[] = {"tanh", "none"};
  fail(ErrorKind::value, "gelu_mul: approximate must be \"tanh\" or \"none\", got ", quoted(text),
       did_you_mean(text, known));
}

}  // namespace

// Every binding converts its arguments, releases the GIL and calls one function of cpp/include. It returns the name of
// the kernel that ran.
void bind_fused(nb::module_& m) {
  m.def(
      "rms_norm",
      [](handle x, handle weight, handle eps, handle weight_offset, handle out, handle stream, handle plan) {
        Args args("rms_norm");
        const TensorView tx = args.in(x, "x"), tw = args.optional(weight, "weight"), ty = args.out(out, "out");
        const float e = static_cast<float>(args.number(eps, "eps")),
                    offset = static_cast<float>(args.number(weight_offset, "weight_offset"));
        const Context ctx = args.context(tx, stream, plan);
        return run_repeatable(ctx, [=](const Context& c) { return rms_norm(c, tx, tw, e, ty, offset); });
      },
      "x"_a.none(), "weight"_a.none(), "eps"_a.none(), "weight_offset"_a.none(), "out"_a.none(), "stream"_a.none(),
      "plan"_a.none());

  m.def(
      "add_rms_norm",
      [](handle x, handle residual, handle weight, handle eps, handle weight_offset, handle out, handle residual_out,
         handle stream, handle plan) {
        Args args("add_rms_norm");
        const TensorView tx = args.in(x, "x"), tr = args.in(residual, "residual"), tw = args.optional(weight, "weight");
        const TensorView ty = args.out(out, "out"), ts = args.out(residual_out, "residual_out");
        const float e = static_cast<float>(args.number(eps, "eps")),
                    offset = static_cast<float>(args.number(weight_offset, "weight_offset"));
        const Context ctx = args.context(tx, stream, plan);
        return run_repeatable(ctx, [=](const Context& c) { return add_rms_norm(c, tx, tr, tw, e, ty, ts, offset); });
      },
      "x"_a.none(), "residual"_a.none(), "weight"_a.none(), "eps"_a.none(), "weight_offset"_a.none(), "out"_a.none(),
      "residual_out"_a.none(), "stream"_a.none(), "plan"_a.none());

  m.def(
      "qk_rms_norm",
      [](handle q, handle k, handle q_weight, handle k_weight, handle eps, handle weight_offset, handle q_out,
         handle k_out, handle stream, handle plan) {
        Args args("qk_rms_norm");
        const TensorView tq = args.in(q, "q"), tk = args.in(k, "k");
        const TensorView wq = args.optional(q_weight, "q_weight"), wk = args.optional(k_weight, "k_weight");
        const TensorView oq = args.out(q_out, "q_out"), ok = args.out(k_out, "k_out");
        const float e = static_cast<float>(args.number(eps, "eps")),
                    offset = static_cast<float>(args.number(weight_offset, "weight_offset"));
        const Context ctx = args.context(tq, stream, plan);
        return run_repeatable(ctx, [=](const Context& c) { return qk_rms_norm(c, tq, tk, wq, wk, e, oq, ok, offset); });
      },
      "q"_a.none(), "k"_a.none(), "q_weight"_a.none(), "k_weight"_a.none(), "eps"_a.none(), "weight_offset"_a.none(),
      "q_out"_a.none(), "k_out"_a.none(), "stream"_a.none(), "plan"_a.none());

  m.def(
      "embedding",
      [](handle ids, handle weight, handle scale, handle out, handle stream, handle plan) {
        Args args("embedding");
        const TensorView ti = args.in(ids, "ids"), tw = args.in(weight, "weight"), ty = args.out(out, "out");
        const float s = static_cast<float>(args.number(scale, "scale"));
        const Context ctx = args.context(tw, stream, plan);
        return run_repeatable(ctx, [=](const Context& c) { return embedding(c, ti, tw, s, ty); });
      },
      "ids"_a.none(), "weight"_a.none(), "scale"_a.none(), "out"_a.none(), "stream"_a.none(), "plan"_a.none());

  m.def(
      "layer_norm",
      [](handle x, handle weight, handle bias, handle eps, handle out, handle stream, handle plan) {
        Args args("layer_norm");
        const TensorView tx = args.in(x, "x"), tw = args.optional(weight, "weight"), tb = args.optional(bias, "bias");
        const TensorView ty = args.out(out, "out");
        const float e = static_cast<float>(args.number(eps, "eps"));
        const Context ctx = args.context(tx, stream, plan);
        return run([&] { return layer_norm(ctx, tx, tw, tb, e, ty); });
      },
      "x"_a.none(), "weight"_a.none(), "bias"_a.none(), "eps"_a.none(), "out"_a.none(), "stream"_a.none(),
      "plan"_a.none());

  m.def(
      "add_layer_norm",
      [](handle x, handle residual, handle weight, handle bias, handle eps, handle out, handle residual_out,
         handle stream, handle plan) {
        Args args("add_layer_norm");
        const TensorView tx = args.in(x, "x"), tr = args.in(residual, "residual");
        const TensorView tw = args.optional(weight, "weight"), tb = args.optional(bias, "bias");
        const TensorView ty = args.out(out, "out"), ts = args.out(residual_out, "residual_out");
        const float e = static_cast<float>(args.number(eps, "eps"));
        const Context ctx = args.context(tx, stream, plan);
        return run([&] { return add_layer_norm(ctx, tx, tr, tw, tb, e, ty, ts); });
      },
      "x"_a.none(), "residual"_a.none(), "weight"_a.none(), "bias"_a.none(), "eps"_a.none(), "out"_a.none(),
      "residual_out"_a.none(), "stream"_a.none(), "plan"_a.none());

  m.def(
      "rope",
      [](handle q, handle k, handle cos, handle sin, handle positions, handle q_out, handle k_out, handle stream,
         handle plan) {
        Args args("rope");
        const TensorView tq = args.in(q, "q"), tk = args.in(k, "k"), tc = args.in(cos, "cos"), ts = args.in(sin, "sin");
        const TensorView tp = args.in(positions, "positions");
        const TensorView oq = args.out(q_out, "q_out"), ok = args.out(k_out, "k_out");
        const Context ctx = args.context(tq, stream, plan);
        return run([&] { return rope(ctx, tq, tk, tc, ts, tp, oq, ok); });
      },
      "q"_a.none(), "k"_a.none(), "cos"_a.none(), "sin"_a.none(), "positions"_a.none(), "q_out"_a.none(),
      "k_out"_a.none(), "stream"_a.none(), "plan"_a.none());

  m.def(
      "rope_append",
      [](handle q, handle k, handle v, handle cos, handle sin, handle positions, handle cache, handle rows,
         handle counts, handle q_out, handle stream, handle plan) {
        Args args("rope_append");
        const TensorView tq = args.in(q, "q"), tk = args.in(k, "k"), tv = args.in(v, "v");
        const TensorView tc = args.in(cos, "cos"), ts = args.in(sin, "sin"), tp = args.in(positions, "positions");
        const TensorView tr = args.optional(rows, "rows"), tn = args.optional(counts, "counts"),
                         oq = args.out(q_out, "q_out");
        const LockedCache on = locked_cache(args, cache);
        const Context ctx = args.context(tq, stream, plan);
        return run_repeatable(ctx, cache, on, CacheUse::writes, [=](const Context& c, const KvCacheView& view) {
          return rope_append(c, tq, tk, tv, tc, ts, tp, view, tr, tn, oq);
        });
      },
      "q"_a.none(), "k"_a.none(), "v"_a.none(), "cos"_a.none(), "sin"_a.none(), "positions"_a.none(), "cache"_a.none(),
      "rows"_a.none(), "counts"_a.none(), "q_out"_a.none(), "stream"_a.none(), "plan"_a.none());

  m.def(
      "silu_mul",
      [](handle gate_up, handle out, handle stream, handle plan) {
        Args args("silu_mul");
        const TensorView tx = args.in(gate_up, "gate_up"), th = args.out(out, "out");
        const Context ctx = args.context(tx, stream, plan);
        return run_repeatable(ctx, [=](const Context& c) { return silu_mul(c, tx, th); });
      },
      "gate_up"_a.none(), "out"_a.none(), "stream"_a.none(), "plan"_a.none());

  m.def(
      "gelu_mul",
      [](handle gate_up, handle approximate, handle out, handle stream, handle plan) {
        Args args("gelu_mul");
        const TensorView tx = args.in(gate_up, "gate_up"), th = args.out(out, "out");
        const Gelu form = gelu_form(args, approximate);
        const Context ctx = args.context(tx, stream, plan);
        return run_repeatable(ctx, [=](const Context& c) { return gelu_mul(c, tx, form, th); });
      },
      "gate_up"_a.none(), "approximate"_a.none(), "out"_a.none(), "stream"_a.none(), "plan"_a.none());

  m.def(
      "softmax",
      [](handle x, handle out, handle stream, handle plan) {
        Args args("softmax");
        const TensorView tx = args.in(x, "x"), ty = args.out(out, "out");
        const Context ctx = args.context(tx, stream, plan);
        return run([&] { return softmax(ctx, tx, ty); });
      },
      "x"_a.none(), "out"_a.none(), "stream"_a.none(), "plan"_a.none());
}

void bind_roof(nb::module_& m) {
  m.def(
      "read_bytes",
      [](handle x, handle sink, handle stream) {
        Args args("read_bytes");
        const TensorView tx = args.in(x, "x"), ts = args.out(sink, "sink");
        const Context ctx = args.context(tx, stream, nb::none());
        return run([&] { return read_bytes(ctx, tx, ts); });
      },
      "x"_a.none(), "sink"_a.none(), "stream"_a.none() = nb::none());
}

}  // namespace rooftile::python
