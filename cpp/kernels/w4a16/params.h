// SPDX-License-Identifier: Apache-2.0
// What the kernels of a product with a weight of 4 or 8 bits receive.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/divisor.h"
#include "core/hd.h"
#include "kernels/products/product.h"
#include "kernels/w4a16/plan.h"
#include "rooftile/gemm.h"

namespace rooftile::gpu {

struct W4MatmulParams : Product {
  bool x_in_pieces = false;  // x can be read 16 bytes at a time, its rows `x_stride` elements apart
  std::int64_t x_stride = 0;
  W4View w;
  int groups = 0;
  int tile_rows = 0, row_tiles = 0;  // of W: rows of tiles, and tiles of each
  // half of a CTA's warps have gates, tile rows of W, the others their ups, so many further on; 0: no
  int gate_tiles = 0;
  unsigned token_blocks = 0, row_blocks = 0;  // of this launch
  Divisor by_token_blocks, by_row_blocks;
  int k = 0, group = 0;            // as in w, in 32 bits
  int span = 0, span_shift = 0;    // k that are scaled at once; log2 of it in 32 k
  int steps = 0, chunk_steps = 0;  // steps of 128 k: all, and of one split
  // log2 of the CTAs of a cluster: of stream.cuh the chunks of K, of tiles.cuh rows of W with the same tokens
  int cluster_shift = 0;
  int x_rows = 0;   // tokens a panel has room for
  int sums_at = 0;  // of stream.cuh: where in shared memory the sums lie that are to be finished

  // The tile row of a warp; `tile_rows` if the last CTA has no work for it. Warps 2 i and 2 i + 1 have neighbours.
  template <int warps>
  ROOFTILE_HD int tile_row(unsigned row_block, int warp) const {
    constexpr int half = warps / 2;
    static_assert(half % 2 == 0);
    const bool gated = gate_tiles > 0, upper = warp >= half;
    const int row =
        static_cast<int>(row_block) * (gated ? half : warps) + warp % half + (upper ? gated ? gate_tiles : half : 0);
    return row < (gated && !upper ? gate_tiles : tile_rows) ? row : tile_rows;
  }
};

using W4Kernel = void (*)(W4MatmulParams);
// inst/half.cu, inst/bf16.cu; of 8 bits inst/half8.cu, inst/bf168.cu. span: k that are scaled at once.
W4Kernel w4a16_stream_half(int form, int span, W4Zeros);
W4Kernel w4a16_stream_bf16(int form, int span, W4Zeros);
W4Kernel w8a16_stream_half(int form, int span);
W4Kernel w8a16_stream_bf16(int form, int span);

// The kernel for more tokens.
struct W4TilesParams {
  W4MatmulParams product;
  CUtensorMap x;               // of this launch's tokens, or of their copy: boxes of tokens / cluster rows x 64 columns
  unsigned token_group = 1;    // blocks of tokens that meet all rows of W before the next ones do
  Divisor by_items, by_steps;  // items of a split; steps of a row group
  // even ones of all rows' steps, each a cluster's for every block of tokens; 0: clusters take items
  unsigned shares = 0;
  unsigned share_steps = 0, longer = 0;  // of a share; so many of the first have one more
  float* handed =
      nullptr;  // [CTA][...]: sums that the next share's CTA goes on with, in the order of the threads that hold them
  std::uint64_t* tickets = nullptr;  // [CTA]: `ticket` when they are there
  std::uint64_t ticket = 0;          // no other launch has it

  ROOFTILE_HD unsigned begin_of(unsigned share) const {
    return share * share_steps + (share < longer ? share : longer);
  }
};
using W4TilesKernel = void (*)(W4TilesParams);
W4TilesKernel w4a16_tiles_half(int form, W4Operand);
W4TilesKernel w4a16_tiles_bf16(int form, W4Operand);
W4TilesKernel w8a16_tiles_half(int form, W4Operand);
W4TilesKernel w8a16_tiles_bf16(int form, W4Operand);

// What that kernel needs of x beforehand.
struct W4PrepareParams {
  W4MatmulParams product;
  std::uint16_t* copy = nullptr;  // of x: [token of this launch][K, padded to 8] in the order of the codes
  bool row_in_shared = false;     // a row of x comes into (dynamic) shared memory before it is copied
  unsigned parts = 1;             // CTAs that share a token
};

// What expand.cuh receives: a chunk of W's rows.
struct W4ExpandParams {
  W4View w;
  void* to = nullptr;                     // [rows, k]
  std::int64_t first_tile_row = 0;        // of W, the chunk's
  unsigned tile_rows = 0, row_tiles = 0;  // of the chunk; tiles of a row
  int rows = 0, k = 0, groups = 0;        // groups: scale blocks of a row
  int group_shift = 0;                    // log2 of the k-blocks of 32 in a scale block; 31: one for all of K
  Divisor by_steps;                       // of 128 k in a row
};

}  // namespace rooftile::gpu
