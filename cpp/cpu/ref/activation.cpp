// SPDX-License-Identifier: Apache-2.0
#include <cmath>

#include "cpu/element.h"
#include "cpu/ref/kernels_ref.h"

namespace rooftile::cpu::reference {
namespace {

double activation(double g, Gate gate) {
  switch (gate) {
    case Gate::silu:
      return g / (1 + std::exp(-g));
    case Gate::gelu_tanh:
      return g / (1 + std::exp(-2 * std::sqrt(2 / 3.14159265358979323846) * (g + 0.044715 * g * g * g)));
    case Gate::gelu_erf:
      return g * 0.5 * std::erfc(-g / std::sqrt(2.0));
  }
  return 0;
}

}  // namespace

void gated(const Parallel& parallel, const TensorView& x, const TensorView& h, Gate gate) {
  parallel.run(x.rows(), [&](std::int64_t row, int) {
    for (std::int64_t i = 0; i < h.last(); ++i) {
      const double g = read(x, x.row_offset(row) + i * x.last_stride());
      const double up = read(x, x.row_offset(row) + (i + h.last()) * x.last_stride());
      write(h, h.row_offset(row) + i * h.last_stride(), static_cast<float>(activation(g, gate) * up));
    }
  });
}

}  // namespace rooftile::cpu::reference
