// SPDX-License-Identifier: Apache-2.0
// Norms over rows. Cost: two passes over a row that the cache holds; bound by memory for long batches.
#include <cmath>
#include <vector>

#include "cpu/element.h"
#include "rooftile/error.h"
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

// One row in fp32 scratch, whatever the stride it came with.
template <class T>
void gather(const T* p, std::int64_t stride, std::int64_t n, float* to) {
  if (stride == 1) {
    for (std::int64_t i = 0; i < n; i += lanes) store(to + i, load_some(p + i, static_cast<int>(n - i < lanes ? n - i : lanes)));
  } else {
    for (std::int64_t i = 0; i < n; ++i) to[i] = to_float(p[i * stride]);
  }
}
template <class T>
void scatter(const float* from, std::int64_t stride, std::int64_t n, T* p) {
  if (stride == 1) {
    for (std::int64_t i = 0; i < n; i += lanes) store_some(p + i, load(from + i), static_cast<int>(n - i < lanes ? n - i : lanes));
  } else {
    for (std::int64_t i = 0; i < n; ++i) p[i * stride] = from_float<T>(from[i]);
  }
}
void gather_any(const TensorView& t, std::int64_t row, float* to) {
  with_element(t.dtype, [&](auto e) { gather(t.as<decltype(e)>() + t.row_offset(row), t.last_stride(), t.last(), to); });
}
void scatter_any(const float* from, const TensorView& t, std::int64_t row) {
  with_element(t.dtype, [&](auto e) { scatter(from, t.last_stride(), t.last(), t.as<decltype(e)>() + t.row_offset(row)); });
}

std::int64_t padded(std::int64_t n) { return (n + lanes - 1) / lanes * lanes; }

}  // namespace

void norm(const Parallel& parallel, const NormArgs& a) {
  const std::int64_t hidden = a.x.last(), width = padded(hidden);
  std::vector<float> scratch(static_cast<std::size_t>(width * (2 + 2 * parallel.threads())), 0.0f);
  float* weight = scratch.data();
  float* bias = weight + width;
  if (a.weight.given()) gather_any(a.weight, 0, weight);
  if (a.bias.given()) gather_any(a.bias, 0, bias);
  parallel.run(a.x.rows(), [&](std::int64_t row, int thread) {
    float* x = scratch.data() + width * (2 + 2 * thread);
    float* r = x + width;
    gather_any(a.x, row, x);
    if (a.residual.given()) {
      gather_any(a.residual, row, r);
      for (std::int64_t i = 0; i < hidden; i += lanes) store(x + i, load(x + i) + load(r + i));
      scatter_any(x, a.res, row);
      gather_any(a.res, row, x);   // the norm is of the rounded sum
    }
    const F32 zero{};
    float mean = 0;
    if (a.subtract_mean) {
      F32 total = zero;
      for (std::int64_t i = 0; i < hidden; i += lanes) total += load(x + i);   // the padding is 0
      mean = sum(total) / static_cast<float>(hidden);
      for (std::int64_t i = 0; i < hidden; i += lanes) store(x + i, load(x + i) - mean);
      for (std::int64_t i = hidden; i < width; ++i) x[i] = 0;
    }
    F32 square = zero;
    for (std::int64_t i = 0; i < hidden; i += lanes) square = fma(load(x + i), load(x + i), square);
    const float scale = 1.0f / std::sqrt(sum(square) / static_cast<float>(hidden) + a.eps);
    for (std::int64_t i = 0; i < hidden; i += lanes) {
      F32 y = load(x + i) * scale;
      if (a.weight.given()) y *= load(weight + i);
      if (a.bias.given()) y += load(bias + i);
      store(x + i, y);
    }
    scatter_any(x, a.y, row);
  });
}

void rope(const Parallel&, const TensorView&, const TensorView&, const TensorView&, const TensorView&, const TensorView&) { fail(ErrorKind::not_supported, "todo"); }
void gated(const Parallel&, const TensorView&, const TensorView&, Gate) { fail(ErrorKind::not_supported, "todo"); }
void softmax(const Parallel&, const TensorView&, const TensorView&) { fail(ErrorKind::not_supported, "todo"); }

}  // namespace rooftile::cpu::ROOFTILE_ISA
