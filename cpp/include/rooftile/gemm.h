// SPDX-License-Identifier: Apache-2.0
// Products of 16-bit activations (fp32 too on the CPU) with weights in 4 bits (W4A16), 8 bits (W8A16) or in the
// activations' own type.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "rooftile/context.h"
#include "rooftile/tensor.h"

namespace rooftile {

// u is the stored code, 0..15 in 4 bits, 0..255 in 8.
enum class W4Zeros : std::uint8_t {
  symmetric,  // w = (u - 8) * s, (u - 128) * s in 8 bits
  integer,    // w = (u - z) * s        GPTQ, AWQ
  minima,     // w = u * s + m          GGUF Q4_1; 4 bits only
};
const char* name(W4Zeros z);

inline constexpr int w4_layout_version = 1;  // of the packed layout; incremented when the layout changes

// A weight [N, K] of 4 or 8 bits in packed layout (cpp/core/w4_layout.h).
struct W4View {
  int bits = 4;
  std::int64_t n = 0, k = 0;
  int group = 0;  // 32, 64, 128 or k
  W4Zeros zeros = W4Zeros::symmetric;
  DType scale_dtype = DType::f16;  // f16 or bf16: of scales and minima
  Device device;
  const std::uint8_t* codes = nullptr;  // [N / 16][K / 64] tiles of 512 bytes, 1024 in 8 bits
  const std::byte* scales = nullptr;    // [N / 16][K / group][16]
  const std::byte* offsets = nullptr;   // the same: zero points as uint8, or minima in scale_dtype; null if symmetric
  const std::int32_t* perm =
      nullptr;  // [k] act-order: column i of the packed weight multiplies x[perm[i]]; null: identity
};

// Bytes of the packed tensors. Raises if no weight has this shape; the error names op and `argument`, which gives N, K.
struct W4Sizes {
  std::int64_t codes = 0, scales = 0, offsets = 0;
};
W4Sizes w4_sizes(const char* op, std::int64_t n, std::int64_t k, int bits, int group, W4Zeros zeros,
                 const char* argument = "shape");
W4Zeros w4_zeros_from_name(const char* op, const char* text);

// Checks packed tensors (flat uint8 of the sizes above; perm: int32 [K], a permutation) and returns a view of them.
// offsets and perm may be absent. Here and below, errors begin with `op`.
W4View w4_view(std::int64_t n, std::int64_t k, int bits, int group, W4Zeros zeros, DType scale_dtype, TensorView codes,
               TensorView scales, TensorView offsets, TensorView perm, const char* op = "w4_view");

// Canonical form -> packed layout and back, lossless. codes uint8, [N, K/2] low nibble first or in 8 bits [N, K];
// scales [N, K/G]; offsets: absent, uint8 [N, K/G] zeros or [N, K/G] minima. The packed tensors are flat uint8.
void w4_pack(const Context&, TensorView codes, TensorView scales, TensorView offsets, W4Zeros zeros, int bits,
             int group, TensorView out_codes, TensorView out_scales, TensorView out_offsets,
             const char* op = "w4_pack");
void w4_unpack(const Context&, const W4View&, TensorView codes, TensorView scales, TensorView offsets,
               const char* op = "w4_unpack");

// Round to nearest: weight [N, K] fp32, fp16 or bf16 -> canonical form. Symmetric (qmax 7, 127 in 8 bits) or minima.
void w4_quantize(const Context&, TensorView weight, int bits, int group, W4Zeros zeros, TensorView codes,
                 TensorView scales, TensorView offsets, const char* op = "w4_quantize");

// w [N, K] = what the codes stand for, in w's dtype.
void w4_dequantize(const Context&, const W4View&, TensorView w, const char* op = "w4_dequantize");

// What is applied to a product before it is rounded to y's dtype.
enum class Activation : std::uint8_t { none, silu, gelu_tanh, gelu_erf };
const char* name(Activation a);  // "none", "silu", "gelu_tanh", "gelu"
// gated: null, or set to whether the name ends in "_mul".
Activation activation_from_name(const char* op, const char* text, bool* gated = nullptr);
std::vector<std::string> activation_names(bool gated);  // all of them, or all that end in "_mul"

struct MatmulOptions {
  TensorView bias;      // [N] in x's dtype; may be absent
  TensorView residual;  // y's shape and dtype, may be y itself; may be absent
  Activation activation = Activation::none;
  bool gated = false;            // the rows of W are [gate | up]: y [..., N / 2] = activation(gate) * up + residual
  bool batch_invariant = false;  // a row's bits are the same at every number of rows
};

// y = activation(x W^T + bias) + residual.  x [..., K] -> y [..., N] in x's dtype, rounded once. fp32 accumulation. A
// row's bits are the same next to any neighbours and on any number of threads; unless batch_invariant they change with
// the M bucket on a GPU, and between one row and several on a CPU with VNNI (docs/kernels/w4a16.md). y must not overlap
// x. perm of a weight on a GPU is not checked by the host: a column that leaves x reads as NaN. w has 4 bits in
// w4a16_matmul, 8 in w8a16_matmul.
KernelName w4a16_matmul(const Context&, TensorView x, const W4View& w, TensorView y, const MatmulOptions& options = {});
KernelName w8a16_matmul(const Context&, TensorView x, const W4View& w, TensorView y, const MatmulOptions& options = {});
// Bytes of device memory that must be lent to that call. 0 on the CPU.
std::size_t w4a16_workspace(const Context&, TensorView x, const W4View& w, const MatmulOptions& options = {});
std::size_t w8a16_workspace(const Context&, TensorView x, const W4View& w, const MatmulOptions& options = {});

struct LinearOptions {  // as in MatmulOptions
  TensorView bias, residual;
  Activation activation = Activation::none;
};

// y = activation(x weight^T + bias) + residual.  x [..., K], weight [N, K] in x's dtype -> y [..., N], rounded once.
// fp32 accumulation, any strides. A row's bits are the same next to any neighbours and on any number of threads; on the
// CPU at every number of rows, on a GPU within an M bucket (docs/kernels/linear.md). y must not overlap x or
// weight.
KernelName linear(const Context&, TensorView x, TensorView weight, TensorView y, const LinearOptions& options = {});
// Bytes of device memory that must be lent to that call. 0 on the CPU.
std::size_t linear_workspace(const Context&, TensorView x, TensorView weight);

}  // namespace rooftile
