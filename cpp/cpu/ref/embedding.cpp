// SPDX-License-Identifier: Apache-2.0
#include "cpu/element.h"
#include "cpu/ref/kernels_ref.h"

namespace rooftile::cpu::reference {

void embedding(const Parallel& parallel, const EmbeddingArgs& a) {
  parallel.run(a.y.rows(), [&](std::int64_t row, int) {
    const std::int64_t from = integer_at(a.ids, element_offset(a.ids, row)) * a.weight.stride[0];
    const std::int64_t to = a.y.row_offset(row);
    for (std::int64_t i = 0; i < a.y.last(); ++i)
      write(a.y, to + i * a.y.last_stride(), read(a.weight, from + i * a.weight.stride[1]) * a.scale);
  });
}

}  // namespace rooftile::cpu::reference
