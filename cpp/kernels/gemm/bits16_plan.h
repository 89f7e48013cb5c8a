// SPDX-License-Identifier: Apache-2.0
// How a 16-bit product is divided among CTAs: plain data from a pure function of problem and device. Host only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "rooftile/context.h"

namespace rooftile {
struct LinearArgs;
}

namespace rooftile::gpu {

// stream: stream.cuh, any strides. tma, collective: tma.cu and collective.cuh on Hopper's wgmma. multistage:
// multistage.cu on mma.sync, for other GPUs.
enum class LinearPath : std::uint8_t { stream, tma, collective, multistage };

// stream.cuh
inline constexpr int linear_rows = 16, linear_step_k = 64;  // rows of W x k of one warp in one step
inline constexpr int linear_step_bytes = linear_rows * linear_step_k * 2;
inline constexpr int linear_warps = 8;   // most warps of a CTA
inline constexpr int linear_stages = 6;  // stages of a warp's ring, one step each
inline constexpr int linear_stream_tokens =
    16;  // tokens of a CTA; larger M takes another path where alignment allows it

// tma.cu
inline constexpr int linear_tma_max_rows = 128;  // most rows of W of a CTA
inline constexpr int linear_tma_tile_k = 64, linear_tma_tiles_per_step = 2,
                     linear_tma_step_k = linear_tma_tile_k * linear_tma_tiles_per_step;
constexpr int linear_tma_tile_bytes(int rows) { return rows * linear_tma_tile_k * 2; }
constexpr int linear_tma_threads(int rows) {
  return ((rows + 63) / 64 * 4 + 1) * 32;
}  // a consumer warp group for each 64 rows, and a producer warp
inline constexpr int linear_tma_block_m[] = {
    8, 16, 32, 64};  // tokens of a CTA, by config; larger M takes the collective path where alignment allows it
inline constexpr int linear_tma_max_tokens = 64;

// Tile of a CTA on the collective and multistage paths: rows of W x tokens.
struct LinearTile {
  int rows, tokens;
  bool ping_pong = false;         // collective.cuh: each consumer warp group has tiles of its own
  bool pair_shares_rows = false;  // collective.cuh: the CTAs of a cluster share rows of W, not tokens
};
inline constexpr LinearTile linear_collective_tiles[] = {
    {64, 128, true}, {128, 256}, {128, 128}, {192, 128, false, true}, {224, 128, false, true}};
constexpr bool linear_may_split(LinearTile tile) { return tile.rows <= 128 && tile.tokens == 128; }
inline constexpr int linear_collective_step_k = 64;
inline constexpr int linear_split_tokens = 256;  // collective.cuh splits K up to so many tokens
inline constexpr LinearTile linear_multistage_tile = {128, 128};

struct LinearProblem {
  std::int64_t m = 0, n = 0, k = 0;
  int sms = 0;
  bool aligned_operands = false;  // x and W meet the alignment rules of TMA
  bool aligned_all = false;       // y, residual and bias do too
  bool wgmma = false;
};

struct LinearPlan {
  LinearPath path = LinearPath::stream;
  int config = 0;  // tma, collective: index of the tile config; stream: 0 up to 8 tokens a CTA, else 1
  std::int64_t m_blocks = 0, n_blocks = 0;  // tma, stream: CTAs along tokens, and along rows of W
  // tma
  int tma_rows = 0, stages = 0;  // rows of W of a CTA; stages of its ring
  int cluster = 1;               // CTAs of a cluster, one for each split of K
  // stream, and for `splits` collective
  int row_tiles = 1, slices_log2 = 0;  // a CTA has row_tiles << slices_log2 warps
  int splits = 1;                      // splits of K; above 1 the partial sums go through the workspace
  int split_steps = 0;                 // steps of one split: 64 k each on the stream path, 128 k on the tma path
  std::size_t shared_bytes = 0, workspace_bytes = 0;
  const char* why = "";
};

// CTAs of collective.cuh for one split of K, whole clusters.
std::int64_t linear_collective_ctas(LinearTile, std::int64_t n, std::int64_t m);

LinearProblem problem_of(const LinearArgs&, int sms, bool wgmma);
KernelName kernel_of(const LinearPlan&, const LinearArgs&);  // the kernel's name
// "tma config=0 tma_rows=64 cluster=2 stages=5": the path and its choices, as plan= takes them (core/plan_text.h).
std::string text(const LinearPlan&);
// The first field that does not fit the problem, and what fits: "config must be 0 to 3, got 7"; "" if all do.
std::string check_plan(const LinearProblem&, const LinearPlan&);

// Same problem and device, same plan. K splits, and with them the bits of a row, depend on m through its bucket only:
// on the tma path, and on the stream path up to 16 tokens, there is one; on the collective path the buckets are 65 to
// 128 tokens, 129 to 256, and more, where K is not split.
LinearPlan plan_linear(const LinearProblem&);
// The plan that a caller forces by its text, null for the one above. Throws where it does not fit.
LinearPlan plan_linear(const char* op, const LinearProblem&, const char* forced);

}  // namespace rooftile::gpu
