// SPDX-License-Identifier: Apache-2.0
// What the kernels of a 4-bit product receive.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "kernels/products/product.h"
#include "kernels/w4a16/plan.h"
#include "rooftile/gemm.h"

namespace rooftile::gpu {

struct W4MatmulParams : Product {
  bool x_in_pieces = false;         // x can be read 16 bytes at a time, its rows `x_stride` elements apart
  std::int64_t x_stride = 0;
  W4View w;
  int groups = 0;
  unsigned token_blocks = 0, row_blocks = 0;   // of this launch
  int k = 0, group = 0;             // as in w, in 32 bits
  int span = 0, span_shift = 0;     // k that are scaled at once; log2 of it in 32 k
  int steps = 0, chunk_steps = 0;   // steps of 128 k: all, and of one split
  int x_rows = 0;                   // tokens a panel of x has room for
};

using W4Kernel = void (*)(W4MatmulParams);
// inst/half.cu, inst/bf16.cu. span: k that are scaled at once.
W4Kernel w4a16_stream_half(int form, int span, W4Zeros);
W4Kernel w4a16_stream_bf16(int form, int span, W4Zeros);

// The kernel for more tokens.
struct W4TilesParams {
  W4MatmulParams product;
  CUtensorMap x;       // boxes of tokens / cluster rows x 64 columns
  int cluster_shift = 0;   // log2 of the CTAs that share tokens
  unsigned token_group = 1;   // blocks of tokens that meet all rows of W before the next ones do
};
using W4TilesKernel = void (*)(W4TilesParams);
W4TilesKernel w4a16_tiles_half(int form, int span);
W4TilesKernel w4a16_tiles_bf16(int form, int span);

}  // namespace rooftile::gpu
