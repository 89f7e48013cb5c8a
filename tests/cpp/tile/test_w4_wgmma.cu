// SPDX-License-Identifier: Apache-2.0
// The layouts of wgmma_codes.cuh, thread by thread on the host, and its loads of x on a GPU.
#include <gtest/gtest.h>

#include <cstdint>

#include "kernels/gemm/wgmma_codes_producer.cuh"
#include "kernels/tensor_map.h"
#include "support/counting_tensor.h"
#include "support/device.cuh"
#include "tile/wgmma.cuh"

namespace rooftile::gpu {
namespace {

template <class Check>
void for_each_traits(const Check& check) {
  using enum W4Operand;
  check(W4WgmmaTraits<tile::half, 4, 0, codes>{}), check(W4WgmmaTraits<tile::half, 8, 0, f16_scales>{});
  check(W4WgmmaTraits<tile::bf16, 4, 0, codes_64>{}), check(W4WgmmaTraits<tile::half, 4, 1, codes_64>{});
  check(W4WgmmaTraits<tile::bf16, 4, 1, f16_scales>{}), check(W4WgmmaTraits<tile::half, 8, 1, codes>{});
  check(W4WgmmaTraits<tile::half, 4, 2, bf16_scales>{}), check(W4WgmmaTraits<tile::bf16, 8, 2, codes>{});
}

// The element of x in a stage: two halves of 64 k, rows of 128 bytes, 16-byte vector v of row r at v ^ r % 8.
int x_offset(int tokens, int token, int k) {
  return (k / 64 * tokens + token) * 64 + (k % 64 / 8 ^ token % 8) * 8 + k % 8;
}
TEST(W4WgmmaLayouts, XIsSwizzledAsTmaLeavesIt) {
  for_each_traits([](auto traits) {
    using Config = decltype(traits);
    const auto layout = cute::as_position_independent_swizzle_layout(typename Config::SmemLayoutX{});
    for (int stage = 0; stage < Config::stages; ++stage)
      for (int token = 0; token < Config::tokens; ++token)
        for (int k = 0; k < w4_step_k; ++k)
          ASSERT_EQ(static_cast<int>(layout(token, k, stage)),
                    stage * Config::x_bytes / 2 + x_offset(Config::tokens, token, k));
  });
}
// A descriptor has the address of its operand before the swizzle.
TEST(W4WgmmaLayouts, OperandsOfXStepOverKAndStages) {
  for_each_traits([](auto traits) {
    using namespace cute;
    using Config = decltype(traits);
    const Tensor tBsX = typename Config::TiledMma{}.get_slice(0).partition_B(
        counting_tensor(get_nonswizzle_portion(typename Config::SmemLayoutX{})));  // (MMA, 1, MMA_K, STAGE)
    for (int stage = 0; stage < Config::stages; ++stage)
      for (int k = 0; k < 8; ++k)
        EXPECT_EQ(2 * tBsX(0, 0, k, stage), stage * Config::x_bytes + k / 4 * Config::tokens * 128 + k % 4 * 32);
  });
}

// A warp's rows are one tile row of W, and its A fragments are the words that its lanes read.
TEST(W4WgmmaLayouts, ALaneOwnsItsWords) {
  for_each_traits([](auto traits) {
    using Config = decltype(traits);
    using TileLayout = std::conditional_t<Config::bits == 4, W4TileLayout, W8TileLayout>;
    constexpr int rows = typename Config::BLK_M{}, words = Config::bits / 4;
    const auto tv = typename Config::TiledMma{}.get_layoutA_TV();  // (thread, value) -> m + BLK_M k
    for (int thread = 0; thread < 32 * Config::warps; ++thread)
      for (int value = 0; value < 8; ++value)
        for (int k_step = 0; k_step < 4; ++k_step) {
          const int mk = tv(thread, value), row = mk % rows;
          const int code = TileLayout{}(row % 16, mk / rows + 16 * k_step), byte = code * Config::bits / 8;
          EXPECT_EQ(row / 16, thread / 32);
          EXPECT_EQ(byte % w4_fragment_bytes / 16, thread % 32);
          EXPECT_EQ(byte / w4_fragment_bytes * (4 / words) + byte % 16 / 4 / words, k_step);
        }
  });
}

// An accumulator is of row g (+ 8) of the warp's tile row and of tokens 2t, 2t + 1 of 8; the epilogue's tile has
// `pitch` floats a token.
TEST(W4WgmmaLayouts, AccumulatorsAndTheEpiloguesTile) {
  for_each_traits([](auto traits) {
    using namespace cute;
    using Config = decltype(traits);
    constexpr int pitch = typename Config::BLK_M{} + 4;
    const typename Config::TiledMma mma;
    for (int thread = 0; thread < 32 * Config::warps; ++thread) {
      const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
      const Tensor coords = mma.get_slice(thread).partition_C(
          make_identity_tensor(Shape<typename Config::BLK_M, typename Config::BLK_N>{}));
      const Tensor offsets = mma.get_slice(thread).partition_C(counting_tensor(typename Config::SmemLayoutOut{}));
      ASSERT_EQ(static_cast<int>(size(coords)), Config::tokens / 2);
      for (int i = 0; i < Config::tokens / 2; ++i) {
        const int row = warp * 16 + g + i / 2 % 2 * 8, token = i / 4 * 8 + 2 * t + i % 2;
        EXPECT_EQ(static_cast<int>(get<0>(coords(i))), row);
        EXPECT_EQ(static_cast<int>(get<1>(coords(i))), token);
        EXPECT_EQ(offsets(i), token % Config::epilogue_tokens * pitch + row);
      }
    }
  });
}

// The stages of a warp are those of all consumer warps apart.
TEST(W4WgmmaLayouts, StagesOfAWarp) {
  for_each_traits([](auto traits) {
    using namespace cute;
    using Config = decltype(traits);
    constexpr int stage_bytes = Config::warps * w4_stage_bytes(Config::bits), stage = Config::stages - 1;
    EXPECT_EQ(typename Config::SmemLayoutCodes{}(5, 1, stage), stage * stage_bytes / 4 + 128 + 5);
    EXPECT_EQ(typename Config::LaneLayoutQparams{}(0, stage), stage * stage_bytes / 16);
    EXPECT_EQ(typename Config::LaneLayoutScales{}(3, stage), stage * stage_bytes / 2 + 3);
    EXPECT_EQ(typename Config::SmemLayoutZeros{}(4 * 6 + 1, 1, 3, stage), stage * stage_bytes + 3 * 16 + 8 + 6);
    for (int shift = 0; shift < 3; ++shift)
      for (int lane = 0; lane < 8 * Config::scale_blocks; ++lane) {  // the row that a lane passes to ldmatrix
        const auto of_row = typename Config::SmemCopyScales{}.get_slice(lane).partition_S(
            counting_tensor(Config::smem_layout_scales(shift)));
        const int group = Config::scale_blocks == 4 ? lane / 8 >> shift : lane / 8;
        EXPECT_EQ(of_row(0, _0{}, _0{}, stage), stage * stage_bytes / 2 + group * 16 + lane % 2 * 8);
      }
  });
}

// A stage of x of every CTA, to (CTA, BLK_N, BLK_K).
template <class Config>
__global__ void load_x(const __grid_constant__ WgmmaParams params, unsigned m_block, int step, std::uint16_t* to) {
#ifdef ROOFTILE_WGMMA
  extern __shared__ __align__(1024) std::uint8_t shared[];
  auto& smem = *reinterpret_cast<typename Config::SharedStorage*>(shared);
  constexpr int stage = Config::stages - 1;
  const int cta_rank = tile::cluster_coord().rank;
  if (threadIdx.x == 0) {
    smem.full[stage].init(1);
    cutlass::arch::fence_barrier_init();
  }
  tile::sync_cluster();  // the barriers of all CTAs are initialised
  if (threadIdx.x == 0) W4XLoader<Config>(params, smem, cta_rank).load(m_block, step, stage);
  tile::wait_barrier(smem.full[stage], 0);
  const auto* const x = reinterpret_cast<const std::uint16_t*>(smem.x) + stage * Config::x_bytes / 2;
  for (int i = threadIdx.x; i < Config::x_bytes / 2; i += blockDim.x) to[blockIdx.x * (Config::x_bytes / 2) + i] = x[i];
  tile::sync_cluster();  // a CTA stays until its peer's loads have landed
#endif
}

class W4WgmmaX : public tile::Tile {};

template <class Config>
void check_load_x(int ctas) {
  constexpr int tokens = 2 * Config::tokens - 3, k = 3 * w4_step_k - 24, tile = Config::tokens * w4_step_k;
  constexpr unsigned m_block = 1;
  constexpr int step = 2;  // the last one of both: tokens and k end within the tile
  const tile::Shared<std::uint16_t> x(tokens * k), to(static_cast<std::size_t>(ctas) * tile);
  for (std::size_t i = 0; i < x.n; ++i) x[i] = static_cast<std::uint16_t>(i % 65521 + 1);
  for (std::size_t i = 0; i < to.n; ++i) to[i] = 0xffff;
  WgmmaParams params{};
  params.tokens = tokens;
  params.k = k;
  params.cluster_shift = ctas / 2;
  params.x_map = rows_map("test", x.data, DType::f16, {.rows = tokens, .columns = k, .stride = k},
                          Config::tokens / ctas, w4_wgmma_x_tile_k);
  constexpr int bytes = sizeof(typename Config::SharedStorage);
  ASSERT_EQ(cudaFuncSetAttribute(load_x<Config>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes), cudaSuccess);
  tile::launch({.ctas = ctas, .threads = 128, .cluster = ctas, .shared_bytes = bytes}, load_x<Config>, params, m_block,
               step, to.data);
  for (int cta = 0; cta < ctas; ++cta)
    for (int row = 0; row < Config::tokens; ++row)
      for (int column = 0; column < w4_step_k; ++column) {
        const int token = Config::tokens + row, at = step * w4_step_k + column;
        const bool inside = token < tokens && at < k;
        ASSERT_EQ(to[static_cast<std::size_t>(cta * tile + x_offset(Config::tokens, row, column))],
                  inside ? x[static_cast<std::size_t>(token * k + at)] : 0)
            << cta << ": " << row << ", " << column;
      }
}
TEST_F(W4WgmmaX, EveryCtaOfTheClusterGetsAllTokens) {
  if (tile::device_major() != 9) GTEST_SKIP() << "no Hopper";
  for (const int ctas : {1, 2}) {
    check_load_x<W4WgmmaTraits<tile::half, 4, 0, W4Operand::codes>>(ctas);
    check_load_x<W4WgmmaTraits<tile::half, 4, 1, W4Operand::codes>>(ctas);
    check_load_x<W4WgmmaTraits<tile::half, 8, 2, W4Operand::codes>>(ctas);
  }
}

}  // namespace
}  // namespace rooftile::gpu
