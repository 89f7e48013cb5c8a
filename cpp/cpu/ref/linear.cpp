// SPDX-License-Identifier: Apache-2.0
#include "cpu/element.h"
#include "cpu/ref/activate.h"
#include "cpu/ref/kernels_ref.h"

namespace rooftile::cpu::reference {

void linear(const Parallel& parallel, const LinearArgs& a) {
  parallel.run(a.x.rows(), [&](std::int64_t m, int) {
    for (std::int64_t n = 0; n < a.w.shape[0]; ++n) {
      double total = 0;
      for (std::int64_t k = 0; k < a.w.shape[1]; ++k)
        total += static_cast<double>(read(a.w, n * a.w.stride[0] + k * a.w.stride[1])) *
                 read(a.x, a.x.row_offset(m) + k * a.x.last_stride());
      if (a.bias.given()) total += read(a.bias, n * a.bias.stride[0]);
      total = activate(a.activation, total);
      if (a.residual.given()) total += read(a.residual, a.residual.row_offset(m) + n * a.residual.last_stride());
      write(a.y, a.y.row_offset(m) + n * a.y.last_stride(), static_cast<float>(total));
    }
  });
}

}  // namespace rooftile::cpu::reference
