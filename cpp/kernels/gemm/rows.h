// SPDX-License-Identifier: Apache-2.0
// Tensors of a product as rows at any strides, and which of them can be read in vectors.
#pragma once

#include <cstdint>

#include "core/hd.h"
#include "rooftile/tensor.h"

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

// Every row is whole vectors of `elements` 16-bit elements at addresses that are multiples of a vector, and all rows
// have one stride. True of an absent tensor.
inline bool is_aligned(const TensorView& t, int elements) {
  if (!t.given()) return true;
  const Rows rows(t);
  const bool whole = reinterpret_cast<std::uintptr_t>(t.data) % (2u * static_cast<unsigned>(elements)) == 0 &&
                     t.last() % elements == 0 && (t.last_stride() == 1 || t.last() == 0);
  return whole && rows.ndim <= 1 && rows.stride[0] % elements == 0;
}
// Rows of 16-byte vectors of which no two overlap: the rule of TMA and of 16-byte stores.
inline bool is_tma_aligned(const TensorView& t) {
  if (!t.given()) return true;
  const Rows rows(t);
  return is_aligned(t, 8) && t.last() > 0 && (rows.ndim == 0 || rows.stride[0] >= t.last());
}

}  // namespace rooftile::gpu
