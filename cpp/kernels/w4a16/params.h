// SPDX-License-Identifier: Apache-2.0
// What the kernels of a 4-bit product receive.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/hd.h"
#include "kernels/w4a16/plan.h"
#include "rooftile/gemm.h"

namespace rooftile::gpu {

// A tensor [..., last] as rows, at any strides. Leading dimensions that lie evenly are one.
struct Rows {
  void* data = nullptr;   // null: not given
  std::int64_t last_stride = 0;
  std::int64_t shape[TensorView::max_ndim - 1] = {}, stride[TensorView::max_ndim - 1] = {};   // innermost first
  int ndim = 0;

  Rows() = default;
  explicit Rows(const TensorView& t) {
    if (!t.given()) return;
    data = t.data;
    last_stride = t.last_stride();
    for (int i = t.ndim - 2; i >= 0; --i) {
      if (t.shape[i] == 1) continue;
      if (ndim > 0 && t.stride[i] == shape[ndim - 1] * stride[ndim - 1]) {
        shape[ndim - 1] *= t.shape[i];
      } else {
        shape[ndim] = t.shape[i];
        stride[ndim++] = t.stride[i];
      }
    }
  }
  ROOFTILE_HD std::int64_t offset(std::int64_t row) const {
    std::int64_t at = 0;
    for (int i = 0; i + 1 < ndim; ++i) {
      at += row % shape[i] * stride[i];
      row /= shape[i];
    }
    return ndim > 0 ? at + row * stride[ndim - 1] : at;
  }
};

struct W4MatmulParams {
  Rows x, y, residual;              // [m, k], [m, outputs], [m, outputs]
  const void* bias = nullptr;       // [n] or null
  std::int64_t bias_stride = 0;
  bool y_in_pieces = false;         // y and residual: four neighbours of a row are 8 bytes, rows lie evenly
  bool x_in_pieces = false;         // x can be read 16 bytes at a time, its rows `x_stride` elements apart
  std::int64_t x_stride = 0;
  W4View w;
  int groups = 0;
  Activation activation = Activation::none;
  bool gated = false;               // the rows of W are [gate | up]: y = activation(gate) * up + residual
  std::int64_t outputs = 0;         // n, or n / 2 of a gated product
  std::int64_t gate_tiles = 0;      // half of a CTA's warps have gates, tile rows of W, the others their ups, so many further on; 0: no
  std::int64_t first_token = 0, tokens = 0;   // of this launch
  unsigned token_blocks = 0, row_blocks = 0, finish_blocks = 0;   // of this launch; finish: of a token
  int k = 0, group = 0;             // as in w, in 32 bits
  int span = 0, span_shift = 0;     // k that are scaled at once; log2 of it in 32 k
  int splits = 0, steps = 0, chunk_steps = 0;   // steps of 128 k: all, and of one split
  int cluster_shift = 0;            // log2 of the CTAs of a cluster: of stream.cuh the chunks of K, of tiles.cuh rows of W with the same tokens
  int x_rows = 0;                   // tokens a panel has room for
  int sums_at = 0;                  // of stream.cuh: where in shared memory the sums lie that are to be finished
  float* partial = nullptr;         // [split][token of this launch][n, padded to 16]; null: a CTA finishes its outputs itself

  // The tile row of a warp; none of W's, w4_tiles_n(n) or more, if the last CTA has no work for it.
  template <int warps>
  ROOFTILE_HD std::int64_t tile_row(std::int64_t row_block, int warp) const {
    if (gate_tiles == 0) return row_block * warps + warp;
    const std::int64_t gate = row_block * (warps / 2) + warp % (warps / 2);
    return gate < gate_tiles ? gate + (warp < warps / 2 ? 0 : gate_tiles) : 2 * gate_tiles;
  }
};

using W4Kernel = void (*)(W4MatmulParams);
// inst/half.cu, inst/bf16.cu. span: k that are scaled at once.
W4Kernel w4a16_stream_half(int form, int span, W4Zeros);
W4Kernel w4a16_stream_bf16(int form, int span, W4Zeros);

// The kernel for more tokens.
struct W4TilesParams {
  W4MatmulParams product;
  CUtensorMap x;       // of this launch's tokens, or of their copy: boxes of tokens / cluster rows x 64 columns
  unsigned token_group = 1;   // blocks of tokens that meet all rows of W before the next ones do
  const float* sums = nullptr;   // of x / unit, with minima: [block of tokens][step][span][token of the block]
};
using W4TilesKernel = void (*)(W4TilesParams);
W4TilesKernel w4a16_tiles_half(int form, int span, W4Zeros);
W4TilesKernel w4a16_tiles_bf16(int form, int span, W4Zeros);

// What that kernel needs of x beforehand.
struct W4PrepareParams {
  W4MatmulParams product;
  std::uint16_t* copy = nullptr;   // of x: [token of this launch][K, padded to 8] in the order of the codes; null: none
  float* sums = nullptr;           // as in W4TilesParams; null: none
  bool row_in_shared = false;      // a row of x comes into (dynamic) shared memory before it is copied
  unsigned block_tokens = 0;       // of a CTA of tiles.cuh
  unsigned parts = 1;              // CTAs that share a token
};

}  // namespace rooftile::gpu
