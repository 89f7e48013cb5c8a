// SPDX-License-Identifier: Apache-2.0
// Shared-memory layouts of rows of 16-bit elements.
#pragma once

#include <cute/tensor.hpp>

#include "kernels/decode/scheduler.h"
#include "tile/mma.cuh"

namespace rooftile::gpu {

// 8 rows of 64 elements (32 where 64 does not divide D). The swizzle lets ldmatrix read 8 rows, and cp.async write a
// row, without bank conflicts.
template <int D>
using SmemAtom = std::conditional_t<
    D % 64 == 0,
    decltype(cute::composition(cute::Swizzle<3, 3, 3>{},
                               cute::Layout<cute::Shape<cute::_8, cute::_64>, cute::Stride<cute::_64, cute::_1>>{})),
    decltype(cute::composition(cute::Swizzle<2, 3, 3>{},
                               cute::Layout<cute::Shape<cute::_8, cute::_32>, cute::Stride<cute::_32, cute::_1>>{}))>;
template <int D, int Rows>
using SmemRows =
    decltype(cute::tile_to_shape(SmemAtom<D>{}, cute::Shape<cute::Int<Rows>, cute::Int<D>>{}));  // (Rows, D)
template <int D, int N>
using QueryLayout = SmemRows<D, N * mma_n>;  // (8 N packed rows, D)

// SmemRows<D, Rows> as one thread reaches it, in vectors of 16 bytes: at(row, vec) is the offset, in elements, of the
// vector that lies `row` rows and `vec` vectors from the thread's own. The two sums must not carry (the own row has no
// bit in common with `row`, nor vec with `vec`): the swizzle then is a sum of strides, whose signs are the thread's. So
// does CuTe's partition of a swizzled tensor, which costs the compiler up to a second for every D (docs/design/096).
template <int D, int Rows>
class SmemVectors {
 public:
  CUTE_HOST_DEVICE SmemVectors(int own_row, int own_vec)
      : own_(8 * (plain(own_row, own_vec) + (own_vec % atom_vecs ^ swizzle(own_row)))) {}
  CUTE_HOST_DEVICE int operator()(int row, int vec) const {
    int offset = own_ + 8 * plain(row, vec);
    for (int bit = 8; bit < 8 * atom_vecs; bit *= 2)
      if ((8 * (vec % atom_vecs ^ swizzle(row)) & bit) != 0) offset += (own_ & bit) != 0 ? -bit : bit;
    return offset;
  }

 private:
  static constexpr int atom_vecs = D % 64 == 0 ? 8 : 4;  // vectors of a row of SmemAtom
  static constexpr int swizzle(int row) { return row % 8 / (8 / atom_vecs); }
  // The vector's place but for its place in a row of the atom.
  static constexpr int plain(int row, int vec) {
    return (vec / atom_vecs * (Rows / 8) + row / 8) * 8 * atom_vecs + row % 8 * atom_vecs;
  }

  int own_;
};

}  // namespace rooftile::gpu
