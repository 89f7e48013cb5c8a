// SPDX-License-Identifier: Apache-2.0
// Softmax over the last dimension.  x, y [..., N]
// Three passes over a row: maximum, sum of exponentials, result. Bound by the exponentials while the cache holds a row.
#include <limits>

#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/vec64.h"
#include "cpu/simd/rows.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

// A NaN may or may not win here; it comes back through the sum.
template <class T>
float row_max(const T* x, std::int64_t n) {
  const float lowest = -std::numeric_limits<float>::infinity();
  F32 highest = splat(lowest);
  for (std::int64_t i = 0; i < n; i += lanes)
    highest = vmax(load_some(x + i, static_cast<int>(n - i < lanes ? n - i : lanes), lowest), highest);
  return max(highest);
}

template <class T>
void softmax_row(const T* x, T* y, std::int64_t n) {
  const double highest = row_max(x, n);
  const double total = sum_over(n, [=](std::int64_t i, auto lanes) { return only(exp64(load64(x + i, lanes) - highest), lanes); });
  const double scale = 1.0 / total;
  for_pieces(n, [=](std::int64_t i, auto lanes) { store64(y + i, exp64(load64(x + i, lanes) - highest) * scale, lanes); });
}

}  // namespace

void softmax(const Parallel& parallel, const TensorView& x, const TensorView& y) {
  with_element(x.dtype, [&](auto e) {
    using T = decltype(e);
    const RowScratch<T> x_room(x, parallel.threads()), y_room(y, parallel.threads());
    for_rows(parallel, x.rows(), x.last(), [&](std::int64_t row, int thread) {
      softmax_row(x_room.read(x, row, thread), y_room.write(y, row, thread), x.last());
      y_room.commit(y, row, thread);
    });
  });
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
