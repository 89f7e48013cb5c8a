// SPDX-License-Identifier: Apache-2.0
// How a product with a weight of 4 or 8 bits is cut into CTAs: plain data from a pure function of the problem and the
// device. Host only.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/hd.h"
#include "core/w4_layout.h"

namespace rooftile::gpu {

// One compiled form of the kernel: how many tokens a warp holds, how deep its ring of codes is, how much of K a panel
// of x has. A panel is never shorter than the ring: the wait for a step of codes is the wait for the panel behind it.
struct W4Form {
  int token_tiles;  // of 8 tokens, the N of the mma
  int stages;       // of the ring of a warp; a stage is one step: 16 rows of W, 128 k
  int panel_k;
};
inline constexpr W4Form w4_forms[] = {{1, 6, 1024}, {2, 5, 512}, {4, 3, 512}, {8, 3, 256}};
inline constexpr W4Form w8_forms[] = {{1, 4, 512}, {2, 3, 512}, {4, 3, 256}, {8, 2, 128}};  // of 8 bits
constexpr W4Form w4_form(int bits, int form) { return bits == 4 ? w4_forms[form] : w8_forms[form]; }
inline constexpr int w4_warps = 8, w4_rows_of_warp = 16;
inline constexpr int w4_step_k = 128;
inline constexpr int w4_tokens = 8 * w4_forms[3].token_tiles;  // the most a CTA takes
inline constexpr int w4_side_bytes = 128;                      // scales, or offsets, of the groups of a step
ROOFTILE_HD constexpr int w4_slot_bytes(int bits) { return 2 * w4_tile_bytes(bits) + 2 * w4_side_bytes; }

// The same of the kernel for more tokens (tiles.cuh): tokens of a CTA, groups of four warps, steps of 128 k on the way,
// CTAs a multiprocessor.
struct W4TilesForm {
  int tokens, groups, stages, ctas;
  constexpr int warps() const { return 4 * groups; }
  constexpr int threads() const { return 32 * (warps() + 4); }  // and a group that brings x and codes
};
inline constexpr W4TilesForm w4_tiles_forms[] = {{32, 2, 5, 2}, {64, 2, 7, 1}, {128, 2, 4, 1}};
inline constexpr W4TilesForm w8_tiles_forms[] = {{32, 2, 3, 2}, {64, 2, 5, 1}, {128, 2, 3, 1}};  // of 8 bits
constexpr W4TilesForm w4_tiles_form(int bits, int form) {
  return bits == 4 ? w4_tiles_forms[form] : w8_tiles_forms[form];
}
constexpr int w4_tiles_out_tokens(W4TilesForm f) {
  return f.tokens < 64 ? f.tokens : 64;
}  // of the output's tile, that are finished at once
constexpr int w4_tiles_out_bytes(W4TilesForm f) {
  return w4_tiles_out_tokens(f) * (f.warps() * w4_rows_of_warp + 4) * 4;
}
constexpr bool w4_tiles_shares(W4TilesForm f) {
  return f.ctas == 1;
}  // may be cut into even shares; where two CTAs share a multiprocessor it gained nothing
inline constexpr int w4_stream_tokens = 16;  // up to so many tiles.cuh is not used

// What is prepared for tiles.cuh (prepare.cuh): threads and columns that they take at once; tokens of a launch whose x
// is copied, so that the workspace is bounded; elements of a row of the copy.
inline constexpr int w4_prepare_threads = 256, w4_prepare_columns = 8 * w4_prepare_threads;
inline constexpr int w4_prepare_row = 96 << 10;  // bytes of a row of x that fit into shared memory
inline constexpr std::int64_t w4_copied_tokens = 4096;
ROOFTILE_HD constexpr std::int64_t w4_padded_row(std::int64_t k) { return (k + 7) / 8 * 8; }

// What expand.cuh writes at a time, at most, and its threads of a CTA.
inline constexpr std::int64_t w4_expand_bytes = std::int64_t{32} << 20;
inline constexpr int w4_expand_threads = 256;

constexpr int w4_panel_pitch(W4Form f) { return 2 * f.panel_k + 16; }  // bytes of a row; 16 more against bank conflicts

// What tiles.cuh multiplies: codes less their zero, exactly, whose sums over 128 k are scaled in fp32, or weights
// rounded to x's type, made of scales (and minima) of either 16-bit type.
enum class W4Operand : std::uint8_t { codes, f16_scales, bf16_scales };

struct W4Problem {
  std::int64_t m = 0, n = 0, k = 0;
  int bits = 4, group = 0, sms = 0;
  bool clusters = false;  // the device runs clusters
  bool gated = false;     // rows of W are [gate | up]
  bool batch_invariant = false;
  bool tiles = false;  // the device has tiles.cuh
  // which needs a copy of x: in another order, or because the copy engine cannot bring x as it lies
  bool copy_x = false;
  bool minima = false;       // W's offsets are minima
  bool bf16_scales = false;  // its scales are bf16, not fp16
  bool bf16 = false;         // x is bf16, not fp16
  bool linear_tiles =
      // x, y, bias and residual lie as the tiles of the 16-bit product need it (product.h), columns are in order
      false;
};

struct W4Plan {
  bool tiles = false;   // tiles.cuh instead of stream.cuh
  int form = 0;         // of w4_tiles_form or w4_form
  int cluster = 1;      // of tiles: CTAs that share tokens, of which row_blocks is a multiple; else the splits, or 1
  int token_group = 1;  // of tiles: blocks of tokens that meet all rows of W before the next ones do
  int span = 0;         // k whose sum is scaled at once: 32, 64 or 128; a multiple of it starts every chunk
  W4Operand operand = W4Operand::codes;  // of tiles
  // so many rows of W at a time are written to the workspace in x's type, and multiplied there; 0: none
  int expand_rows = 0;
  int splits = 0;  // of K
  bool finish =
      // sums go to the workspace, where a second kernel finds them: of several splits, or of gates apart from ups
      false;
  std::int64_t gate_tiles =
      0;                // of a gated product whose CTAs have gates and their ups: tile rows of W from one to the other
  int chunk_steps = 0;  // steps of 128 k in one split
  int shares =
      // of tiles: what all rows of W have to do in even shares for each block of tokens, a cluster's each; 0: not cut
      // so
      0;
  int x_rows = 0;                  // tokens that a panel of x has room for
  int sums_at = 0;                 // where in shared memory sums lie before they are finished, if not finish
  std::int64_t launch_tokens = 0;  // tokens of one launch; below m the launches follow each other
  std::int64_t token_blocks = 0, row_blocks = 0;  // of one launch
  std::size_t shared_bytes = 0, workspace_bytes = 0;
  std::size_t copy_bytes = 0;                      // of tiles, the end of the workspace: a copy of x
  std::size_t ticket_bytes = 0, handed_bytes = 0;  // of even shares, its beginning
  int prepare_parts = 1;                           // CTAs that prepare one token
  const char* why = "";
};

// Which of the sums that the warps of a CTA hold, 16 rows of W each, one CTA of a cluster finishes: `outputs` times 16
// columns of y, from the sums of `warps` warps, which are more where gates meet their ups.
struct W4Finisher {
  int outputs, warps;
};
constexpr W4Finisher w4_finisher(bool pairs, int cluster_shift) {
  const int all = pairs ? w4_warps / 2 : w4_warps, outputs = all >> cluster_shift > 0 ? all >> cluster_shift : 1;
  return {outputs, pairs ? 2 * outputs : outputs};
}
inline constexpr int w4_sums_pitch =
    w4_rows_of_warp + 4;  // floats from a token to the next; 4 more against bank conflicts

// Same problem and device, same plan. Splits, and with them the bits of a row, depend on m through its regime only: up
// to 8, 16, 32 and 64 tokens, then each further 64 (tiles.cuh: 128); batch_invariant takes the split of the second at
// every m. Even shares leave no trace in the bits.
W4Plan plan_w4a16(const W4Problem&);

}  // namespace rooftile::gpu
