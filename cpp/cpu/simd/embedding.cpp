// SPDX-License-Identifier: Apache-2.0
// Rows of a table.  ids [...], weight [vocabulary, H], y [..., H]: y = scale * weight[ids]
#include <cstddef>
#include <cstring>

#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/rows.h"

namespace rooftile::cpu::ROOFTILE_ISA {

void embedding(const Parallel& parallel, const EmbeddingArgs& a) {
  with_element(a.y.dtype, [&](auto e) {
    using T = decltype(e);
    const RowScratch<T> weight_rows(a.weight, parallel.threads()), y_rows(a.y, parallel.threads());
    const std::int64_t n = a.y.last();
    const float scale = a.scale;
    for_rows(parallel, a.y.rows(), n, [&](std::int64_t row, int thread) {
      const T* from = weight_rows.read(a.weight, integer_at(a.ids, element_offset(a.ids, row)), thread);
      T* to = y_rows.write(a.y, row, thread);
      if (scale == 1) std::memcpy(to, from, static_cast<std::size_t>(n) * sizeof(T));
      else for_vecs(n, [=](std::int64_t i, auto lanes) { store(to + i, load(from + i, lanes) * scale, lanes); });
      y_rows.commit(a.y, row, thread);
    });
  });
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
