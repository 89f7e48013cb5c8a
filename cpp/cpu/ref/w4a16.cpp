// SPDX-License-Identifier: Apache-2.0
// Reference product: y [M, N] = activation(x [M, K] W^T + bias) in double precision, one code of W [N, K] at a time.
#include "core/w4_layout.h"
#include "cpu/element.h"
#include "cpu/ref/activate.h"
#include "cpu/ref/kernels_ref.h"

namespace rooftile::cpu::reference {
namespace {

double element(const std::byte* data, DType t, std::int64_t i) {
  TensorView v;
  v.data = const_cast<std::byte*>(data);
  v.dtype = t;
  return read(v, i);
}

// W[n, k], dequantised.
double weight(const W4View& w, std::int64_t n, std::int64_t k) {
  const int u = w4_code(w.codes, w.bits, w4_code_index(w.bits, w4_tiles_k(w.k), n, k));
  const std::int64_t at = w4_scale_index(w.k / w.group, n, k / w.group);
  const double scale = element(w.scales, w.scale_dtype, at);
  switch (w.zeros) {
    case W4Zeros::symmetric:
      return (u - w4_zero_point(w.bits)) * scale;
    case W4Zeros::integer:
      return (u - std::to_integer<int>(w.offsets[at])) * scale;
    case W4Zeros::minima:
      return u * scale + element(w.offsets, w.scale_dtype, at);
  }
  return 0;
}

}  // namespace

void w4a16_matmul(const Parallel& parallel, const W4MatmulArgs& a) {
  const W4View& w = *a.w;
  parallel.run(a.x.rows(), [&](std::int64_t m, int) {
    const auto product = [&](std::int64_t n) {
      double total = 0;
      for (std::int64_t k = 0; k < w.k; ++k)
        total += weight(w, n, k) * read(a.x, a.x.row_offset(m) + (w.perm ? w.perm[k] : k) * a.x.last_stride());
      return a.bias.given() ? total + read(a.bias, n * a.bias.stride[0]) : total;
    };
    for (std::int64_t n = 0; n < a.outputs(); ++n) {
      double total = activate(a.activation, product(n));
      if (a.gated) total *= product(n + a.outputs());
      if (a.residual.given()) total += read(a.residual, a.residual.row_offset(m) + n * a.residual.last_stride());
      write(a.y, a.y.row_offset(m) + n * a.y.last_stride(), static_cast<float>(total));
    }
  });
}

}  // namespace rooftile::cpu::reference
