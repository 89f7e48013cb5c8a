// SPDX-License-Identifier: Apache-2.0
// The offsets of decode's tiles in shared memory, on the host.
#include <gtest/gtest.h>

#include "kernels/decode/element_tile.cuh"
#include "support/counting_tensor.h"

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

// The rows that lanes pass to ldmatrix are those of CuTe's TiledCopies of the operands.
TEST(DecodeLayouts, RowsOfAnLdmatrix) {
  using namespace cute;
  constexpr int D = 64, N = 2;
  using Element = tile::MmaType<tile::half>;
  ElementTiledMma<tile::half> mma;
  const auto copy_k = make_tiled_copy_A(Copy_Atom<SM75_U32x4_LDSM_N, Element>{}, mma);
  const auto copy_q = make_tiled_copy_B(Copy_Atom<SM75_U32x2_LDSM_N, Element>{}, mma);
  const auto copy_vt = make_tiled_copy_A(Copy_Atom<SM75_U16x8_LDSM_T, Element>{}, mma);
  const Tensor sK = counting_tensor(SmemRows<D, 16>{});              // (16 tokens, D)
  const Tensor sQ = counting_tensor(QueryLayout<D, N>{});            // (8 N, D)
  const Tensor sVt = counting_tensor(composition(SmemRows<D, 16>{},  // (D, 16 tokens)
                                                 Layout<Shape<Int<D>, _16>, Stride<_16, _1>>{}));
  for (int lane = 0; lane < 32; ++lane) {
    const auto tSsK = copy_k.get_slice(lane).partition_S(sK);     // (CPY, 1, D / 16)
    const auto tSsQ = copy_q.get_slice(lane).partition_S(sQ);     // (CPY, N, D / 16)
    const auto tOsVt = copy_vt.get_slice(lane).partition_S(sVt);  // (CPY, D / 16, 1)
    for (int kt = 0; kt < D / 16; ++kt) {
      EXPECT_EQ((k_vectors<D>(lane)(0, 2 * kt)), tSsK(0, 0, kt));
      EXPECT_EQ((vt_vectors<D>(lane, 0)(0, 2 * kt)), tOsVt(0, kt, 0));
      if (lane < 16)  // the others' rows are not read
        for (int n = 0; n < N; ++n) EXPECT_EQ((query_vectors<D, N>(lane)(n * mma_n, 2 * kt)), tSsQ(0, n, kt));
    }
  }
}

}  // namespace
}  // namespace rooftile::gpu
