// SPDX-License-Identifier: Apache-2.0
// Softmax over the last dimension.  x, y [..., N]
// Three passes over a row: maximum, sum of exponentials, result. Bound by the exponentials while the cache holds a row.
#include <limits>
#include <memory>
#include <type_traits>

#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/rows.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

// The maximum may ignore a NaN; the sum of exponentials carries it.
template <class T>
float row_max(const T* x, std::int64_t n) {
  const float lowest = -std::numeric_limits<float>::infinity();
  F32 highest = splat(lowest);
  for (std::int64_t i = 0; i < n; i += lanes)
    highest = vmax(load_some(x + i, static_cast<int>(n - i < lanes ? n - i : lanes), lowest), highest);
  return max(highest);
}

// e: [n] buffer for the exponentials; may be y.
template <class T>
void softmax_row(const T* x, T* y, float* e, std::int64_t n) {
  const float highest = row_max(x, n);
  const double total = sum_over(n, [=](std::int64_t i, auto lanes) {
    const F32 v = only(exp(load(x + i, lanes) - highest), lanes);
    store(e + i, v, lanes);
    return v;
  });
  const float scale = static_cast<float>(1.0 / total);
  for_vecs(n, [=](std::int64_t i, auto lanes) { store(y + i, load(e + i, lanes) * scale, lanes); });
}

}  // namespace

void softmax(const Parallel& parallel, const TensorView& x, const TensorView& y) {
  with_element(x.dtype, [&](auto e) {
    using T = decltype(e);
    const std::int64_t n = x.last();
    const RowScratch<T> x_scratch(x, parallel.threads()), y_scratch(y, parallel.threads());
    std::unique_ptr<float[]> buffer;
    if (!std::is_same_v<T, float>)
      buffer = std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(n * parallel.threads()));
    for_rows(parallel, x.rows(), n, [&](std::int64_t row, int thread) {
      T* to = y_scratch.write(y, row, thread);
      float* e = buffer.get() + n * thread;
      if constexpr (std::is_same_v<T, float>) e = to;
      softmax_row(x_scratch.read(x, row, thread), to, e, n);
      y_scratch.commit(y, row, thread);
    });
  });
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
