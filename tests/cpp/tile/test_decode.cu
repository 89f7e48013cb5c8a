// SPDX-License-Identifier: Apache-2.0
// The offsets of decode's tiles in shared memory, on the host.
#include <gtest/gtest.h>

#include "kernels/decode/smem_layouts.cuh"

namespace rooftile::gpu {
namespace {

template <int D, int Rows>
void check_vectors() {
  constexpr SmemRows<D, Rows> layout{};
  for (int own_row = 0; own_row < Rows; ++own_row)
    for (int own_vec = 0; own_vec < D / 8; ++own_vec) {
      const SmemVectors<D, Rows> at(own_row, own_vec);
      for (int row = 0; row + own_row < Rows; ++row)
        for (int vec = 0; vec + own_vec < D / 8; ++vec)
          if ((row & own_row) == 0 && (vec & own_vec) == 0)
            ASSERT_EQ(at(row, vec), int(layout(own_row + row, 8 * (own_vec + vec))))
                << "D " << D << ", own " << own_row << ' ' << own_vec << ", further " << row << ' ' << vec;
    }
}
template <int D>
void check_rows() {
  check_vectors<D, 8>();
  check_vectors<D, 16>();
}
TEST(DecodeLayouts, VectorsOfAThread) {
  check_rows<64>(), check_rows<96>(), check_rows<128>(), check_rows<192>(), check_rows<256>(), check_rows<512>();
}

}  // namespace
}  // namespace rooftile::gpu
