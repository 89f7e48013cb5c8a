// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "cpu/element.h"
#include "cpu/ref/kernels_ref.h"

namespace rooftile::cpu::reference {

void softmax(const Parallel& parallel, const TensorView& x, const TensorView& y) {
  parallel.run(x.rows(), [&](std::int64_t row, int) {
    const auto value = [&](std::int64_t i) -> double { return read(x, x.row_offset(row) + i * x.last_stride()); };
    double highest = -std::numeric_limits<double>::infinity(), total = 0;
    for (std::int64_t i = 0; i < x.last(); ++i) highest = std::max(highest, value(i));
    for (std::int64_t i = 0; i < x.last(); ++i) total += std::exp(value(i) - highest);
    for (std::int64_t i = 0; i < x.last(); ++i)
      write(y, y.row_offset(row) + i * y.last_stride(), static_cast<float>(std::exp(value(i) - highest) / total));
  });
}

}  // namespace rooftile::cpu::reference
