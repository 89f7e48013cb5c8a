// SPDX-License-Identifier: Apache-2.0
// The work tiles of the streaming kernels.
#pragma once

#include "core/divisor.h"

namespace rooftile::gpu {

struct StreamWorkTile {
  int m_block, n_block, split;
};
// The work tile of CTA `cta`. CTAs run over m-blocks first, then n-blocks, then splits: neighbours read the same rows
// of W and other tokens.
__device__ __forceinline__ StreamWorkTile stream_work_tile(int cta, const Divisor& by_m_blocks,
                                                           const Divisor& by_n_blocks) {
  const int rest = divide(cta, by_m_blocks), split = divide(rest, by_n_blocks);
  return {cta - rest * by_m_blocks.value, rest - split * by_n_blocks.value, split};
}

}  // namespace rooftile::gpu
