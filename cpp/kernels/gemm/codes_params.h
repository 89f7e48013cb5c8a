// SPDX-License-Identifier: Apache-2.0
// What the kernels of a product with a weight of 4 or 8 bits receive.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/divisor.h"
#include "core/hd.h"
#include "kernels/gemm/params.h"
#include "kernels/gemm/codes_plan.h"
#include "rooftile/gemm.h"

namespace rooftile::gpu {

struct W4MatmulParams : Product {
  bool x_in_vec16 = false;    // x can be read in 16-byte vectors, its rows `x_stride` elements apart
  std::int64_t x_stride = 0;  // elements
  W4View w{};
  int groups = 0;                       // along K
  int tile_rows = 0, row_tiles = 0;     // W in tiles of 16 x 64: (tile_rows, row_tiles)
  int gate_tiles = 0;                   // tile rows from a gate to its up projection, both in one CTA; 0: not so
  unsigned m_blocks = 0, n_blocks = 0;  // of this launch
  Divisor by_m_blocks{}, by_n_blocks{};
  int k = 0, group = 0;                // as in w, in 32 bits
  int scale_k = 0, scale_k_shift = 0;  // k of a scale block within a step: 32 << scale_k_shift
  int steps = 0, split_steps = 0;      // steps of 128 k: of all K, and of one split
  int cluster_shift = 0;               // log2 of the CTAs of a cluster: K splits (stream.cuh), n-blocks (wgmma.cuh)
  int x_tile_tokens = 0;               // stream.cuh: rows of a tile of x in shared memory
  int sums_offset = 0;                 // stream.cuh: bytes to the sums that its epilogue reads from shared memory

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

using W4Kernel = void (*)(W4MatmulParams);
// A variant of stream.cuh. config: index into w4_stream_configs (w8_stream_configs).
struct W4StreamVariant {
  int config, scale_k;
  W4Zeros zeros;
  DType scale_dtype;
};
// Defined in inst/.
W4Kernel w4a16_stream_half(const W4StreamVariant&);
W4Kernel w4a16_stream_bf16(const W4StreamVariant&);
W4Kernel w8a16_stream_half(const W4StreamVariant&);
W4Kernel w8a16_stream_bf16(const W4StreamVariant&);

// What wgmma.cuh receives.
struct W4WgmmaParams {
  W4MatmulParams product;
  CUtensorMap x;               // this launch's tokens, or their gathered copy: TMA tiles of (tokens / cluster, 64 k)
  unsigned m_group = 1;        // m-blocks that meet all rows of W before the next ones do
  Divisor by_tiles, by_steps;  // by_tiles: cluster work tiles of a split; by_steps: steps of a row of tiles
  // Stream-K. For each m-block, the steps of all rows of W are cut into work ranges, one a cluster.
  unsigned ranges = 0;       // 0: data-parallel or split-K
  unsigned range_steps = 0;  // of a work range; the first `longer_ranges` ranges have one more
  unsigned longer_ranges = 0;
  float* fixup_sums = nullptr;          // (CTA, tokens / 2 / 4, consumer threads, 4): accumulators for the next range
  std::uint64_t* semaphores = nullptr;  // (CTA): semaphore_value once the CTA's fix-up sums are written
  std::uint64_t semaphore_value = 0;    // unique per launch

  ROOFTILE_HD unsigned range_begin(unsigned range) const {
    return range * range_steps + (range < longer_ranges ? range : longer_ranges);
  }
};
using W4WgmmaKernel = void (*)(W4WgmmaParams);
W4WgmmaKernel w4a16_wgmma_half(int config, W4Operand);
W4WgmmaKernel w4a16_wgmma_bf16(int config, W4Operand);
W4WgmmaKernel w8a16_wgmma_half(int config, W4Operand);
W4WgmmaKernel w8a16_wgmma_bf16(int config, W4Operand);

// What gather_x.cuh receives.
struct W4GatherParams {
  W4MatmulParams product;
  std::uint16_t* to = nullptr;  // (tokens of this launch, K padded to 8), columns in the order of the codes
  bool row_in_smem = false;     // gather from a copy of the row in (dynamic) shared memory
  unsigned ctas_per_token = 1;
};

// What expand.cuh receives: a chunk of W's rows.
struct W4ExpandParams {
  W4View w{};
  void* to = nullptr;               // (rows, k)
  std::int64_t first_tile_row = 0;  // of the chunk, in W
  unsigned tile_rows = 0;           // of the chunk
  unsigned row_tiles = 0;           // tiles of 64 k in a row
  int rows = 0, k = 0, groups = 0;  // groups: scale blocks of a row
  int group_shift = 0;              // log2 of the k-blocks of 32 in a scale block; 31: one for all of K
  Divisor by_steps;                 // steps of 128 k in a row
};

}  // namespace rooftile::gpu
