// SPDX-License-Identifier: Apache-2.0
// How a 4-bit product is cut into CTAs: plain data from a pure function of the problem and the device. Host only.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rooftile::gpu {

// One compiled form of the kernel: how many tokens and rows of W a warp holds, and how deep its ring of codes is.
struct W4Form {
  int token_tiles;   // of 8 tokens, the N of the mma
  int row_tiles;     // of 16 rows of W
  int stages;        // of the ring of a warp; a stage is one tile of 64 k of each of its row tiles
};
inline constexpr W4Form w4_forms[] = {{1, 1, 8}, {2, 2, 6}, {4, 2, 6}, {8, 2, 4}};
inline constexpr int w4_warps = 8;
inline constexpr int w4_tokens = 8 * w4_forms[3].token_tiles;   // the most a CTA takes

constexpr int w4_slot_bytes(W4Form f) { return f.row_tiles * (512 + 128); }   // codes; scales and offsets of two groups

struct W4Problem {
  std::int64_t m = 0, n = 0, k = 0;
  int group = 0, sms = 0;
  bool batch_invariant = false;
};

struct W4Plan {
  int form = 0;                    // index into w4_forms
  int span = 0;                    // k whose sum is scaled at once: 32, 64 or 128; a multiple of it starts every chunk
  int splits = 0;                  // of K; above 1 their sums meet in the workspace
  int chunk_tiles = 0;             // tiles of 64 k in one split
  int panel_tiles = 0;             // of which x is in shared memory at a time
  int x_tokens = 0;                // tokens that x has room for there
  std::int64_t launch_tokens = 0;  // tokens of one launch; below m the launches follow each other
  std::int64_t token_blocks = 0, row_blocks = 0;   // of one launch
  std::size_t shared_bytes = 0, workspace_bytes = 0;
  const char* why = "";
};

// Same problem and device, same plan. Splits, and with them the bits of a row, depend on m through its regime only:
// up to 8, 16, 32 and 64 tokens, then each further 64; batch_invariant takes the split of the second at every m.
W4Plan plan_w4a16(const W4Problem&);

}  // namespace rooftile::gpu
