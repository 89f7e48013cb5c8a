// SPDX-License-Identifier: Apache-2.0
// The tile configs of all products: sizes that plans, traits and tests share. Host and device.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

#include "core/hd.h"
#include "core/w4_layout.h"

namespace rooftile::gpu {

// ---- W in 16 bits: linear_ ----------------------------------------------------------------------

// stream_bits16.cuh
inline constexpr int linear_rows = 16, linear_step_k = 64;  // rows of W x k of one warp in one step
inline constexpr int linear_step_bytes = linear_rows * linear_step_k * 2;
inline constexpr int linear_warps = 8;   // most warps of a CTA
inline constexpr int linear_stages = 6;  // stages of a warp's ring, one step each
// Tokens of a CTA; larger M takes another path where alignment allows it.
inline constexpr int linear_stream_tokens = 16;

// tma_bits16.cuh
inline constexpr int linear_tma_max_rows = 128;  // most rows of W of a CTA
inline constexpr int linear_tma_tile_k = 64, linear_tma_tiles_per_step = 2,
                     linear_tma_step_k = linear_tma_tile_k * linear_tma_tiles_per_step;
constexpr int linear_tma_tile_bytes(int rows) { return rows * linear_tma_tile_k * 2; }
// A consumer warp group for each 64 rows, and a producer warp.
constexpr int linear_tma_threads(int rows) { return ((rows + 63) / 64 * 4 + 1) * 32; }
// Tokens of a CTA, by config; larger M takes the collective path where alignment allows it.
inline constexpr int linear_tma_block_m[] = {8, 16, 32, 64};
inline constexpr int linear_tma_max_tokens = 64;

// Tile of a CTA on the collective and multistage paths: rows of W x tokens.
struct LinearTile {
  int rows, tokens;
  bool ping_pong = false;         // collective.cuh: each consumer warp group has tiles of its own
  bool pair_shares_rows = false;  // collective.cuh: the CTAs of a cluster share rows of W, not tokens
};
inline constexpr LinearTile linear_collective_tiles[] = {
    {64, 128, true}, {128, 256}, {128, 128}, {192, 128, false, true}, {224, 128, false, true}};
// The tiles that collective.cuh also compiles with partial sums (dispatch.cpp asks, and the build knows).
constexpr bool linear_may_split(LinearTile tile) { return tile.rows <= 128 && tile.tokens == 128; }
inline constexpr int linear_collective_step_k = 64;
inline constexpr int linear_split_tokens = 256;  // collective.cuh splits K of at most this many tokens
inline constexpr LinearTile linear_multistage_tile = {128, 128};

// ---- W in 4 or 8 bits: w4_ (w8_: 8 bits only) ---------------------------------------------------

// Tile config of stream_codes.cuh. A tile of x has at least stages - 1 steps (code_traits.cuh asserts it), so the wait
// for a step's codes is also the wait for the next tile of x.
struct W4StreamConfig {
  int n_tiles;   // mma tiles of 8 tokens; the CTA takes 8 n_tiles tokens
  int stages;    // of a warp's ring; a stage is one step: 16 rows of W x 128 k
  int x_tile_k;  // k of a tile of x in shared memory
};
inline constexpr W4StreamConfig w4_stream_configs[] = {{1, 6, 768}, {2, 5, 640}, {4, 3, 384}, {8, 3, 256}};
inline constexpr W4StreamConfig w8_stream_configs[] = {
    {1, 4, 512}, {2, 3, 512}, {4, 3, 256}, {8, 2, 128}};  // of 8 bits
static_assert(std::size(w4_stream_configs) == std::size(w8_stream_configs));
constexpr W4StreamConfig w4_stream_config(int bits, int config) {
  return bits == 4 ? w4_stream_configs[config] : w8_stream_configs[config];
}
// The zeros that a variant of stream_codes.cuh is compiled for. either: symmetric or integer, at run time.
enum class W4StreamZeros : std::uint8_t { symmetric, integer, either, minima };
inline constexpr int w4_warps = 8, w4_warp_rows = 16;
inline constexpr int w4_step_k = 128;
inline constexpr int w4_stream_last = std::size(w4_stream_configs) - 1;                  // index of the last config
inline constexpr int w4_stream_block_m = 8 * w4_stream_configs[w4_stream_last].n_tiles;  // the most tokens of a CTA
// Up to 16 tokens issue slots count: these configs have kernels of their own for scales of x's type, and with them for
// symmetric codes and for zero points of large groups. All other kernels test at run time.
constexpr bool w4_specialises(int config) { return w4_stream_configs[config].n_tiles <= 2; }
inline constexpr int w4_qparam_bytes = 128;  // scales of a step, or offsets: (4 groups, 16 rows) of 2 bytes
ROOFTILE_HD constexpr int w4_stage_bytes(int bits) { return 2 * w4_tile_bytes(bits) + 2 * w4_qparam_bytes; }

// The least shared memory of a CTA of which an SM of Hopper holds `ctas` at most: 16 bytes more than lets one more
// (1 KB is reserved for each) fit its 228 KB.
constexpr int least_shared_for(int ctas) { return (228 / (ctas + 1) - 1) * 1024 + 16; }
// Of stream_codes.cuh. A third CTA would be of the next launch, whose loads compete with this one's. One token: in
// 8 bits K 14336 took 27.8 us on an H100 with room for three, four tokens (no room) 24.5; in 4 bits N 28672 took
// 23.0 us on an H200 with room for three, 18.1 without.
inline constexpr int w4_stream_least_shared = least_shared_for(2);

// stream_codes.cuh on Hopper: at most w4_max_cluster K splits of at most w4_cluster_tokens tokens can be a cluster.
inline constexpr int w4_max_cluster = 8, w4_cluster_tokens = 16;

// Tile config of wgmma_codes.cuh. stages: of 128 k each.
struct W4WgmmaConfig {
  int tokens, consumer_groups, stages, ctas_per_sm;
  constexpr int warps() const { return 4 * consumer_groups; }   // consumer warps
  constexpr int threads() const { return 32 * (warps() + 4); }  // and a producer warp group
};
inline constexpr W4WgmmaConfig w4_wgmma_configs[] = {{32, 2, 5, 2}, {64, 2, 7, 1}, {128, 2, 4, 1}};
inline constexpr W4WgmmaConfig w8_wgmma_configs[] = {{32, 2, 3, 2}, {64, 2, 5, 1}, {128, 2, 3, 1}};  // of 8 bits
static_assert(std::size(w4_wgmma_configs) == std::size(w8_wgmma_configs));
inline constexpr int w4_wgmma_last = std::size(w4_wgmma_configs) - 1;  // index of the last config
constexpr W4WgmmaConfig w4_wgmma_config(int bits, int config) {
  return bits == 4 ? w4_wgmma_configs[config] : w8_wgmma_configs[config];
}
// The epilogue's tile in shared memory: (tokens, rows of W + 4), fp32; 4 more against bank conflicts.
constexpr int w4_epilogue_tokens(W4WgmmaConfig config) { return config.tokens < 64 ? config.tokens : 64; }
constexpr int w4_epilogue_bytes(W4WgmmaConfig config) {
  return w4_epilogue_tokens(config) * (config.warps() * w4_warp_rows + 4) * 4;
}
// Shared memory of wgmma_codes.cuh: x, codes and scales, the epilogue's tile, two barriers a stage.
constexpr int w4_wgmma_shared_bytes(int bits, W4WgmmaConfig config) {
  return config.stages * (config.tokens * w4_step_k * 2 + config.warps() * w4_stage_bytes(bits) + 16) +
         w4_epilogue_bytes(config);
}
inline constexpr int w4_wgmma_x_tile_k = 64;  // k of a TMA load of x: 128 bytes
// Whether the config may run stream-K: with two CTAs per SM it gained nothing.
constexpr bool w4_stream_k(W4WgmmaConfig config) { return config.ctas_per_sm == 1; }
// Whether the config has a variant for scale blocks of 64 k that scales two sums of a step in fp32. With 128 tokens it
// rounds weights: tensor cores are as busy, and sums take the registers.
constexpr bool w4_has_two_sums(int bits, W4WgmmaConfig config) { return bits == 4 && config.tokens <= 64; }
inline constexpr int w4_stream_max_m = 16;  // stream_codes.cuh runs at most this many tokens on Hopper

// gather_x.cuh: threads of a CTA, and columns they copy at once.
inline constexpr int w4_gather_threads = 256, w4_gather_columns = 8 * w4_gather_threads;
inline constexpr int w4_gather_row_bytes = 96 << 10;    // the longest row of x that is copied to shared memory
inline constexpr std::int64_t w4_gather_tokens = 4096;  // of a launch whose x is gathered: bounds the workspace
ROOFTILE_HD constexpr std::int64_t w4_padded_k(std::int64_t k) { return (k + 7) / 8 * 8; }

// expand.cuh: the tile that collective.cuh takes for expanded rows, the most bytes of a chunk, threads of a CTA.
inline constexpr LinearTile w4_expand_tile = linear_collective_tiles[1];
inline constexpr std::int64_t w4_expand_bytes = std::int64_t{32} << 20;
inline constexpr int w4_expand_threads = 256;

// Bytes from a token to the next in a tile of x; 16 more against bank conflicts.
constexpr int w4_x_tile_pitch(W4StreamConfig config) { return 2 * config.x_tile_k + 16; }

// The epilogue of one CTA of stream_codes.cuh: `tiles` output tiles of 16 columns of y, from the sums of `warps` warps
// (twice as many as tiles where a gate is combined with its up projection). The first CTAs of a cluster get as many
// tiles as each other, the last ones fewer or none.
struct W4EpilogueTiles {
  int tiles, warps;
};
constexpr W4EpilogueTiles w4_epilogue_tiles(bool gated, int cluster) {
  const int all = gated ? w4_warps / 2 : w4_warps, tiles = (all + cluster - 1) / cluster;
  return {tiles, gated ? 2 * tiles : tiles};
}
inline constexpr int w4_sums_pitch = w4_warp_rows;  // floats from a token to the next

}  // namespace rooftile::gpu
