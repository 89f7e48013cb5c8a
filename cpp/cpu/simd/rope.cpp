// SPDX-License-Identifier: Apache-2.0
// Half-split rotary embedding.  x, y [..., H, D]   cos, sin [max_position, R]   positions [...]
// Channels i and i + R of every head are rotated by the angle of the token's position; channels from 2R on are copied.
#include <cstring>
#include <memory>

#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/rows.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

// Rotates one head. y may be x: both halves of a vector are read before either is written.
template <class T>
void rotate(const T* x, const float* cos, const float* sin, T* y, std::int64_t pairs, std::int64_t dim) {
  for_vecs(pairs, [=](std::int64_t i, auto lanes) {
    const Wide low = wide(load(x + i, lanes)), high = wide(load(x + pairs + i, lanes));
    const Wide c = wide(load(cos + i, lanes)), s = wide(load(sin + i, lanes));
    store(y + i, narrow(low * c - high * s), lanes);
    store(y + pairs + i, narrow(high * c + low * s), lanes);
  });
  if (y != x && dim > 2 * pairs)
    std::memcpy(y + 2 * pairs, x + 2 * pairs, sizeof(T) * static_cast<std::size_t>(dim - 2 * pairs));
}

}  // namespace

void rope(const Parallel& parallel, const TensorView& x, const TensorView& cos, const TensorView& sin,
          const TensorView& positions, const TensorView& y) {
  const std::int64_t heads = x.shape[x.ndim - 2], dim = x.last(), pairs = cos.shape[1], tokens = positions.numel();
  const auto angles = std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(2 * pairs * parallel.threads()));
  with_element(x.dtype, [&](auto e) {
    using T = decltype(e);
    const RowScratch<T> x_rows(x, parallel.threads()), y_rows(y, parallel.threads());
    for_rows(parallel, tokens, heads * dim, [&](std::int64_t token, int thread) {
      const std::int64_t position = integer_at(positions, element_offset(positions, token));
      float* buffer = angles.get() + 2 * pairs * thread;
      const float* c = as_floats(cos, position * cos.stride[0], pairs, cos.stride[1], buffer);
      const float* s = as_floats(sin, position * sin.stride[0], pairs, sin.stride[1], buffer + pairs);
      for (std::int64_t row = token * heads; row < (token + 1) * heads; ++row) {
        rotate(x_rows.read(x, row, thread), c, s, y_rows.write(y, row, thread), pairs, dim);
        y_rows.commit(y, row, thread);
      }
    });
  });
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
