// SPDX-License-Identifier: Apache-2.0
// How a 16-bit product is cut into CTAs: plain data from a pure function of the problem and the device. Host only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rooftile::gpu {

// stream: stream.cuh, any strides. boxes, collective: Hopper's wgmma (tma.cu, collective.cu). blocks: mma.sync
// (multistage.cu), for other GPUs.
enum class LinearPath : std::uint8_t { stream, tma, collective, multistage };

// stream.cuh
inline constexpr int linear_rows = 16, linear_step_k = 64;  // of W, of one warp in one step
inline constexpr int linear_step_bytes = linear_rows * linear_step_k * 2;
inline constexpr int linear_warps = 8;           // of a CTA, at most
inline constexpr int linear_stages = 6;          // steps in a warp's ring
inline constexpr int linear_stream_tokens = 16;  // of a CTA; for more tokens one of the others is used where it can be

// tma.cu
inline constexpr int linear_tma_max_rows = 128;  // of W, of a CTA at most
inline constexpr int linear_tma_tile_k = 64, linear_tma_tiles_per_step = 2,
                     linear_tma_step_k = linear_tma_tile_k * linear_tma_tiles_per_step;
constexpr int linear_tma_tile_bytes(int rows) { return rows * linear_tma_tile_k * 2; }
constexpr int linear_tma_threads(int rows) {
  return ((rows + 63) / 64 * 4 + 1) * 32;
}  // four warps multiply 64 rows, one brings them
inline constexpr int linear_tma_block_m[] = {
    8, 16, 32, 64};  // tokens of a CTA; beyond, the collectives are used where they can be
inline constexpr int linear_tma_max_tokens = 64;

// Tiles of the others: rows of W and tokens.
struct LinearTile {
  int rows, tokens;
};
inline constexpr LinearTile linear_collective_tiles[] = {{64, 128}, {128, 256}};
inline constexpr LinearTile linear_multistage_tile = {128, 128};

struct LinearProblem {
  std::int64_t m = 0, n = 0, k = 0;
  int sms = 0;
  bool aligned_operands = false;  // x and W lie as tensor copies need it
  bool aligned_all = false;       // the other arguments too, or as 16-byte copies need it
  bool wgmma = false;
};

struct LinearPlan {
  LinearPath path = LinearPath::stream;
  int config = 0;  // of boxes, collective: index into their table; of stream: 0 up to 8 tokens a CTA, else 1
  std::int64_t m_blocks = 0, n_blocks = 0;  // of stream and boxes
  // of boxes
  int tma_rows = 0, stages = 0;  // of a CTA; of its ring
  int cluster = 1;               // chunks of K, whose CTAs are a cluster
  // of stream
  int row_tiles = 1, slices_log2 = 0;  // a CTA has row_tiles << slices_log2 warps
  int splits = 1;                      // of K; above 1 their sums meet in the workspace
  int split_steps = 0;                 // steps of 64 k in one split; of boxes: of 128 k in one chunk
  std::size_t shared_bytes = 0, workspace_bytes = 0;
  const char* why = "";
};

// Same problem and device, same plan. Up to 16 tokens, and wherever boxes are, nothing in it but the form, which no bit
// depends on, follows from m.
LinearPlan plan_linear(const LinearProblem&);

}  // namespace rooftile::gpu
