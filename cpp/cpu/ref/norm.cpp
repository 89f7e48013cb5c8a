// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "cpu/element.h"
#include "cpu/ref/kernels_ref.h"

namespace rooftile::cpu::reference {

void norm(const Parallel& parallel, const NormArgs& a) {
  parallel.run(a.x.rows(), [&](std::int64_t row, int) {
    const std::int64_t hidden = a.x.last();
    const auto at = [row](const TensorView& t, std::int64_t i) { return t.row_offset(row) + i * t.last_stride(); };
    const auto value = [&](std::int64_t i) -> double {
      return a.residual.given() ? read(a.res, at(a.res, i)) : read(a.x, at(a.x, i));
    };
    if (a.residual.given())
      for (std::int64_t i = 0; i < hidden; ++i)
        write(a.res, at(a.res, i), read(a.x, at(a.x, i)) + read(a.residual, at(a.residual, i)));
    double mean = 0, square = 0;
    if (a.subtract_mean) {
      for (std::int64_t i = 0; i < hidden; ++i) mean += value(i);
      mean /= static_cast<double>(hidden);
    }
    for (std::int64_t i = 0; i < hidden; ++i) square += (value(i) - mean) * (value(i) - mean);
    const double scale = 1.0 / std::sqrt(square / static_cast<double>(hidden) + a.eps);
    for (std::int64_t i = 0; i < hidden; ++i) {
      double y = (value(i) - mean) * scale;
      if (a.weight.given()) y *= static_cast<double>(read(a.weight, i * a.weight.stride[0])) + a.weight_offset;
      if (a.bias.given()) y += read(a.bias, i * a.bias.stride[0]);
      write(a.y, at(a.y, i), static_cast<float>(y));
    }
  });
}

}  // namespace rooftile::cpu::reference
