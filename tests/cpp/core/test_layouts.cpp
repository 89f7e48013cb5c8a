// SPDX-License-Identifier: Apache-2.0
// The byte layouts are bijections onto their sections, and have the properties the tensor-core kernels rely on.
#include <gtest/gtest.h>

#include <vector>

#include "core/kv_layout.h"
#include "core/w4_layout.h"

namespace rooftile {
namespace {

constexpr KvFormat quantised[] = {KvFormat::int8,      KvFormat::int4, KvFormat::int4_kivi_sym,
                                  KvFormat::int4_kivi, KvFormat::fp8,  KvFormat::int8_kivi_sym};

TEST(KvLayout, CodesFillTheirSectionOnce) {
  for (KvFormat f : quantised)
    for (int page : {16, 32, 64, 128})
      for (int d : {64, 80, 96, 128, 192, 256}) {
        if (is_kivi(f) && page % kv_group) continue;
        const int padded = padded_head_dim(d);
        std::vector<int> k_seen(static_cast<std::size_t>(page * padded)), v_seen = k_seen;
        for (int t = 0; t < page; ++t)
          for (int i = 0; i < padded; ++i) {
            ++k_seen.at(static_cast<std::size_t>(k_code_index(d, t, i)));
            ++v_seen.at(static_cast<std::size_t>(v_code_index(f, page, d, t, i)));
          }
        for (std::size_t i = 0; i < k_seen.size(); ++i) {
          ASSERT_EQ(k_seen[i], 1);
          ASSERT_EQ(v_seen[i], 1) << name(f) << " page " << page << " d " << d << " index " << i;
        }
      }
}

TEST(KvLayout, NeighbouringTokensOfOneChannelShareAWord) {
  for (int t = 0; t < 32; t += 2)
    for (int d = 0; d < 128; ++d) {
      const auto int4 = v_code_index(KvFormat::int4_kivi, 64, 128, t, d);
      EXPECT_EQ(v_code_index(KvFormat::int4_kivi, 64, 128, t + 1, d), int4 + 4);  // low and high half of the word
      EXPECT_LT(int4 % 8, 4);
      const auto int8 = v_code_index(KvFormat::int8, 64, 128, t, d);
      EXPECT_EQ(v_code_index(KvFormat::int8, 64, 128, t + 1, d), int8 + 1);
      EXPECT_EQ(int8 % 2, 0);
    }
}

TEST(KvLayout, BitsPerPairAreTheDocumentedOnes) {
  const auto bits = [](KvFormat f) { return 8.0 * static_cast<double>(kv_block_bytes(f, 128, 128)) / (128 * 128); };
  EXPECT_DOUBLE_EQ(bits(KvFormat::fp16), 32);
  EXPECT_DOUBLE_EQ(bits(KvFormat::int8), 16.25);
  EXPECT_DOUBLE_EQ(bits(KvFormat::fp8), 16.25);
  EXPECT_DOUBLE_EQ(bits(KvFormat::int4), 8.25);
  EXPECT_DOUBLE_EQ(bits(KvFormat::int4_kivi_sym), 8.625);
  EXPECT_DOUBLE_EQ(bits(KvFormat::int4_kivi), 9.25);
  EXPECT_DOUBLE_EQ(bits(KvFormat::int8_kivi_sym), 16.625);
}

TEST(W4Layout, CodesFillTheTilesOnceAndFollowTheFragment) {
  const std::int64_t n = 48, k = 192;
  for (const int bits : {4, 8}) {
    std::vector<int> seen(static_cast<std::size_t>(n * k));
    for (std::int64_t i = 0; i < n; ++i)
      for (std::int64_t j = 0; j < k; ++j)
        ++seen.at(static_cast<std::size_t>(w4_code_index(bits, w4_tiles_k(k), i, j)));
    for (int s : seen) ASSERT_EQ(s, 1);
    for (int index = 0; index < w4_tile_n * w4_tile_k; ++index) {
      const W4Element at = w4_element_of_tile(bits, index);
      ASSERT_EQ(w4_code_index(bits, 1, at.n, at.k), index) << "bits " << bits;
    }
  }
  // mma m16n8k16: lane (g, t) holds A[g][2t], A[g][2t+1] in register 0, row g+8 in 1, columns +8 in 2 and 3
  for (int g = 0; g < 8; ++g)
    for (int t = 0; t < 4; ++t)
      for (int reg = 0; reg < 4; ++reg)
        for (int step = 0; step < 4; ++step) {
          const int row = g + 8 * (reg % 2), column = 16 * step + 2 * t + 8 * (reg / 2), lane = g * 4 + t;
          const auto nibble = w4_code_index(4, 1, row, column), byte = w4_code_index(8, 1, row, column);
          EXPECT_EQ(nibble, lane * 32 + step * 8 + reg);
          EXPECT_EQ(w4_code_index(4, 1, row, column + 1), nibble + 4);
          EXPECT_EQ(byte, step / 2 * w4_fragment_bytes + lane * 16 + step % 2 * 8 + reg / 2 * 4 + reg % 2);
          EXPECT_EQ(w4_code_index(8, 1, row, column + 1), byte + 2);
        }
}

}  // namespace
}  // namespace rooftile
