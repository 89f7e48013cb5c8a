// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in x's dtype.
//   x [M, K]   W [N, K]   y, residual [M, N]   bias [N]     any strides
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/activation.h"
#include "cpu/simd/product.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

template <class T>
struct Weights {
  using Rows = Fp32Rows;
  const TensorView& w;

  std::int64_t rows() const { return w.shape[0]; }
  std::int64_t rows_of(std::int64_t tile) const { return std::min<std::int64_t>(tile_n, w.shape[0] - tile * tile_n); }
  const T* row(std::int64_t n) const { return w.as<T>() + n * w.stride[0]; }

  void pack_row(const TensorView& x, std::int64_t m, std::int64_t padded, float*, float* to) const {
    widen(x.as<T>() + x.row_offset(m), x.last_stride(), x.last(), to);
    std::fill(to + x.last(), to + padded, 0.0f);
  }
  // Converts a tile of W to fp32, zero-filled outside W.
  void tile(std::int64_t tile, std::int64_t block, float* to) const {
    const std::int64_t first = block * block_k, count = std::min<std::int64_t>(block_k, w.shape[1] - first),
                       rows = rows_of(tile);
    for (int n = 0; n < tile_n; ++n, to += row_floats) {
      if (n >= rows || count < block_k) std::fill_n(to, row_floats, 0.0f);
      if (n < rows) widen(row(tile * tile_n + n) + first * w.stride[1], w.stride[1], count, to);
    }
  }
  F32 one_row(std::int64_t tile, const float* x) const {
    F32 acc[tile_n] = {};
    const std::int64_t rows = rows_of(tile), whole = w.stride[1] == 1 ? w.shape[1] / block_k * block_k : 0;
    for (std::int64_t n = 0; n < rows; ++n) {
      const T* const p = row(tile * tile_n + n);
      Accumulator sum;
      for (std::int64_t k = 0; k < whole; k += lanes) sum.add(load(p + k), load(x + k));
      for (std::int64_t k = whole; k < w.shape[1]; k += lanes) {
        float last[lanes] = {};
        widen(p + k * w.stride[1], w.stride[1], std::min<std::int64_t>(lanes, w.shape[1] - k), last);
        sum.add(load(last), load(x + k));
      }
      acc[n] = sum.value();
    }
    return sums(acc);
  }
};

}  // namespace

void linear(const Parallel& parallel, const LinearArgs& a) {
  with_element(a.x.dtype, [&](auto e) { multiply(parallel, a, a.w.shape[1], Weights<decltype(e)>{a.w}); });
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
