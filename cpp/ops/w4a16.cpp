// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <limits>
#include <vector>

#include "core/align.h"
#include "core/kernel_name.h"
#include "core/w4_layout.h"
#include "cpu/w4_convert.h"
#include "kernels/backend.h"
#include "ops/check.h"
#include "rooftile/constants.h"
#include "rooftile/gemm.h"

namespace rooftile {
namespace {

using check::Arg;

struct Shape {
  std::int64_t n, k, groups;
};

void check_bits(const char* op, int bits, W4Zeros zeros) {
  ROOFTILE_CHECK(bits == 4 || bits == 8, op, ": bits must be 4 or 8, got ", bits);
  ROOFTILE_CHECK(bits == 4 || zeros != W4Zeros::minima, op,
                 ": zeros must be \"symmetric\" or \"integer\" for weights of 8 bits, got \"", name(zeros), '"');
}

// argument: which one of the op says N and K.
Shape check_shape(const char* op, const char* argument, std::int64_t n, std::int64_t k, int bits, int group,
                  W4Zeros zeros) {
  constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
  check_bits(op, bits, zeros);
  ROOFTILE_CHECK(n >= 0 && n <= most, op, ": ", argument, " must have N rows, 0 to ", most, ", got N = ", n);
  if (bits == 4) {
    ROOFTILE_CHECK(k > 0 && k <= most && k % 2 == 0, op, ": ", argument,
                   " must have an even number of columns K, 2 to ", most, " (two codes a byte), got K = ", k);
  } else {
    ROOFTILE_CHECK(k > 0 && k <= most, op, ": ", argument, " must have K columns, 1 to ", most, ", got K = ", k);
  }
  ROOFTILE_CHECK(std::ranges::count(w4_group_sizes(), group) > 0 || group == k, op,
                 ": group_size must be 32, 64, 128 or K = ", k, ", got ", group);
  ROOFTILE_CHECK(k % group == 0, op, ": group_size = ", group, " must divide ", argument, "'s K = ", k);
  return {n, k, k / group};
}

void check_offsets(const char* op, const char* argument, const TensorView& t, W4Zeros zeros) {
  if (zeros == W4Zeros::symmetric) {
    ROOFTILE_CHECK(!t.given(), op, ": ", argument, " must be None for symmetric weights, got ", describe(t));
  } else {
    ROOFTILE_CHECK(t.given(), op, ": ", argument, " must be given for weights with ", name(zeros), ", got None");
  }
}

const char* codes_shape(int bits) { return bits == 4 ? "[N, K / 2]" : "[N, K]"; }

// codes, scales, offsets in canonical form.
Shape check_canonical(const char* op, const TensorView& codes, const TensorView& scales, const TensorView& offsets,
                      W4Zeros zeros, int bits, int group, const char* offsets_name) {
  check_bits(op, bits, zeros);
  Arg(op, "codes", codes).given().dtype({DType::u8}).ndim(2, 2);
  ROOFTILE_CHECK(codes.shape[1] <= std::numeric_limits<std::int32_t>::max() / (8 / bits), op, ": codes must be ",
                 codes_shape(bits), " with K below 2**31, got ", describe(codes));
  const Shape s = check_shape(op, "codes", codes.shape[0], codes.shape[1] * (8 / bits), bits, group, zeros);
  Arg(op, "scales", scales)
      .given()
      .dtype({DType::f16, DType::bf16})
      .shape({s.n, s.groups}, "[N, K / group_size]")
      .device(codes.device, "codes");
  check_offsets(op, offsets_name, offsets, zeros);
  if (offsets.given())
    Arg(op, offsets_name, offsets)
        .dtype({zeros == W4Zeros::integer ? DType::u8 : scales.dtype})
        .shape({s.n, s.groups}, "[N, K / group_size]")
        .device(codes.device, "codes");
  return s;
}

struct PackedNames {
  const char *codes, *scales, *offsets;
};
void check_packed(const char* op, const W4Sizes& sizes, const TensorView& codes, const TensorView& scales,
                  const TensorView& offsets, W4Zeros zeros, const PackedNames& names) {
  const auto flat = [&](const char* argument, const TensorView& t, std::int64_t bytes) {
    Arg(op, argument, t).given().dtype({DType::u8}).shape({bytes}, "flat bytes").device(codes.device, names.codes);
    ROOFTILE_CHECK(bytes <= 1 || t.stride[0] == 1, op, ": ", argument, " must be contiguous, got stride ", t.stride[0]);
    ROOFTILE_CHECK(t.device.type == DeviceType::cpu || is_aligned(t.data, 16), op, ": ", argument,
                   " must start at a multiple of 16 bytes on a GPU; copy it");
  };
  flat(names.codes, codes, sizes.codes);
  flat(names.scales, scales, sizes.scales);
  check_offsets(op, names.offsets, offsets, zeros);
  if (offsets.given()) flat(names.offsets, offsets, sizes.offsets);
}

// The three arrays of a weight, canonical or packed. Outputs share no memory with each other nor with the inputs.
struct NamedArrays {
  check::Named codes, scales, offsets;
};
void check_disjoint(const char* op, const NamedArrays& out, std::initializer_list<check::Named> inputs) {
  for (const check::Named& t : {out.codes, out.scales, out.offsets}) check::check_disjoint(op, t.name, t.t, inputs);
  check::check_disjoint(op, out.scales.name, out.scales.t, {out.codes});
  check::check_disjoint(op, out.offsets.name, out.offsets.t, {out.codes, out.scales});
}

// The arrays of a weight as tensors; their sizes were checked when the weight was made.
struct WeightMemory {
  explicit WeightMemory(const W4View& w) {
    const std::int64_t count = w4_tiles_n(w.n) * w4_tile_n * (w.k / w.group);
    const auto flat = [](TensorView& t, const void* data, std::int64_t bytes) {
      if (!data) return;
      t.data = const_cast<void*>(data);
      t.dtype = DType::u8;
      t.ndim = 1;
      t.shape[0] = bytes;
      t.stride[0] = 1;
    };
    flat(codes, w.codes, w4_tiles_n(w.n) * w4_tiles_k(w.k) * w4_tile_bytes(w.bits));
    flat(scales, w.scales, 2 * count);
    flat(offsets, w.offsets, w.zeros == W4Zeros::integer ? count : 2 * count);
    flat(perm, w.perm, w.k * std::int64_t{sizeof(std::int32_t)});
  }
  TensorView codes, scales, offsets, perm;
};
void check_disjoint(const char* op, const char* name, const TensorView& out, const W4View& w) {
  const WeightMemory m(w);
  check::check_disjoint(
      op, name, out,
      {{"w's codes", m.codes}, {"w's scales", m.scales}, {"w's offsets", m.offsets}, {"w's perm", m.perm}});
}

// The CPU reads x where perm says, and perm's values may have changed since the view was made. (GPU kernels check
// them.)
void check_columns(const char* op, const W4View& w) {
  if (!w.perm || w.device.type != DeviceType::cpu) return;
  std::uint32_t highest = 0;  // negative numbers are high ones
  for (std::int64_t i = 0; i < w.k; ++i) highest = std::max(highest, static_cast<std::uint32_t>(w.perm[i]));
  if (highest < static_cast<std::uint64_t>(w.k)) return;
  for (std::int64_t i = 0; i < w.k; ++i)
    ROOFTILE_CHECK(w.perm[i] >= 0 && w.perm[i] < w.k, op, ": perm[", i, "] = ", w.perm[i], " is outside [0, ", w.k,
                   ")");
}

}  // namespace

W4Sizes w4_sizes(const char* op, std::int64_t n, std::int64_t k, int bits, int group, W4Zeros zeros,
                 const char* argument) {
  const Shape s = check_shape(op, argument, n, k, bits, group, zeros);
  const std::int64_t count = w4_tiles_n(n) * w4_tile_n * s.groups;
  return {.codes = w4_tiles_n(n) * w4_tiles_k(k) * w4_tile_bytes(bits),
          .scales = 2 * count,
          .offsets = zeros == W4Zeros::symmetric ? 0
                     : zeros == W4Zeros::integer ? count
                                                 : 2 * count};
}

W4View w4_view(std::int64_t n, std::int64_t k, int bits, int group, W4Zeros zeros, DType scale_dtype, TensorView codes,
               TensorView scales, TensorView offsets, TensorView perm, const char* op) {
  check_packed(op, w4_sizes(op, n, k, bits, group, zeros), codes, scales, offsets, zeros,
               {"codes", "scales", "offsets"});
  ROOFTILE_CHECK_KIND(type, scale_dtype == DType::f16 || scale_dtype == DType::bf16, op,
                      ": scale_dtype must be float16 or bfloat16, got ", name(scale_dtype));
  if (perm.given()) {
    Arg(op, "perm", perm).dtype({DType::i32}).shape({k}, "[K]").device(codes.device, "codes");
    ROOFTILE_CHECK(perm.stride[0] == 1, op, ": perm must be contiguous, got stride ", perm.stride[0]);
    if (perm.device.type == DeviceType::cpu) {
      std::vector<bool> seen(static_cast<std::size_t>(k));
      for (std::int64_t i = 0; i < k; ++i) {
        const std::int32_t p = perm.as<std::int32_t>()[i];
        ROOFTILE_CHECK(p >= 0 && p < k, op, ": perm[", i, "] = ", p, " is outside [0, ", k, ")");
        ROOFTILE_CHECK(!seen[static_cast<std::size_t>(p)], op, ": perm is not a permutation: ", p, " occurs twice");
        seen[static_cast<std::size_t>(p)] = true;
      }
    }
  }
  return {.bits = bits,
          .n = n,
          .k = k,
          .group = group,
          .zeros = zeros,
          .scale_dtype = scale_dtype,
          .device = codes.device,
          .codes = codes.as<std::uint8_t>(),
          .scales = scales.as<std::byte>(),
          .offsets = offsets.given() ? offsets.as<std::byte>() : nullptr,
          .perm = perm.given() ? perm.as<std::int32_t>() : nullptr};
}

void w4_pack(const Context& ctx, TensorView codes, TensorView scales, TensorView offsets, W4Zeros zeros, int bits,
             int group, TensorView out_codes, TensorView out_scales, TensorView out_offsets, const char* op) {
  const Shape s = check_canonical(op, codes, scales, offsets, zeros, bits, group, "zeros");
  check_packed(op, w4_sizes(op, s.n, s.k, bits, group, zeros), out_codes, out_scales, out_offsets, zeros,
               {"out_codes", "out_scales", "out_offsets"});
  Arg(op, "out_codes", out_codes).device(codes.device, "codes");
  check_disjoint(op, NamedArrays{{"out_codes", out_codes}, {"out_scales", out_scales}, {"out_offsets", out_offsets}},
                 {{"codes", codes}, {"scales", scales}, {"zeros", offsets}});
  const W4Arrays canonical{codes, scales, offsets}, packed{out_codes, out_scales, out_offsets};
  if (check::on_gpu(ctx)) return gpu::w4_pack(op, ctx, canonical, packed, bits);
  cpu::w4_pack(Parallel(ctx.threads), canonical, packed, bits);
}

void w4_unpack(const Context& ctx, const W4View& w, TensorView codes, TensorView scales, TensorView offsets,
               const char* op) {
  const Shape s = check_canonical(op, codes, scales, offsets, w.zeros, w.bits, w.group, "zeros");
  const int in_byte = 8 / w.bits;
  ROOFTILE_CHECK(s.n == w.n && s.k == w.k, op, ": codes must be ", codes_shape(w.bits), " = [", w.n, ", ",
                 w.k / in_byte, "], got ", describe(codes));
  Arg(op, "scales", scales).dtype({w.scale_dtype});
  for (const auto& [argument, t] : {std::pair{"codes", &codes}, {"scales", &scales}, {"zeros", &offsets}})
    if (t->given()) Arg(op, argument, *t).device(w.device, "the weight").writable();
  const NamedArrays out{{"codes", codes}, {"scales", scales}, {"zeros", offsets}};
  check_disjoint(op, out, {});
  for (const check::Named& t : {out.codes, out.scales, out.offsets}) check_disjoint(op, t.name, t.t, w);
  const W4Arrays canonical{codes, scales, offsets};
  if (check::on_gpu(ctx)) return gpu::w4_unpack(op, ctx, w, canonical);
  cpu::w4_unpack(Parallel(ctx.threads), w, canonical);
}

void w4_quantize(const Context& ctx, TensorView weight, int bits, int group, W4Zeros zeros, TensorView codes,
                 TensorView scales, TensorView offsets, const char* op) {
  Arg(op, "weight", weight).given().activation().ndim(2, 2);
  const std::int64_t rows = weight.shape[0], k = weight.shape[1];
  check_shape(op, "weight", rows, k, bits, group, zeros);
  ROOFTILE_CHECK_KIND(not_supported, zeros != W4Zeros::integer, op, ": zeros must be \"symmetric\"",
                      bits == 4 ? " or \"minima\"" : "",
                      "; rounding to integer zeros is not implemented (they can be imported)");
  Arg(op, "codes", codes)
      .given()
      .dtype({DType::u8})
      .shape({rows, k / (8 / bits)}, codes_shape(bits))
      .device(weight.device, "weight");
  check_canonical(op, codes, scales, offsets, zeros, bits, group, "minima");
  for (const auto& [argument, t] : {std::pair{"codes", &codes}, {"scales", &scales}, {"minima", &offsets}})
    if (t->given()) Arg(op, argument, *t).writable();
  check_disjoint(op, NamedArrays{{"codes", codes}, {"scales", scales}, {"minima", offsets}}, {{"weight", weight}});
  const W4Arrays canonical{codes, scales, offsets};
  if (check::on_gpu(ctx)) return gpu::w4_quantize(op, ctx, weight, bits, group, canonical);
  cpu::w4_quantize(Parallel(ctx.threads), weight, bits, group, canonical);
}

void w4_dequantize(const Context& ctx, const W4View& w, TensorView to, const char* op) {
  Arg(op, "out", to).given().activation().shape({w.n, w.k}, "[N, K]").device(w.device, "weight").writable();
  check_disjoint(op, "out", to, w);
  if (check::on_gpu(ctx)) return gpu::w4_dequantize(op, ctx, w, to);
  check_columns(op, w);
  cpu::w4_dequantize(Parallel(ctx.threads), w, to);
}

namespace {

void check_inputs(const char* op, int bits, const TensorView& x, const W4View& w) {
  ROOFTILE_CHECK_KIND(type, w.bits == bits, op, ": w must be a W", bits, "Weight, of ", bits, " bits, got one of ",
                      w.bits);
  Arg(op, "x", x).given().activation().ndim(1, TensorView::max_ndim).device(w.device, "the weight");
  ROOFTILE_CHECK(x.last() == w.k, op, ": x must have a last dimension of K = ", w.k, ", got ", describe(x));
}

std::size_t workspace(const char* op, int bits, const Context& ctx, const TensorView& x, const W4View& w,
                      const MatmulOptions& options) {
  check_inputs(op, bits, x, w);
  if (!check::on_gpu(ctx)) return 0;
  return gpu::w4a16_workspace(op, ctx,
                              {.x = x, .w = &w, .gated = options.gated, .batch_invariant = options.batch_invariant});
}

KernelName matmul(const char* op, int bits, const Context& ctx, const TensorView& x, const W4View& w,
                  const TensorView& y, const MatmulOptions& options) {
  check_inputs(op, bits, x, w);
  ROOFTILE_CHECK(!options.gated || w.n % 2 == 0, op, ": activation \"", name(options.activation),
                 "_mul\" needs a weight of rows [gate | up], an even number N, got N = ", w.n);
  const W4MatmulArgs args{.x = x,
                          .y = y,
                          .bias = options.bias,
                          .residual = options.residual,
                          .w = &w,
                          .activation = options.activation,
                          .gated = options.gated,
                          .batch_invariant = options.batch_invariant};
  check::check_product(op, x, w.n, options.gated, y, options.bias, options.residual);
  check_disjoint(op, "out", y, w);
  if (check::on_gpu(ctx)) {
    check::check_gpu(op, ctx, "x", x, true);
    return gpu::w4a16_matmul(op, ctx, args);
  }
  const cpu::Kernels& k = check::cpu_kernels(op, ctx);
  check_columns(op, w);
  if (y.numel() > 0) k.w4a16_matmul(Parallel(ctx.threads), args);
  return kernel_name("cpu_", k.variant, "_", name(x.dtype), "_w", bits, "g", w.group, "_", name(w.zeros));
}

}  // namespace

std::size_t w4a16_workspace(const Context& ctx, TensorView x, const W4View& w, const MatmulOptions& options) {
  return workspace("w4a16_matmul", 4, ctx, x, w, options);
}
std::size_t w8a16_workspace(const Context& ctx, TensorView x, const W4View& w, const MatmulOptions& options) {
  return workspace("w8a16_matmul", 8, ctx, x, w, options);
}
KernelName w4a16_matmul(const Context& ctx, TensorView x, const W4View& w, TensorView y, const MatmulOptions& options) {
  return matmul("w4a16_matmul", 4, ctx, x, w, y, options);
}
KernelName w8a16_matmul(const Context& ctx, TensorView x, const W4View& w, TensorView y, const MatmulOptions& options) {
  return matmul("w8a16_matmul", 8, ctx, x, w, y, options);
}

}  // namespace rooftile
