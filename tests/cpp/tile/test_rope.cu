// SPDX-License-Identifier: Apache-2.0
// RoPE on a GPU: the rotation in fp32 and the exact one against fp64 on the host, and positions of both widths.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

#include "support/device.cuh"
#include "tile/rope.cuh"
#include "tile/strided_rows.cuh"

namespace rooftile::tile {
namespace {

struct Rotation {
  float own, partner, cos, sin;
  RotatedPair pair;
  float exact;
};
__global__ void rotate_all(Rotation* r) {
  Rotation& of = r[thread_index()];
  of.pair = rotate(of.own, of.partner, of.cos, of.sin);
  of.exact = rotate_exact(of.own, of.partner, of.cos, of.sin);
}

TEST_F(Tile, RotationsInFp32AndExactOnes) {
  std::mt19937 random(3);
  std::uniform_real_distribution<float> value(-8, 8), angle(0.001f, 6.28f);
  const Shared<Rotation> r(1 << 14);
  for (std::size_t i = 0; i < r.n; ++i) {
    const float x = angle(random);
    r[i] = {value(random), value(random), std::cos(x), std::sin(x), {}, 0};
    // every second one cancels: own cos is nearly partner sin
    if (i % 2) r[i].partner = r[i].own * (r[i].cos / r[i].sin);
  }
  launch(rotate_all, static_cast<int>(r.n), r.data);
  const auto ulps = [](float found, double exact) {
    const float next = std::nextafter(std::fabs(static_cast<float>(exact)), std::numeric_limits<float>::infinity());
    return std::fabs(found - exact) / (next - std::fabs(static_cast<float>(exact)));
  };
  for (std::size_t i = 0; i < r.n; ++i) {
    const auto& [own, partner, cos, sin, pair, exact] = r[i];
    const double low = double{own} * cos - double{partner} * sin, high = double{partner} * cos + double{own} * sin;
    ASSERT_LE(ulps(pair.low, low), 2) << i;
    ASSERT_LE(ulps(pair.high, high), 2) << i;
    ASSERT_EQ(exact, static_cast<float>(double{own} * cos + double{partner} * sin)) << i;
  }
}

__global__ void read_positions(const void* positions, bool wide, std::int64_t* to) {
  to[thread_index()] = load_integer(positions, thread_index(), wide);
}

TEST_F(Tile, PositionsOfBothWidths) {
  const Shared<std::int64_t> wide(32), found(32);
  const Shared<std::int32_t> narrow(32);
  for (int i = 0; i < 32; ++i) {
    narrow[static_cast<std::size_t>(i)] = i % 2 ? -i : 1 << 30 | i;
    wide[static_cast<std::size_t>(i)] = (std::int64_t{i} << 40) - 3;
  }
  launch(read_positions, 32, narrow.data, false, found.data);
  for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(found[i], narrow[i]);
  launch(read_positions, 32, wide.data, true, found.data);
  for (std::size_t i = 0; i < 32; ++i) EXPECT_EQ(found[i], wide[i]);
}

}  // namespace
}  // namespace rooftile::tile
