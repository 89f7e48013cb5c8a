// SPDX-License-Identifier: Apache-2.0
#include "cpu/element.h"
#include "cpu/ref/kernels_ref.h"

namespace rooftile::cpu::reference {

void rope(const Parallel& parallel, const TensorView& x, const TensorView& cos, const TensorView& sin,
          const TensorView& positions, const TensorView& y) {
  const std::int64_t heads = x.shape[x.ndim - 2], dim = x.last(), pairs = cos.shape[1];
  parallel.run(x.rows(), [&](std::int64_t row, int) {
    const std::int64_t position = integer_at(positions, element_offset(positions, row / heads));
    const auto at = [row](const TensorView& t, std::int64_t i) { return t.row_offset(row) + i * t.last_stride(); };
    for (std::int64_t i = 0; i < pairs; ++i) {
      const double c = read(cos, position * cos.stride[0] + i * cos.stride[1]);
      const double s = read(sin, position * sin.stride[0] + i * sin.stride[1]);
      const double low = read(x, at(x, i)), high = read(x, at(x, i + pairs));
      write(y, at(y, i), static_cast<float>(low * c - high * s));
      write(y, at(y, i + pairs), static_cast<float>(high * c + low * s));
    }
    for (std::int64_t i = 2 * pairs; i < dim; ++i) write(y, at(y, i), read(x, at(x, i)));
  });
}

}  // namespace rooftile::cpu::reference
