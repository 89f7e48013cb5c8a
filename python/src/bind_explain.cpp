// SPDX-License-Identifier: Apache-2.0
// Plans without a call, and the constants that Python shares with C++.
#include <nanobind/nanobind.h>

#include <algorithm>
#include <string>

#include "bind.h"
#include "rooftile/constants.h"
#include "rooftile/explain.h"
#include "rooftile/names.h"
#include "tensor_caster.h"

namespace rooftile::python {

using namespace nb::literals;
using nb::handle;

namespace {

DType dtype_of(Args& args, handle h) {
  const std::string text = args.text(h, "dtype");
  for (DType t : {DType::f32, DType::f16, DType::bf16})
    if (text == name(t)) return t;
  fail(ErrorKind::type, args.op(), ": dtype must be float32, float16 or bfloat16, got ", quoted(text));
}

// (major, minor, sms, whether Hopper's code runs)
GpuTarget target(Args& args, const nb::tuple& t) {
  return {.major = static_cast<int>(args.integer(t[0], "device")),
          .minor = static_cast<int>(args.integer(t[1], "device")),
          .sms = static_cast<int>(args.integer(t[2], "sms")),
          .hopper = nb::cast<bool>(t[3])};
}

// A tensor argument, or a contiguous one without memory from its shape, a tuple. No tensor for None.
TensorView described(Args& args, handle h, const char* argument, DType dtype) {
  if (!nb::isinstance<nb::tuple>(h)) return args.optional(h, argument);
  const nb::tuple shape = nb::borrow<nb::tuple>(h);
  TensorView t;
  t.dtype = dtype;
  ROOFTILE_CHECK(shape.size() <= TensorView::max_ndim, args.op(), ": ", argument, " must have at most ",
                 TensorView::max_ndim, " dimensions, got ", shape.size());
  t.ndim = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    t.shape[i] = args.integer(shape[static_cast<std::size_t>(i)], argument);
    ROOFTILE_CHECK(t.shape[i] >= 0 && t.shape[i] <= INT32_MAX, args.op(), ": ", argument,
                   " must have sizes of 0 to 2**31 - 1, got ", t.shape[i]);
    t.stride[i] = stride;
    stride *= std::max<std::int64_t>(t.shape[i], 1);
  }
  return t;
}

const char* forced(Args& args, handle plan) { return plan.is_none() ? nullptr : args.text(plan, "plan"); }

std::int64_t size_of(Args& args, handle h, const char* what) {
  const std::int64_t value = args.integer(h, what);
  ROOFTILE_CHECK(value >= 0 && value <= INT32_MAX, args.op(), ": ", what, " must be 0 to 2**31 - 1, got ", value);
  return value;
}

nb::tuple facts(const PlanFacts& f) {
  return nb::make_tuple(f.plan.c_str(), f.why.c_str(), f.kernel.text, f.workspace_bytes);
}

// The elements of a range as a tuple.
template <class Range, class To>
nb::tuple tuple_of(const Range& range, const To& to) {
  nb::list all;
  for (const auto& element : range) all.append(to(element));
  return nb::tuple(all);
}

void bind_constants(nb::module_& m) {
  const Constants c = constants();
  m.attr("kv_group") = c.kv_group;
  m.attr("kv_ring") = c.kv_ring;
  m.attr("kv_step_back") = c.kv_step_back;
  m.attr("max_head_dim") = c.max_head_dim;
  m.attr("max_heads") = c.max_heads;
  m.attr("max_head_norm") = c.max_head_norm;
  m.attr("max_vocabulary") = c.max_vocabulary;
  m.attr("max_ndim") = static_cast<int>(TensorView::max_ndim);
  m.attr("w4_tile_rows") = c.w4_tile_rows;
  const auto same = [](int size) { return size; };
  m.attr("kv_page_sizes") = tuple_of(kv_page_sizes(), same);
  m.attr("w4_group_sizes") = tuple_of(w4_group_sizes(), same);
  nb::list formats, groups, minima, kinds;
  nb::dict elements, bits, codes;
  for (int i = 0; i < kv_format_count; ++i) {
    const auto f = static_cast<KvFormat>(i);
    formats.append(name(f));
    if (has_groups(f)) groups.append(name(f));
    if (has_minima(f)) minima.append(name(f));
    if (const DType* dtype = element_dtype(f)) elements[name(f)] = name(*dtype);
    bits[name(f)] = kv_format_traits(f).bits;
    const KvCode code = kv_format_traits(f).code;
    if (code != KvCode::element) codes[name(f)] = code == KvCode::e4m3 ? "e4m3" : "integer";
  }
  m.attr("kv_formats") = nb::tuple(formats);
  m.attr("kv_kivi_formats") = nb::tuple(groups);
  m.attr("kv_minima_formats") = nb::tuple(minima);
  m.attr("kv_element_formats") = elements;  // name: dtype
  m.attr("kv_code_formats") = codes;        // name: "integer" or "e4m3"
  m.attr("kv_format_bits") = bits;          // name: bits of an element or a code
  for (W4Zeros z : {W4Zeros::symmetric, W4Zeros::integer, W4Zeros::minima}) kinds.append(name(z));
  m.attr("w4_kinds") = nb::tuple(kinds);
  const auto text = [](const std::string& name) { return nb::str(name.c_str()); };
  m.attr("activations") = tuple_of(activation_names(false), text);
  m.attr("gated_activations") = tuple_of(activation_names(true), text);
}

}  // namespace

// Each returns (plan, why, kernel, bytes of workspace).
void bind_explain(nb::module_& m) {
  bind_constants(m);
  m.def(
      "explain_decode",
      [](const nb::tuple& device, handle dtype, handle format, const nb::tuple& sizes, handle plan) {
        Args args("decode_attention");
        const auto size = [&](std::size_t i, const char* what) { return size_of(args, sizes[i], what); };
        const DecodeSizes s{.dtype = dtype_of(args, dtype),
                            .format = kv_format_from_name(args.op(), args.text(format, "format")),
                            .batch = size(0, "batch"),
                            .tokens = size(1, "tokens"),
                            .q_heads = size(2, "q_heads"),
                            .kv_heads = size(3, "kv_heads"),
                            .head_dim = size(4, "head_dim"),
                            .capacity = size(5, "capacity"),
                            .window = size(6, "window")};
        return facts(explain_decode(target(args, device), s, forced(args, plan)));
      },
      "device"_a, "dtype"_a.none(), "format"_a.none(), "sizes"_a, "plan"_a.none());

  m.def(
      "explain_append",
      [](const char* op, const nb::tuple& device, handle dtype, handle format, const nb::tuple& sizes, handle plan) {
        Args args(op);
        const auto size = [&](std::size_t i, const char* what) { return size_of(args, sizes[i], what); };
        const AppendSizes s{.dtype = dtype_of(args, dtype),
                            .format = kv_format_from_name(op, args.text(format, "format")),
                            .batch = size(0, "batch"),
                            .tokens = size(1, "tokens"),
                            .q_heads = size(2, "q_heads"),
                            .kv_heads = size(3, "kv_heads"),
                            .head_dim = size(4, "head_dim")};
        return facts(explain_append(op, target(args, device), s, forced(args, plan)));
      },
      "op"_a, "device"_a, "dtype"_a.none(), "format"_a.none(), "sizes"_a, "plan"_a.none());

  // weight: (n, k, bits, group_size, kind, scale_dtype, whether it has act-order)
  m.def(
      "explain_w4a16",
      [](const char* op, const nb::tuple& device, handle dtype, handle x, const nb::tuple& weight, handle y,
         handle bias, handle residual, handle activation, bool batch_invariant, handle plan) {
        Args args(op);
        const DType d = dtype_of(args, dtype);
        static const std::int32_t order = 0;  // its address says that there is one
        const W4View w{.bits = static_cast<int>(args.integer(weight[2], "bits")),
                       .n = args.integer(weight[0], "n"),
                       .k = args.integer(weight[1], "k"),
                       .group = static_cast<int>(args.integer(weight[3], "group_size")),
                       .zeros = w4_zeros_from_name(op, args.text(weight[4], "kind")),
                       .scale_dtype = dtype_of(args, weight[5]),
                       .perm = nb::cast<bool>(weight[6]) ? &order : nullptr};
        w4_sizes(op, w.n, w.k, w.bits, w.group, w.zeros, "w");  // refuses what no weight has
        MatmulOptions options{.bias = described(args, bias, "bias", d),
                              .residual = described(args, residual, "residual", d),
                              .batch_invariant = batch_invariant};
        if (!activation.is_none())
          options.activation = activation_from_name(op, args.text(activation, "activation"), &options.gated);
        return facts(explain_w4a16(op, target(args, device), described(args, x, "x", d), w,
                                   described(args, y, "out", d), options, forced(args, plan)));
      },
      "op"_a, "device"_a, "dtype"_a.none(), "x"_a.none(), "weight"_a, "y"_a.none(), "bias"_a.none(),
      "residual"_a.none(), "activation"_a.none(), "batch_invariant"_a, "plan"_a.none());

  m.def(
      "explain_linear",
      [](const nb::tuple& device, handle dtype, handle x, handle weight, handle y, handle bias, handle residual,
         handle plan) {
        Args args("linear");
        const DType d = dtype_of(args, dtype);
        const LinearOptions options{.bias = described(args, bias, "bias", d),
                                    .residual = described(args, residual, "residual", d)};
        return facts(explain_linear(target(args, device), described(args, x, "x", d),
                                    described(args, weight, "weight", d), described(args, y, "out", d), options,
                                    forced(args, plan)));
      },
      "device"_a, "dtype"_a.none(), "x"_a.none(), "weight"_a.none(), "y"_a.none(), "bias"_a.none(), "residual"_a.none(),
      "plan"_a.none());

  m.def(
      "explain_cpu",
      [](const char* op, handle plan) {
        Args args(op);
        return explain_cpu(op, forced(args, plan));
      },
      "op"_a, "plan"_a.none());
}

}  // namespace rooftile::python
