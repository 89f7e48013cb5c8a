// SPDX-License-Identifier: Apache-2.0
// Tensors of tests and benchmarks: views of somebody's memory, and how far two of them lie apart. Elements are read and
// written with cpu::read and cpu::write.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "cpu/element.h"
#include "rooftile/tensor.h"

namespace rooftile {

using Shape = std::vector<std::int64_t>;

inline TensorView contiguous_view(void* data, DType dtype, Device device, const Shape& shape) {
  TensorView t;
  t.data = data;
  t.dtype = dtype;
  t.device = device;
  t.ndim = static_cast<int>(shape.size());
  std::int64_t stride = 1;
  for (int i = t.ndim - 1; i >= 0; --i) {
    t.shape[i] = shape[static_cast<std::size_t>(i)];
    t.stride[i] = stride;
    stride *= t.shape[i];
  }
  return t;
}

// Bytes of a contiguous tensor.
inline std::size_t bytes_of(const TensorView& t) { return static_cast<std::size_t>(t.numel()) * size_of(t.dtype); }

// The largest error of an element relative to the largest value of its row, or to `floor` in rows that stay below it.
// Contiguous tensors on the host. What is not finite must be the same on both sides; if not, or after a NaN: infinite.
inline double worst_row(const TensorView& got, const TensorView& expected, double floor = 0) {
  double worst = 0;
  for (std::int64_t row = 0; row < expected.rows(); ++row) {
    double error = 0, size = floor;
    for (std::int64_t i = row * expected.last(); i < (row + 1) * expected.last(); ++i) {
      const double x = cpu::read(got, i), y = cpu::read(expected, i);
      if (x == y && !std::isfinite(y)) continue;
      if (!std::isfinite(x) || !std::isfinite(y)) return std::numeric_limits<double>::infinity();
      error = std::max(error, std::abs(x - y));
      size = std::max(size, std::abs(y));
    }
    if (error > 0) worst = std::max(worst, error / size);
  }
  return worst;
}

}  // namespace rooftile
