// SPDX-License-Identifier: Apache-2.0
// The layouts of the weight-streaming kernel, thread by thread on the host, and its codes -> operands on a GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/gemm/code_traits.cuh"
#include "support/counting_tensor.h"

namespace rooftile::gpu {
namespace {

template <class T, int bits, int config, bool small_groups = false>
using Traits = W4StreamTraits<T, bits, config, void, small_groups, W4StreamZeros::either>;

// A W4 tile is the A operand of m16n8k16: a lane's 16 bytes hold its fragments of four k-steps, a 32-bit word each. A
// W8 tile: of two k-steps, two words each.
template <class TileLayout, int bits>
void check_lane_bytes() {
  const auto tv = typename Traits<tile::half, bits, 0>::TiledMma{}.get_layoutA_TV();  // (lane, value) -> m + 16 k
  for (int lane = 0; lane < 32; ++lane)
    for (int value = 0; value < 8; ++value)
      for (int k_step = 0; k_step < 4; ++k_step) {
        const int mk = tv(lane, value), code = TileLayout{}(mk % 16, mk / 16 + 16 * k_step);
        const int byte = code * bits / 8, word = byte % 16 / 4, words = bits / 4;
        EXPECT_EQ(byte % w4_fragment_bytes / 16, lane);
        EXPECT_EQ(byte / w4_fragment_bytes * (4 / words) + word / words, k_step);
      }
}
TEST(W4Layouts, ALaneOwnsSixteenBytesOfABlock) {
  check_lane_bytes<W4TileLayout, 4>();
  check_lane_bytes<W8TileLayout, 8>();
}

// Every 16-byte vector of a tile of x is copied once, by the thread that says so.
template <class Config>
void check_x_copies() {
  using namespace cute;
  constexpr int tokens = typename Config::BLK_N{}, vecs = typename Config::BLK_K{} / 8;
  std::vector<int> copies(tokens * vecs);
  for (int thread = 0; thread < w4_warps * 32; ++thread) {
    auto slice = typename Config::GmemCopyX{}.get_slice(thread);
    const Tensor coords =
        slice.partition_S(make_identity_tensor(Shape<typename Config::BLK_N, typename Config::BLK_K>{}));
    const Tensor to = slice.partition_D(counting_tensor(Config::smem_layout_x(tokens)));
    for (int n = 0; n < size<1>(coords); ++n)
      for (int k = 0; k < size<2>(coords); ++k) {
        const int token = get<0>(coords(0, n, k)), at = get<1>(coords(0, n, k));
        ++copies[token * vecs + at / 8];
        EXPECT_EQ(to(0, n, k, 1), (tokens + token) * Config::x_pitch + at);
      }
  }
  for (const int n : copies) EXPECT_EQ(n, 1);
}
// ldmatrix: lane i passes the address of row i % 8 of matrix i / 8; lane (g, t) receives elements 2t, 2t + 1 of row g.
template <class Config>
void check_x_fragments() {
  using namespace cute;
  constexpr int tokens = typename Config::BLK_N{};
  const Tensor sX = counting_tensor(Config::smem_layout_x(tokens));
  for (int lane = 0; lane < 32; ++lane)
    for (int n = 0; n < Config::n_tiles; ++n)
      for (int k_block = 0; k_block < typename Config::BLK_K{} / 32; ++k_block)
        for (int matrix = 0; matrix < 4; ++matrix) {
          const int g = lane / 4, t = lane % 4;
          const auto of_row = typename Config::SmemCopyX{}.get_slice(matrix * 8 + g).partition_S(sX);
          EXPECT_EQ(of_row(0, n, k_block, 1) + 2 * t, sX(8 * n + g, 32 * k_block + 8 * matrix + 2 * t, 1));
        }
}
template <int bits, int config>
void check_x() {
  check_x_copies<Traits<tile::half, bits, config>>();
  check_x_fragments<Traits<tile::half, bits, config>>();
}
TEST(W4Layouts, TilesOfX) {
  check_x<4, 0>(), check_x<4, 1>(), check_x<4, 2>(), check_x<4, 3>();
  check_x<8, 0>(), check_x<8, 1>(), check_x<8, 2>(), check_x<8, 3>();
}

// ldmatrix.trans: lane (g, t) receives element g of rows 2t and 2t + 1 of each matrix.
template <class Config>
void check_scales(int shift) {
  using namespace cute;
  const Tensor sS = counting_tensor(Config::smem_layout_scales(shift));
  for (int lane = 0; lane < 32; ++lane)
    for (int block = 0; block < Config::scale_blocks; ++block)
      for (int half = 0; half < 2; ++half) {
        const int row = 2 * (lane % 4) + half;
        const auto of_row = typename Config::SmemCopyScales{}.get_slice(block * 8 + row).partition_S(sS);
        const int stage = 1, group = Config::small_groups ? block >> shift : 0;
        EXPECT_EQ(of_row(lane / 4, _0{}, _0{}, stage),
                  stage * w4_stage_bytes(Config::bits) / 2 + group * 16 + half * 8 + lane / 4);
      }
}
TEST(W4Layouts, ScalesOfALane) {
  check_scales<Traits<tile::half, 4, 0>>(2);
  check_scales<Traits<tile::half, 4, 0, true>>(0), check_scales<Traits<tile::half, 4, 0, true>>(1);
  check_scales<Traits<tile::half, 8, 3, true>>(0), check_scales<Traits<tile::half, 8, 3, true>>(1);
}
TEST(W4Layouts, ZeroPointsOfALane) {
  using Config = Traits<tile::half, 4, 0>;
  for (int lane = 0; lane < 32; ++lane)
    for (int half = 0; half < 2; ++half)
      for (int group = 0; group < 4; ++group)
        EXPECT_EQ(typename Config::SmemLayoutZeros{}(lane, half, group, 2),
                  2 * w4_stage_bytes(4) + group * 16 + half * 8 + lane / 4);
}

// to (row half, code, value of a pair) of zero point blockIdx.x: dequant of words that hold one code everywhere.
template <class T, int bits>
__global__ void dequantise(float* to) {
  using namespace cute;
  using Decode = tile::CodeDecode<T, bits>;
  const std::uint32_t code = threadIdx.x;
  Tensor rCodes = make_tensor<std::uint32_t>(Shape<Int<bits / 4>, _1>{});  // (WORD, MMA_K)
  Tensor rZero = make_tensor<std::uint32_t>(_2{});                         // (row g, row g + 8)
  Tensor rA = make_tensor<T>(Shape<Shape<_2, _2, _2>, _1, _1>{});          // (MMA, 1, MMA_K)
  fill(rCodes, code * (bits == 4 ? 0x11111111u : 0x01010101u));
  Decode::set_zeros(rZero, blockIdx.x, 255 - blockIdx.x);
  Decode::dequant(rCodes, rZero, rA);
  for (int i = 0; i < 8; ++i) to[(blockIdx.x * blockDim.x + code) * 8 + i] = tile::to_float(rA(i)) * Decode::unit;
}
template <class T, int bits>
void check_dequant() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  constexpr int codes = 1 << bits;
  float* to = nullptr;
  ASSERT_EQ(cudaMallocManaged(&to, sizeof(float) * 256 * codes * 8), cudaSuccess);
  dequantise<T, bits><<<256, codes>>>(to);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (int zero = 0; zero < 256; ++zero)
    for (int code = 0; code < codes; ++code)
      for (int i = 0; i < 8; ++i)  // values 2, 3 of each four: row g + 8
        EXPECT_EQ(to[(zero * codes + code) * 8 + i], code - (i / 2 % 2 ? 255 - zero : zero))
            << zero << " " << code << " " << i;
  cudaFree(to);
}
TEST(W4Dequant, EveryCodeAndZeroPoint) {
  check_dequant<tile::half, 4>(), check_dequant<tile::bf16, 4>();
  check_dequant<tile::half, 8>(), check_dequant<tile::bf16, 8>();
}

}  // namespace
}  // namespace rooftile::gpu
