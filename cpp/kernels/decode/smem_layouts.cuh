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

// SmemRows<D, Rows> in vectors of 16 bytes, as one thread reaches it from an own row r0 and an own vector v0 of a row:
// at(r, v) is the offset of element (r0 + r, 8 (v0 + v)). r0 & r and v0 & v must be 0. Then the XOR of the swizzle adds
// or subtracts 8, 16 and 32, by bits of the own offset alone. CuTe's partition of a swizzled tensor comes to the same
// and takes the compiler a second or two for each operand and D (docs/design/096).
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
  // The vector, but for its place in a row of the atom, which is swizzled.
  static constexpr int plain(int row, int vec) {
    return (vec / atom_vecs * (Rows / 8) + row / 8) * 8 * atom_vecs + row % 8 * atom_vecs;
  }

  int own_;
};

}  // namespace rooftile::gpu
