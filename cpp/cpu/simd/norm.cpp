// SPDX-License-Identifier: Apache-2.0
// Norms over rows.  x, y, residual, res [..., H]   weight, bias [H]
// Passes over a row that the cache holds: (add,) mean, squares, result. Bound by memory for long batches.
#include <cmath>
#include <memory>

#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/rows.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

// weight or bias as contiguous fp32, with `offset` added; null if absent.
class Parameter {
 public:
  explicit Parameter(const TensorView& t, float offset = 0) {
    if (!t.given()) return;
    copy_ = std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(t.shape[0]));
    data_ = as_floats(t, 0, t.shape[0], t.stride[0], copy_.get());
    if (offset == 0) return;
    for (std::int64_t i = 0; i < t.shape[0]; ++i) copy_[static_cast<std::size_t>(i)] = data_[i] + offset;
    data_ = copy_.get();
  }
  const float* data() const { return data_; }

 private:
  const float* data_ = nullptr;
  std::unique_ptr<float[]> copy_;
};

template <class T>
void add_row(const T* x, const T* residual, T* res, std::int64_t n) {
  for_vecs(n,
           [=](std::int64_t i, auto lanes) { store(res + i, load(x + i, lanes) + load(residual + i, lanes), lanes); });
}

template <bool subtract_mean, class T>
void norm_row(const T* x, const float* weight, const float* bias, T* y, std::int64_t n, double eps) {
  const double count = static_cast<double>(n);
  const double mean =
      subtract_mean ? sum_over(n, [=](std::int64_t i, auto lanes) { return load(x + i, lanes); }) / count : 0.0;
  // The mean is the sum of two numbers, so that values far from 0 keep the digits of their distance to the mean.
  const float rounded = static_cast<float>(mean), rest = static_cast<float>(mean - rounded);
  const auto centred = [=](std::int64_t i, auto lanes) {
    const F32 v = load(x + i, lanes);
    return subtract_mean ? v - rounded - rest : v;
  };
  const double square = sum_over(n, [=](std::int64_t i, auto lanes) {
    const F32 v = only(centred(i, lanes), lanes);
    return v * v;
  });
  const float scale = static_cast<float>(1.0 / std::sqrt(square / count + eps));
  for_vecs(n, [=](std::int64_t i, auto lanes) {
    F32 v = centred(i, lanes) * scale;
    if (weight) v *= load(weight + i, lanes);
    if (bias) v += load(bias + i, lanes);
    store(y + i, v, lanes);
  });
}

template <class T>
void norm_rows(const Parallel& parallel, const NormArgs& a) {
  const int threads = parallel.threads();
  const RowScratch<T> x_scratch(a.x, threads), y_scratch(a.y, threads), add_scratch(a.residual, threads),
      res_scratch(a.res, threads);
  const Parameter weight(a.weight, a.weight_offset), bias(a.bias);
  const std::int64_t n = a.x.last();
  for_rows(parallel, a.x.rows(), n, [&](std::int64_t row, int thread) {
    const T* x = x_scratch.read(a.x, row, thread);
    if (a.residual.given()) {
      T* res = res_scratch.write(a.res, row, thread);
      add_row(x, add_scratch.read(a.residual, row, thread), res, n);
      res_scratch.commit(a.res, row, thread);
      x = res;  // the rounded sum is normalised
    }
    T* y = y_scratch.write(a.y, row, thread);
    if (a.subtract_mean) {
      norm_row<true>(x, weight.data(), bias.data(), y, n, a.eps);
    } else {
      norm_row<false>(x, weight.data(), bias.data(), y, n, a.eps);
    }
    y_scratch.commit(a.y, row, thread);
  });
}

}  // namespace

void norm(const Parallel& parallel, const NormArgs& a) {
  with_element(a.x.dtype, [&](auto e) { norm_rows<decltype(e)>(parallel, a); });
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
