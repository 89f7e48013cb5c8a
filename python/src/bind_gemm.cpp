// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "bind.h"
#include "calls.h"
#include "rooftile/gemm.h"
#include "rooftile/names.h"
#include "tensor_caster.h"
#include "w4_handle.h"

namespace rooftile::python {

using namespace nb::literals;
using nb::handle;

namespace {

int group_size(Args& args, const char* op, handle h) {
  const std::int64_t value = args.integer(h, "group_size");
  ROOFTILE_CHECK(value > 0 && value <= INT32_MAX, op, ": group_size must be 32, 64, 128 or K, got ", value);
  return static_cast<int>(value);
}

DType scale_dtype(const char* op, const std::string& text) {
  for (DType t : {DType::f16, DType::bf16})
    if (text == name(t)) return t;
  fail(ErrorKind::type, op, ": scale_dtype must be float16 or bfloat16, got ", quoted(text));
}

void take_activation(Args& args, const char* op, handle h, MatmulOptions& options) {
  if (!h.is_none()) options.activation = activation_from_name(op, args.text(h, "activation"), &options.gated);
}

}  // namespace

W4Handle::W4Handle(handle codes, handle scales, handle offsets, handle perm, handle n, handle k, int bits, handle group,
                   handle zeros, handle dtype, const char* op)
    : codes_(codes, "codes", HeldArray::Use::read),
      scales_(scales, "scales", HeldArray::Use::read),
      offsets_(offsets, "offsets", HeldArray::Use::read),
      perm_(perm, "perm", HeldArray::Use::versioned) {
  Args args(op);
  view_ = {.bits = bits,
           .n = args.integer(n, "n"),
           .k = args.integer(k, "k"),
           .group = group_size(args, op, group),
           .zeros = w4_zeros_from_name(op, args.text(zeros, "zeros")),
           .scale_dtype = scale_dtype(op, args.text(dtype, "scale_dtype"))};
  take(args);
}

void W4Handle::take(Args& args) {
  taken_ = false;
  const TensorView codes = codes_.take(args), scales = scales_.take(args), offsets = offsets_.take(args),
                   perm = perm_.take(args);
  const W4View& v = view_;
  view_ = rooftile::w4_view(v.n, v.k, v.bits, v.group, v.zeros, v.scale_dtype, codes, scales, offsets, perm, args.op());
  taken_ = true;
}

const W4View& W4Handle::view(Args& args) {
  if (!(taken_ && codes_.as_taken() && scales_.as_taken() && offsets_.as_taken() && perm_.as_taken())) take(args);
  return view_;
}

W4View w4_view(Args& args, handle h, int bits) {
  if (!nb::isinstance<W4Handle>(h)) {
    const nb::object type = nb::borrow(h.type());
    fail(ErrorKind::type, args.op(), ": w must be a rooftile.W", bits, "Weight, got ",
         nb::cast<nb::str>(type.attr("__name__")).c_str());
  }
  return nb::cast<W4Handle&>(h).view(args);
}

namespace {

template <int bits, auto matmul>
void bind_matmul(nb::module_& m, const char* op) {
  m.def(
      op,
      [op](handle x, handle w, handle bias, handle activation, handle residual, handle out, bool batch_invariant,
           handle workspace, handle stream, handle plan) {
        Args args(op);
        const TensorView tx = args.in(x, "x");
        const TensorView ty = args.out(out, "out");
        MatmulOptions options{.bias = args.optional(bias, "bias"), .residual = args.optional(residual, "residual")};
        take_activation(args, op, activation, options);
        options.batch_invariant = batch_invariant;
        const W4View view = w4_view(args, w, bits);
        Context ctx = args.context(tx, stream, plan);
        args.lend_to(ctx, workspace, x);
        return run_repeatable(ctx, [=](const Context& c) { return matmul(c, tx, view, ty, options); });
      },
      "x"_a.none(), "w"_a.none(), "bias"_a.none(), "activation"_a.none(), "residual"_a.none(), "out"_a.none(),
      "batch_invariant"_a, "workspace"_a.none(), "stream"_a.none(), "plan"_a.none());
}

}  // namespace

void bind_gemm(nb::module_& m) {
  nb::class_<W4Handle>(m, "W4Handle")
      .def(nb::init<handle, handle, handle, handle, handle, handle, int, handle, handle, handle, const char*>(),
           "codes"_a.none(), "scales"_a.none(), "offsets"_a.none(), "perm"_a.none(), "n"_a.none(), "k"_a.none(),
           "bits"_a, "group_size"_a.none(), "zeros"_a.none(), "scale_dtype"_a.none(), "op"_a);

  m.attr("w4_layout_version") = w4_layout_version;

  // Bytes of the kernel tensors (codes, scales, offsets) of a weight. argument: what says N and K.
  m.def(
      "w4_sizes",
      [](const char* op, const char* argument, handle n, handle k, int bits, handle group, handle zeros) {
        Args args(op);
        const std::int64_t rows = args.integer(n, argument), columns = args.integer(k, argument);
        const W4Sizes s = w4_sizes(op, rows, columns, bits, group_size(args, op, group),
                                   w4_zeros_from_name(op, args.text(zeros, "zeros")), argument);
        return nb::make_tuple(s.codes, s.scales, s.offsets);
      },
      "op"_a, "argument"_a, "n"_a.none(), "k"_a.none(), "bits"_a, "group_size"_a.none(), "zeros"_a.none());

  // Refuses, in the op's words, what no op takes as an array: for checks that Python has to make first.
  m.def(
      "check_array", [](const char* op, const char* argument, handle array) { Args(op).in(array, argument); }, "op"_a,
      "argument"_a, "array"_a.none());

  m.def(
      "w4_pack",
      [](const char* op, handle codes, handle scales, handle offsets, handle zeros, int bits, handle group,
         handle out_codes, handle out_scales, handle out_offsets) {
        Args args(op);
        const TensorView c = args.in(codes, "codes"), s = args.in(scales, "scales"),
                         o = args.optional(offsets, "zeros");
        const TensorView to_c = args.out(out_codes, "out_codes"), to_s = args.out(out_scales, "out_scales"),
                         to_o = args.optional_out(out_offsets, "out_offsets");
        const W4Zeros z = w4_zeros_from_name(op, args.text(zeros, "kind"));
        const int g = group_size(args, op, group);
        const Context ctx = args.context(c, nb::none(), nb::none());
        nb::gil_scoped_release unlocked;
        w4_pack(ctx, c, s, o, z, bits, g, to_c, to_s, to_o, op);
      },
      "op"_a, "codes"_a.none(), "scales"_a.none(), "offsets"_a.none(), "zeros"_a.none(), "bits"_a,
      "group_size"_a.none(), "out_codes"_a.none(), "out_scales"_a.none(), "out_offsets"_a.none());

  m.def(
      "w4_unpack",
      [](const char* op, W4Handle& w, handle codes, handle scales, handle offsets) {
        Args args(op);
        const W4View view = w.view(args);
        const TensorView c = args.out(codes, "codes"), s = args.out(scales, "scales"),
                         o = args.optional_out(offsets, "zeros");
        const Context ctx = args.context(c, nb::none(), nb::none());
        nb::gil_scoped_release unlocked;
        w4_unpack(ctx, view, c, s, o, op);
      },
      "op"_a, "w"_a, "codes"_a.none(), "scales"_a.none(), "offsets"_a.none());

  m.def(
      "w4_quantize",
      [](const char* op, handle weight, int bits, handle group, handle zeros, handle codes, handle scales,
         handle offsets) {
        Args args(op);
        const TensorView x = args.in(weight, "weight"), c = args.out(codes, "codes"), s = args.out(scales, "scales"),
                         o = args.optional_out(offsets, "minima");
        const W4Zeros z = w4_zeros_from_name(op, args.text(zeros, "zeros"));
        const int g = group_size(args, op, group);
        const Context ctx = args.context(x, nb::none(), nb::none());
        nb::gil_scoped_release unlocked;
        w4_quantize(ctx, x, bits, g, z, c, s, o, op);
      },
      "op"_a, "weight"_a.none(), "bits"_a, "group_size"_a.none(), "zeros"_a.none(), "codes"_a.none(), "scales"_a.none(),
      "offsets"_a.none());

  m.def(
      "w4_dequantize",
      [](const char* op, W4Handle& w, handle out) {
        Args args(op);
        const W4View view = w.view(args);
        const TensorView to = args.out(out, "out");
        const Context ctx = args.context(to, nb::none(), nb::none());
        nb::gil_scoped_release unlocked;
        w4_dequantize(ctx, view, to, op);
      },
      "op"_a, "w"_a, "out"_a.none());

  bind_matmul<4, w4a16_matmul>(m, "w4a16_matmul");
  bind_matmul<8, w8a16_matmul>(m, "w8a16_matmul");

  m.def(
      "linear",
      [](handle x, handle weight, handle bias, handle activation, handle residual, handle out, handle workspace,
         handle stream, handle plan) {
        const char* op = "linear";
        Args args(op);
        const TensorView tx = args.in(x, "x"), tw = args.in(weight, "weight"), ty = args.out(out, "out");
        LinearOptions options{.bias = args.optional(bias, "bias"), .residual = args.optional(residual, "residual")};
        if (!activation.is_none()) options.activation = activation_from_name(op, args.text(activation, "activation"));
        Context ctx = args.context(tx, stream, plan);
        args.lend_to(ctx, workspace, x);
        return run_repeatable(ctx, [=](const Context& c) { return linear(c, tx, tw, ty, options); });
      },
      "x"_a.none(), "weight"_a.none(), "bias"_a.none(), "activation"_a.none(), "residual"_a.none(), "out"_a.none(),
      "workspace"_a.none(), "stream"_a.none(), "plan"_a.none());
}

}  // namespace rooftile::python
