// SPDX-License-Identifier: Apache-2.0
// The arguments that every product y = activation(x W^T + bias) + residual passes to its kernels, whatever W's format.
#pragma once

#include <cstdint>

#include "core/hd.h"
#include "rooftile/gemm.h"

namespace rooftile::gpu {

// A tensor [..., last] as rows, at any strides. Leading dimensions that nest without a gap are merged.
struct Rows {
  void* data = nullptr;  // null: no tensor
  std::int64_t last_stride = 0;
  std::int64_t shape[TensorView::max_ndim - 1] = {}, stride[TensorView::max_ndim - 1] = {};  // innermost first
  int ndim = 0;

  Rows() = default;
  explicit Rows(const TensorView& t) {
    if (!t.given()) return;
    data = t.data;
    last_stride = t.last_stride();
    for (int i = t.ndim - 2; i >= 0; --i) {
      if (t.shape[i] == 1) continue;
      if (ndim > 0 && t.stride[i] == shape[ndim - 1] * stride[ndim - 1]) {
        shape[ndim - 1] *= t.shape[i];
      } else {
        shape[ndim] = t.shape[i];
        stride[ndim++] = t.stride[i];
      }
    }
  }
  ROOFTILE_HD std::int64_t offset(std::int64_t row) const {
    std::int64_t at = 0;
    for (int i = 0; i + 1 < ndim; ++i) {
      at += row % shape[i] * stride[i];
      row /= shape[i];
    }
    return ndim > 0 ? at + row * stride[ndim - 1] : at;
  }
};

// Every row is whole 8-byte vectors (4 elements) at 8-byte addresses, and all rows have one stride.
inline bool is_vec4(const TensorView& t) {
  if (!t.given()) return true;
  const Rows rows(t);
  const bool aligned = reinterpret_cast<std::uintptr_t>(t.data) % 8 == 0 && t.last() % 4 == 0 && t.last_stride() == 1;
  return aligned && rows.ndim <= 1 && rows.stride[0] % 4 == 0;
}

// Every row is whole 16-byte vectors (8 elements) at 16-byte addresses, and all rows have one stride.
inline bool is_vec8(const TensorView& t) {
  const Rows rows(t);
  const bool whole = reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && t.last() % 8 == 0 &&
                     (t.last_stride() == 1 || t.last() == 0);
  return whole && rows.ndim <= 1 && (rows.ndim == 0 || rows.stride[0] % 8 == 0);
}
// As is_vec8, and no two rows overlap: the rule of TMA and of 16-byte stores.
inline bool is_tma_aligned(const TensorView& t) {
  if (!t.given()) return true;
  const Rows rows(t);
  return is_vec8(t) && t.last() > 0 && (rows.ndim == 0 || rows.stride[0] >= t.last());
}
inline bool is_bias_aligned(const TensorView& bias) {
  return !bias.given() || (bias.stride[0] == 1 && reinterpret_cast<std::uintptr_t>(bias.data) % 16 == 0);
}

struct Product {
  Rows x, y, residual;         // [m, k], [m, outputs], [m, outputs]
  const void* bias = nullptr;  // [n] or null
  std::int64_t bias_stride = 0;
  std::int64_t n = 0, outputs = 0;  // rows of W; columns of y: n, or n / 2 in a gated product
  bool gated = false;               // the rows of W are [gate | up]: y = activation(gate) * up + residual
  bool y_vec4 = false;              // is_vec4 of y and residual
  Activation activation = Activation::none;
  std::int64_t first_token = 0, tokens = 0;  // tokens of this launch, from first_token of the call on
  int splits = 1;                            // splits of K
  float* partial = nullptr;  // fp32 [split][token of this launch][padded_n]: partial sums for split_k_epilogue, or null

  Product() = default;
  Product(const TensorView& x, const TensorView& y, const TensorView& bias, const TensorView& residual,
          Activation activation, bool gated = false)
      : x(x),
        y(y),
        residual(residual),
        n(gated ? 2 * y.last() : y.last()),
        outputs(y.last()),
        gated(gated),
        y_vec4(is_vec4(y) && is_vec4(residual)),
        activation(activation) {
    if (!bias.given()) return;
    this->bias = bias.data;
    bias_stride = bias.stride[0];
  }
  ROOFTILE_HD std::int64_t padded_n() const { return (n + 15) / 16 * 16; }
};

}  // namespace rooftile::gpu
