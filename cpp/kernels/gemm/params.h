// SPDX-License-Identifier: Apache-2.0
// What the kernels of products receive.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/divisor.h"
#include "core/hd.h"
#include "kernels/gemm/configs.h"
#include "kernels/gemm/rows.h"
#include "rooftile/gemm.h"

namespace rooftile::gpu {

// What every product y = activation(x W^T + bias) + residual has, whatever W's format.
struct GemmParams {
  Rows x, y, residual;         // [m, k], [m, outputs], [m, outputs]
  const void* bias = nullptr;  // [n] or null
  std::int64_t bias_stride = 0;
  std::int64_t n = 0, outputs = 0;  // rows of W; columns of y: n, or n / 2 in a gated product
  bool gated = false;               // the rows of W are [gate | up]: y = activation(gate) * up + residual
  bool y_vec4 = false;              // the epilogue takes vectors: y and residual have rows of 8-byte vectors
  Activation activation = Activation::none;
  std::int64_t first_token = 0, tokens = 0;  // tokens of this launch, from first_token of the call on
  int splits = 1;                            // splits of K
  float* partial = nullptr;  // fp32 [split][token of this launch][padded_n]: partial sums for split_k_epilogue, or null

  GemmParams() = default;
  GemmParams(const TensorView& x, const TensorView& y, const TensorView& bias, const TensorView& residual,
             Activation activation, bool gated = false)
      : x(x),
        y(y),
        residual(residual),
        n(gated ? 2 * y.last() : y.last()),
        outputs(y.last()),
        gated(gated),
        // Epilogue's vector path skips the gate where activation is none; such products go element by element
        y_vec4(is_aligned(y, 4) && is_aligned(residual, 4) && !(gated && activation == Activation::none)),
        activation(activation) {
    if (!bias.given()) return;
    this->bias = bias.data;
    bias_stride = bias.stride[0];
  }
  ROOFTILE_HD std::int64_t padded_n() const { return (n + 15) / 16 * 16; }
};

// ---- W in 16 bits -------------------------------------------------------------------------------

struct Bits16Params : GemmParams {
  const void* w = nullptr;
  std::int64_t w_stride = 0, w_last_stride = 0;  // elements between rows; between neighbouring k
  std::int64_t x_stride = 0;                     // elements between rows of x, where all rows have one stride
  std::int64_t k = 0;
  Divisor by_m_blocks{}, by_n_blocks{};  // CTAs along tokens, and along rows of W
  int row_tiles = 0, slices_log2 = 0;    // as in GemmPlan
  int steps = 0, split_steps = 0;        // k-steps of the kernel's own length: of all K, and of one split
};

// What tma_bits16.cuh receives.
struct TmaParams : Bits16Params {
  int rows = 0, stages = 0;      // rows of W of a CTA; stages of its ring
  int cluster_log2 = 0;          // log2 of the CTAs of a cluster, one for each split of K
  CUtensorMap w_map{}, x_map{};  // tiles of (rows, 64) of W [N, K] and of (BLK_N, 64) of x [M, K]
};

// ---- W in 4 or 8 bits ---------------------------------------------------------------------------

struct CodesParams : GemmParams {
  bool x_in_vec16 = false;    // x can be read in 16-byte vectors, its rows `x_stride` elements apart
  std::int64_t x_stride = 0;  // elements
  W4View w{};
  int groups = 0;                       // along K
  int tile_rows = 0, k_tiles = 0;       // W in tiles of 16 rows x 64 k: (tile_rows, k_tiles)
  int gate_tiles = 0;                   // tile rows from a gate to its up projection; 0: not gated, or N / 2 % 16 != 0
  unsigned m_blocks = 0, n_blocks = 0;  // of this launch
  Divisor by_m_blocks{}, by_n_blocks{};
  int k = 0, group = 0;                // as in w, in 32 bits
  int scale_k = 0, scale_k_shift = 0;  // k of a scale block within a step: 32 << scale_k_shift
  int steps = 0, split_steps = 0;      // steps of 128 k: of all K, and of one split
  int cluster = 1;                     // stream_codes.cuh: CTAs of a cluster, one for each K split; 1: none
  int cluster_shift = 0;               // wgmma_codes.cuh: log2 of the CTAs of a cluster, n-blocks
  int x_tile_tokens = 0;               // stream_codes.cuh: rows of a tile of x in shared memory
  int sums_offset = 0;                 // stream_codes.cuh: bytes to the sums that its epilogue reads from shared memory

  // The tile row of W of a consumer warp; `tile_rows` if the warp lies past the end of N. Warps 2 i and 2 i + 1 have
  // neighbouring tile rows. gate_tiles > 0: the first half of the warps have gate rows, the other half their up rows.
  template <int warps>
  ROOFTILE_HD int tile_row(unsigned n_block, int warp) const {
    constexpr int half = warps / 2;
    static_assert(half % 2 == 0);
    const bool gated = gate_tiles > 0, upper = warp >= half;
    const int row =
        static_cast<int>(n_block) * (gated ? half : warps) + warp % half + (upper ? gated ? gate_tiles : half : 0);
    return row < (gated && !upper ? gate_tiles : tile_rows) ? row : tile_rows;
  }
};

// What wgmma_codes.cuh receives.
struct WgmmaParams : CodesParams {
  CUtensorMap x_map{};   // this launch's tokens, or their gathered copy: TMA tiles of (tokens / cluster, 64 k)
  unsigned m_group = 1;  // m-blocks that meet all rows of W before the next ones do
  Divisor by_tiles{}, by_steps{};  // by_tiles: cluster work tiles of a split; by_steps: steps of a row of tiles
  // Stream-K. For each m-block, the steps of all rows of W are cut into work ranges, one a cluster.
  unsigned ranges = 0;       // 0: data-parallel or split-K
  unsigned range_steps = 0;  // of a work range; the first `longer_ranges` ranges have one more
  unsigned longer_ranges = 0;
  float* fixup_sums = nullptr;          // (CTA, BLK_N / 8, consumer threads, 4): accumulators for the next range
  std::uint64_t* semaphores = nullptr;  // (CTA): semaphore_value once the CTA's fix-up sums are written
  std::uint64_t semaphore_value = 0;    // unique per launch

  ROOFTILE_HD unsigned range_begin(unsigned range) const {
    return range * range_steps + (range < longer_ranges ? range : longer_ranges);
  }
};

// What gather_x.cuh receives.
struct GatherParams {
  CodesParams product;
  std::uint16_t* to = nullptr;  // (tokens of this launch, K padded to 8), columns in the order of the codes
  bool row_in_smem = false;     // gather from a copy of the row in (dynamic) shared memory
  unsigned ctas_per_token = 1;
};

// What expand.cuh receives: a chunk of W's rows.
struct ExpandParams {
  W4View w{};
  void* to = nullptr;               // (rows, k)
  std::int64_t first_tile_row = 0;  // of the chunk, in W
  unsigned tile_rows = 0;           // of the chunk
  unsigned k_tiles = 0;             // tiles of 64 k of a tile row
  int rows = 0, k = 0, groups = 0;  // groups: scale blocks of a row
  int group_shift = 0;              // log2 of the k-blocks of 32 in a scale block; 31: one for all of K
  Divisor by_steps;                 // steps of 128 k in a row
};

}  // namespace rooftile::gpu
