// SPDX-License-Identifier: Apache-2.0
// How a product with a weight of 4 or 8 bits is cut into CTAs: plain data from a pure function of the problem and the
// device. Host only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "core/hd.h"
#include "core/w4_layout.h"
#include "rooftile/context.h"
#include "rooftile/gemm.h"

namespace rooftile {
struct W4MatmulArgs;
}

namespace rooftile::gpu {

// Tile config of stream.cuh. A tile of x is at least as long as the ring: the wait for a step's codes is then also the
// wait for the next tile of x.
struct W4StreamConfig {
  int n_tiles;   // mma tiles of 8 tokens; the CTA takes 8 n_tiles tokens
  int stages;    // of a warp's ring; a stage is one step: 16 rows of W x 128 k
  int x_tile_k;  // k of a tile of x in shared memory
};
inline constexpr W4StreamConfig w4_stream_configs[] = {{1, 6, 768}, {2, 5, 640}, {4, 3, 384}, {8, 3, 256}};
inline constexpr W4StreamConfig w8_stream_configs[] = {
    {1, 4, 512}, {2, 3, 512}, {4, 3, 256}, {8, 2, 128}};  // of 8 bits
constexpr W4StreamConfig w4_stream_config(int bits, int config) {
  return bits == 4 ? w4_stream_configs[config] : w8_stream_configs[config];
}
inline constexpr int w4_warps = 8, w4_warp_rows = 16;
inline constexpr int w4_step_k = 128;
inline constexpr int w4_stream_block_m = 8 * w4_stream_configs[3].n_tiles;  // the most tokens of a CTA
inline constexpr int w4_qparam_bytes = 128;  // scales, or offsets, of a step: (4 groups, 16 rows) of 2 bytes
ROOFTILE_HD constexpr int w4_stage_bytes(int bits) { return 2 * w4_tile_bytes(bits) + 2 * w4_qparam_bytes; }

// Tile config of wgmma.cuh. stages: of 128 k each.
struct W4WgmmaConfig {
  int tokens, consumer_groups, stages, ctas_per_sm;
  constexpr int warps() const { return 4 * consumer_groups; }   // consumer warps
  constexpr int threads() const { return 32 * (warps() + 4); }  // and a producer warp group
};
inline constexpr W4WgmmaConfig w4_wgmma_configs[] = {{32, 2, 5, 2}, {64, 2, 7, 1}, {128, 2, 4, 1}};
inline constexpr W4WgmmaConfig w8_wgmma_configs[] = {{32, 2, 3, 2}, {64, 2, 5, 1}, {128, 2, 3, 1}};  // of 8 bits
constexpr W4WgmmaConfig w4_wgmma_config(int bits, int config) {
  return bits == 4 ? w4_wgmma_configs[config] : w8_wgmma_configs[config];
}
// The epilogue's tile in shared memory: (tokens, rows of W + 4), fp32; 4 more against bank conflicts.
constexpr int w4_epilogue_tokens(W4WgmmaConfig f) { return f.tokens < 64 ? f.tokens : 64; }
constexpr int w4_epilogue_bytes(W4WgmmaConfig f) { return w4_epilogue_tokens(f) * (f.warps() * w4_warp_rows + 4) * 4; }
// Shared memory of wgmma.cuh: x, codes and scales, the epilogue's tile, two barriers a stage.
constexpr int w4_wgmma_shared_bytes(int bits, W4WgmmaConfig f) {
  return f.stages * (f.tokens * w4_step_k * 2 + f.warps() * w4_stage_bytes(bits) + 16) + w4_epilogue_bytes(f);
}
inline constexpr int w4_wgmma_x_tile_k = 64;  // k of a TMA load of x: 128 bytes
// Whether the config may run stream-K: with two CTAs per SM it gained nothing.
constexpr bool w4_stream_k(W4WgmmaConfig f) { return f.ctas_per_sm == 1; }
inline constexpr int w4_stream_max_m = 16;  // up to so many tokens stream.cuh runs on Hopper too

// gather_x.cuh: threads of a CTA, and columns they copy at once.
inline constexpr int w4_gather_threads = 256, w4_gather_columns = 8 * w4_gather_threads;
inline constexpr int w4_gather_row_bytes = 96 << 10;    // the longest row of x that is copied to shared memory
inline constexpr std::int64_t w4_gather_tokens = 4096;  // of a launch whose x is gathered: bounds the workspace
ROOFTILE_HD constexpr std::int64_t w4_padded_k(std::int64_t k) { return (k + 7) / 8 * 8; }

// expand.cuh: the most bytes of a chunk, and threads of a CTA.
inline constexpr std::int64_t w4_expand_bytes = std::int64_t{32} << 20;
inline constexpr int w4_expand_threads = 256;

// Bytes from a token to the next in a tile of x; 16 more against bank conflicts.
constexpr int w4_x_tile_pitch(W4StreamConfig f) { return 2 * f.x_tile_k + 16; }

// The A operands of wgmma.cuh. codes: u - zero, exact, whose sums over 128 k are scaled in fp32. f16_scales,
// bf16_scales: weights rounded to x's type, from scales (and minima) of that 16-bit type.
enum class W4Operand : std::uint8_t { codes, f16_scales, bf16_scales };

struct W4Problem {
  std::int64_t m = 0, n = 0, k = 0;
  int bits = 4, group = 0, sms = 0;
  bool clusters = false;  // the device runs clusters
  bool gated = false;     // rows of W are [gate | up]
  bool batch_invariant = false;
  bool wgmma = false;        // the device runs wgmma.cuh
  bool gather_x = false;     // wgmma.cuh needs a copy of x: act-order, or strides that TMA cannot load
  bool minima = false;       // W's offsets are minima
  bool bf16_scales = false;  // its scales are bf16, not fp16
  bool bf16 = false;         // x is bf16, not fp16
  // x has no act-order, and x, y, bias and residual have the strides and alignment that the 16-bit product's TMA kernel
  // needs (product.h)
  bool fits_linear = false;
};

struct W4Plan {
  bool wgmma = false;  // wgmma.cuh; else stream.cuh
  int config = 0;      // index of w4_wgmma_config or w4_stream_config
  int cluster = 1;     // wgmma: CTAs with the same tokens, a divisor of n_blocks; stream: the K splits, or 1
  int m_group = 1;     // wgmma: m-blocks that meet all rows of W before the next ones do
  int scale_k = 0;     // k of a scale block within a step: 32, 64 or 128; K splits start at its multiples
  W4Operand operand = W4Operand::codes;  // wgmma
  int expand_rows = 0;  // wgmma: rows of W that expand.cuh writes to the workspace at a time; 0: no expansion
  int splits = 1;       // of K
  bool separate_epilogue = false;  // sums go to the workspace and a second kernel runs the epilogue
  std::int64_t gate_tiles = 0;     // gated, gate and up in one CTA: tile rows of W from a gate to its up
  int split_steps = 0;             // steps of 128 k in a K split
  int stream_k_ranges = 0;         // wgmma: stream-K work ranges for each m-block, one a cluster; 0: no stream-K
  int x_tile_tokens = 0;           // stream: rows of a tile of x in shared memory
  int sums_offset = 0;             // stream: bytes to the epilogue's sums in shared memory
  std::int64_t launch_tokens = 0;  // of one launch; below m several launches follow each other
  std::int64_t m_blocks = 0, n_blocks = 0;  // of one launch
  std::size_t shared_bytes = 0, workspace_bytes = 0;
  std::size_t semaphore_bytes = 0, fixup_bytes = 0;  // stream-K: the beginning of the workspace
  std::size_t gathered_bytes = 0;                    // wgmma: x gathered, the end of the workspace
  int gather_ctas = 1;                               // CTAs that gather one token
  const char* why = "";
};

// The epilogue of one CTA of stream.cuh: `tiles` output tiles of 16 columns of y, from the sums of `warps` warps (twice
// as many as tiles where a gate is combined with its up projection). The CTAs of a cluster get equally many tiles.
struct W4EpilogueTiles {
  int tiles, warps;
};
constexpr W4EpilogueTiles w4_epilogue_tiles(bool gated, int cluster_shift) {
  const int all = gated ? w4_warps / 2 : w4_warps, tiles = all >> cluster_shift > 0 ? all >> cluster_shift : 1;
  return {tiles, gated ? 2 * tiles : tiles};
}
inline constexpr int w4_sums_pitch = w4_warp_rows;  // floats from a token to the next

// hopper: the device has clusters and runs wgmma.cuh. fits_linear: false where y, bias and residual are not known yet.
W4Problem problem_of(const W4MatmulArgs&, int sms, bool hopper, bool fits_linear = true);
// The kernel's name.
KernelName kernel_of(const W4Plan&, const W4Problem&, W4Zeros zeros);
// "stream config=0 splits=2 cluster=2": the path and its choices, as plan= takes them (core/plan_text.h).
std::string text(const W4Plan&);
// The first field that does not fit the problem, and what fits: "config must be 0 to 3, got 7"; "" if all do.
std::string check_plan(const W4Problem&, const W4Plan&);

// The same problem and device give the same plan. K splits, and with them the bits of a row, depend on m through its
// bucket only: up to 8, 16, 32 and 64 tokens, then each further 64 (wgmma.cuh: 128). batch_invariant takes the split of
// the bucket of 16 at every m. Stream-K does not change bits.
W4Plan plan_w4a16(const W4Problem&);
// The plan that a caller forces by its text, null for the one above. Throws where it does not fit.
W4Plan plan_w4a16(const char* op, const W4Problem&, const char* forced);

}  // namespace rooftile::gpu
