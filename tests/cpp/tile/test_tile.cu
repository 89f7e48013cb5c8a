// SPDX-License-Identifier: Apache-2.0
// Numbers of the tile primitives on a GPU: every code of a format, every place of a fragment, merges of softmax
// partials.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <iterator>
#include <limits>
#include <vector>

#include "core/half.h"
#include "support/device.cuh"
#include "tile/dequant_kv.cuh"
#include "tile/mma.cuh"
#include "tile/reduce.cuh"
#include "tile/softmax.cuh"

namespace rooftile::tile {
namespace {

__global__ void decode_bytes(float* to) {  // of word i: codes i, i + 1, i + 2, i + 3
  const std::uint32_t i = thread_index();
  std::uint32_t low, high;
  decode_int8_plus_128((i & 255) | ((i + 1) & 255) << 8 | ((i + 2) & 255) << 16 | ((i + 3) & 255) << 24, low, high);
  const float2 a = unpack<half>(low), b = unpack<half>(high);
  to[4 * i] = a.x, to[4 * i + 1] = a.y, to[4 * i + 2] = b.x, to[4 * i + 3] = b.y;
}

TEST_F(Tile, EveryInt8CodeInEveryByte) {
  const Shared<float> decoded(256 * 4);
  launch(decode_bytes, 256, decoded.data);
  for (int i = 0; i < 256; ++i)
    for (int byte = 0; byte < 4; ++byte)
      EXPECT_EQ(decoded[static_cast<std::size_t>(4 * i + byte)], (static_cast<std::int8_t>(i + byte) + 128) * code_one)
          << "byte " << byte;
}

__host__ __device__ constexpr std::uint32_t nibbles(std::uint32_t i) { return i | ~i << 16; }
__global__ void decode_nibbles(float* to) {
  const std::uint32_t i = thread_index();
  std::uint32_t pair[4];
  decode_uint4(nibbles(i), pair);
  for (int r = 0; r < 4; ++r) {
    const float2 x = unpack<half>(pair[r]);
    to[8 * i + r] = x.x, to[8 * i + r + 4] = x.y;
  }
}

TEST_F(Tile, EveryNibbleInEveryPlace) {
  constexpr std::uint32_t words = 1 << 16;
  const Shared<float> decoded(words * 8);
  launch(decode_nibbles, words, decoded.data);
  for (std::uint32_t i = 0; i < words; ++i)
    for (std::uint32_t place = 0; place < 8; ++place)
      ASSERT_EQ(decoded[8 * i + place],
                static_cast<float>(nibbles(i) >> (4 * place) & 15) * (place % 2 ? odd_code_one : code_one))
          << "place " << place << " of " << i;
}

__global__ void decode_e4m3_bytes(float* to) {  // as decode_bytes
  const std::uint32_t i = thread_index();
  std::uint32_t low, high;
  decode_e4m3((i & 255) | ((i + 1) & 255) << 8 | ((i + 2) & 255) << 16 | ((i + 3) & 255) << 24, low, high);
  const float2 a = unpack<half>(low), b = unpack<half>(high);
  to[4 * i] = a.x, to[4 * i + 1] = a.y, to[4 * i + 2] = b.x, to[4 * i + 3] = b.y;
}
// E4M3: sign, 4 bits of exponent with bias 7, 3 of mantissa; subnormals at exponent 0. NaN (0x7f, 0xff) counts as 480.
float e4m3_value(int code) {
  const int exponent = code >> 3 & 15, mantissa = code & 7;
  const float magnitude = exponent == 0 ? std::ldexp(static_cast<float>(mantissa), -9)
                                        : std::ldexp(static_cast<float>(8 + mantissa), exponent - 10);
  return code & 128 ? -magnitude : magnitude;
}

TEST_F(Tile, EveryE4m3CodeInEveryByte) {
  const Shared<float> decoded(256 * 4);
  launch(decode_e4m3_bytes, 256, decoded.data);
  for (int i = 0; i < 256; ++i)
    for (int byte = 0; byte < 4; ++byte) {
      const float found = decoded[static_cast<std::size_t>(4 * i + byte)], value = e4m3_value((i + byte) & 255);
      EXPECT_EQ(found, value * e4m3_one) << "byte " << byte;
      EXPECT_EQ(std::signbit(found), std::signbit(value)) << "byte " << byte;
    }
}

// Of every two codes, as they stand in the low bits of a pair: (low 2^15 - 2^-6, high 2^12 + 3 2^-12) and (low 2^15,
// high 2^12), exact in fp16.
__global__ void scale_codes(std::uint32_t* sums, std::uint32_t* products) {
  const std::uint32_t i = thread_index(), codes = (i & 255) | i >> 8 << 16;
  const std::uint32_t factors = pack<half>(0x1p+15f, 0x1p+12f);
  sums[i] = fma_f16x2(codes, factors, pack<half>(-0x1p-6f, 3 * 0x1p-12f));
  products[i] = mul_f16x2(codes, factors);
}

TEST_F(Tile, PairsOfCodesAreScaledExactly) {
  constexpr std::uint32_t pairs = 1 << 16;
  const Shared<std::uint32_t> sums(pairs), products(pairs);
  launch(scale_codes, pairs, sums.data, products.data);
  for (std::uint32_t i = 0; i < pairs; ++i) {
    const auto low = static_cast<float>(i & 255), high = static_cast<float>(i >> 8);
    const auto pair = [](float first, float second) {
      return std::uint32_t{rooftile::from_float<Half>(first).bits} |
             std::uint32_t{rooftile::from_float<Half>(second).bits} << 16;
    };
    ASSERT_EQ(sums[i], pair(low * 0x1p-9f - 0x1p-6f, (high + 3) * 0x1p-12f)) << i;
    ASSERT_EQ(products[i], pair(low * 0x1p-9f, high * 0x1p-12f)) << i;
  }
}

__global__ void unpack_constants(float2* to) { to[0] = unpack<half>(pair_of_128), to[1] = unpack<half>(pair_of_8); }

TEST_F(Tile, ZeroPointsOfCodes) {
  const Shared<float2> found(2);
  launch(unpack_constants, 32, found.data);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_EQ(found[i].x, (i ? 8 : 128) * code_one);
    EXPECT_EQ(found[i].y, found[i].x);
  }
}

__global__ void transpose(std::uint32_t* to) {  // element (row, column) is 8 row + column
  const std::uint32_t lane = thread_index(), first = lane / 4 * 8 + lane % 4 * 2;
  to[lane] = transpose_8x8(first | (first + 1) << 16);
}

TEST_F(Tile, TransposeOfEightByEight) {
  const Shared<std::uint32_t> turned(32);
  launch(transpose, 32, turned.data);
  for (std::uint32_t lane = 0; lane < 32; ++lane) {
    const std::uint32_t row = lane / 4, column = lane % 4 * 2;
    EXPECT_EQ(turned[lane] & 0xffff, 8 * column + row);
    EXPECT_EQ(turned[lane] >> 16, 8 * (column + 1) + row);
  }
}

// A [16, 16] of small integers times B [16, 8]: exact, so a wrong place shows.
__host__ __device__ float a_at(int row, int k) { return static_cast<float>((row * 5 + k * 3) % 13 - 6); }
__host__ __device__ float b_at(int k, int column) { return static_cast<float>((k * 7 + column * 2) % 11 - 5); }
template <class T>
__global__ void multiply(float* to) {
  const int lane = thread_index(), g = lane / 4, t = lane % 4;
  FragmentA a;
  FragmentB b;
  for (int r = 0; r < 4; ++r) {
    const int row = g + r % 2 * 8, k = 2 * t + r / 2 * 8;
    a.r[r] = pack<T>(a_at(row, k), a_at(row, k + 1));
  }
  for (int r = 0; r < 2; ++r) b.r[r] = pack<T>(b_at(2 * t + 8 * r, g), b_at(2 * t + 8 * r + 1, g));
  float d[4] = {1.0f, 1.0f, 1.0f, 1.0f};
  mma<T>(d, a, b);
  for (int i = 0; i < 4; ++i) to[(g + i / 2 * 8) * 8 + 2 * t + i % 2] = d[i];
}

template <class T>
void check_product() {
  const Shared<float> product(16 * 8);
  launch(multiply<T>, 32, product.data);
  for (int row = 0; row < 16; ++row)
    for (int column = 0; column < 8; ++column) {
      float expected = 1;
      for (int k = 0; k < 16; ++k) expected += a_at(row, k) * b_at(k, column);
      EXPECT_EQ(product[static_cast<std::size_t>(8 * row + column)], expected) << row << ", " << column;
    }
}
TEST_F(Tile, MmaOfHalf) { check_product<half>(); }
TEST_F(Tile, MmaOfBf16) { check_product<bf16>(); }

__global__ void load_tiles(std::uint32_t* plain, std::uint32_t* turned) {
  __shared__ alignas(16) std::uint16_t tiles[32][8];  // the rows of four tiles; element = 8 row + column
  const int lane = thread_index();
  for (int column = 0; column < 8; ++column) tiles[lane][column] = static_cast<std::uint16_t>(8 * lane + column);
  __syncwarp();
  const FragmentA a = ldmatrix_x4(tiles[lane]), b = ldmatrix_x4_trans(tiles[lane]);
  for (int r = 0; r < 4; ++r) plain[4 * lane + r] = a.r[r], turned[4 * lane + r] = b.r[r];
}

TEST_F(Tile, LoadsOfFourTiles) {
  const Shared<std::uint32_t> plain(32 * 4), turned(32 * 4);
  launch(load_tiles, 32, plain.data, turned.data);
  for (std::uint32_t lane = 0; lane < 32; ++lane)
    for (std::uint32_t r = 0; r < 4; ++r) {
      const std::uint32_t row = lane / 4, column = lane % 4 * 2, tile = 64 * r;
      EXPECT_EQ(plain[4 * lane + r], (tile + 8 * row + column) | (tile + 8 * row + column + 1) << 16);
      EXPECT_EQ(turned[4 * lane + r], (tile + 8 * column + row) | (tile + 8 * (column + 1) + row) << 16);
    }
}

// One row of n <= 512, of several where lanes are fewer.
template <int coarsening>
__global__ void reduce_rows(const float* x, float* sums, float* maxima, int lanes, int n) {
  __shared__ WarpPartials of_sums[2], of_maxima[1];
  float sum[coarsening][2], maximum[coarsening][1];
  for (int c = 0; c < coarsening; ++c) {
    const int i = static_cast<int>(threadIdx.x + c * blockDim.x);
    sum[c][0] = i < n ? x[i] : 0.0f;
    sum[c][1] = -sum[c][0];
    maximum[c][0] = i < n ? x[i] : Max::identity;
  }
  reduce_row(sum, lanes, of_sums, Sum{});
  reduce_row(maximum, lanes, of_maxima, Max{});
  const int i = static_cast<int>(threadIdx.x);
  sums[i] = sum[0][0] + (sum[0][0] == -sum[0][1] ? 0.0f : INFINITY);
  maxima[i] = maximum[0][0];
}
// The butterfly over n values, the farthest ones first; n is a power of two.
float butterfly(std::vector<float> x) {
  for (std::size_t half = x.size() / 2; half > 0; half /= 2)
    for (std::size_t j = 0; j < half; ++j) x[j] += x[j + half];
  return x[0];
}

TEST_F(Tile, ReduceRow) {
  constexpr int most = 512;
  const Shared<float> x(most), sums(most), maxima(most);
  for (std::size_t i = 0; i < most; ++i) x[i] = 1.0f / (1.0f + static_cast<float>(i * 37 % most)) - 0.1f;
  for (const int threads : {32, 96, 256, most})
    for (const int lanes : {1, 4, 32, threads}) {
      if (threads < lanes) continue;
      reduce_rows<1><<<1, threads>>>(x.data, sums.data, maxima.data, lanes, threads);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
      for (int row = 0; row < threads / lanes; ++row) {
        const auto values = [&](int first, int n) { return std::vector<float>(x.data + first, x.data + first + n); };
        float sum = butterfly(values(row * lanes, std::min(lanes, 32)));
        if (lanes > 32) {  // of the warps' sums, padded to 16
          std::vector<float> warps(16);
          for (int w = 0; w < threads / 32; ++w) warps[static_cast<std::size_t>(w)] = butterfly(values(w * 32, 32));
          sum = butterfly(warps);
        }
        const std::vector<float> all = values(row * lanes, lanes);
        for (int i = 0; i < lanes; ++i) {
          const auto at = static_cast<std::size_t>(row * lanes + i);
          EXPECT_EQ(sums[at], sum) << threads << " threads, " << lanes << " lanes, thread " << at;
          EXPECT_EQ(maxima[at], *std::max_element(all.begin(), all.end()));
        }
      }
    }
}

// Half the threads, each for two: the same bits, of an odd number of warps too.
TEST_F(Tile, ACoarsenedCtaReducesToTheSameBits) {
  constexpr int most = 512;
  const Shared<float> x(most), sums(most), maxima(most), coarse_sums(most), coarse_maxima(most);
  for (std::size_t i = 0; i < most; ++i) x[i] = 1.0f / (1.0f + static_cast<float>(i * 91 % most)) - 0.2f;
  for (const int threads : {96, 256, 352, most}) {
    const int half = (threads / 2 + 31) / 32 * 32;
    reduce_rows<1><<<1, threads>>>(x.data, sums.data, maxima.data, threads, threads);
    reduce_rows<2><<<1, half>>>(x.data, coarse_sums.data, coarse_maxima.data, half, threads);
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    for (std::size_t i = 0; i < static_cast<std::size_t>(half); ++i) {
      ASSERT_EQ(coarse_sums[i], sums[0]) << threads << " threads, thread " << i;
      ASSERT_EQ(coarse_maxima[i], maxima[0]) << threads << " threads, thread " << i;
    }
  }
}

// Group i of 4 lanes has a NaN in its lane i % 4, the last group nothing else.
TEST_F(Tile, TheMaximumIgnoresNaN) {
  constexpr float nan = std::numeric_limits<float>::quiet_NaN();
  const Shared<float> x(32), sums(32), maxima(32);
  for (std::size_t i = 0; i < x.n; ++i) x[i] = i % 4 == i / 4 % 4 || i >= 28 ? nan : -10.0f - static_cast<float>(i);
  launch(reduce_rows<1>, 32, x.data, sums.data, maxima.data, 4, 32);
  for (std::size_t i = 0; i < 28; ++i) {
    const std::size_t group = i / 4;
    EXPECT_EQ(maxima[i], -10.0f - static_cast<float>(4 * group + (group % 4 == 0)));
    EXPECT_TRUE(std::isnan(sums[i]));
  }
  for (std::size_t i = 28; i < x.n; ++i) EXPECT_TRUE(std::isnan(maxima[i]));
}

constexpr int maxima_count = 8;
__global__ void merge_all(const float* m, MergeWeights* weights, float* values) {
  const int i = thread_index();
  const float a = m[i / maxima_count], b = m[i % maxima_count];
  weights[i] = merge_weights(a, b);
  values[i] = merge_values(a == -INFINITY ? 0.0f : 1.1f, b == -INFINITY ? 0.0f : 0.7f, weights[i]);
}

TEST_F(Tile, MergeWeights) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  constexpr float maxima[maxima_count] = {none, -300.0f, -2.5f, 0.0f, 1.0f, 2.25f, 100.0f, 1e4f};
  const Shared<float> m(maxima_count), merged(maxima_count * maxima_count);
  const Shared<MergeWeights> weights(merged.n);
  std::copy(std::begin(maxima), std::end(maxima), m.data);
  launch(merge_all, static_cast<int>(merged.n), m.data, weights.data, merged.data);
  for (std::size_t i = 0; i < merged.n; ++i) {
    const float a = maxima[i / maxima_count], b = maxima[i % maxima_count], top = std::max(a, b);
    SCOPED_TRACE(testing::Message() << a << ", " << b);
    EXPECT_EQ(weights[i].m, top);
    if (top == none) {
      EXPECT_EQ(merged[i], 0.0f);
      continue;
    }
    EXPECT_NEAR(weights[i].a, std::exp2(double{a} - top), 1e-6);
    EXPECT_NEAR(weights[i].b, std::exp2(double{b} - top), 1e-6);
    // an empty side changes no bit, whichever side it is
    if (a == none) { EXPECT_EQ(merged[i], 0.7f); }
    if (b == none) { EXPECT_EQ(merged[i], 1.1f); }
  }
}

__global__ void finish_rows(SoftmaxResult* to) {
  if (thread_index() > 0) return;
  to[0] = finalize_softmax(-INFINITY, 0.0f, -INFINITY);
  to[1] = finalize_softmax(3.0f, 4.0f, -INFINITY);
  to[2] = finalize_softmax(3.0f, 4.0f, 5.0f);
  to[3] = finalize_softmax(-INFINITY, 0.0f, 2.0f);
}

TEST_F(Tile, AFinishedRow) {
  const Shared<SoftmaxResult> result(4);
  launch(finish_rows, 32, result.data);
  constexpr double ln2 = 0.69314718055994531;
  EXPECT_EQ(result[0].factor, 0.0f);
  EXPECT_EQ(result[0].lse, -INFINITY);
  EXPECT_FLOAT_EQ(result[1].factor, 0.25f);
  EXPECT_FLOAT_EQ(result[1].lse, static_cast<float>(5 * ln2));  // 2^3 * 4
  EXPECT_FLOAT_EQ(result[2].factor, 0.125f);                    // 2^3 of 2^3 * 4 + 2^5
  EXPECT_FLOAT_EQ(result[2].lse, static_cast<float>(6 * ln2));
  EXPECT_FLOAT_EQ(result[3].lse, static_cast<float>(2 * ln2));  // the sink alone
}

}  // namespace
}  // namespace rooftile::tile
