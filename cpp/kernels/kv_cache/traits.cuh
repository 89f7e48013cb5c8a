// SPDX-License-Identifier: Apache-2.0
// What follows from the config of append: the cache's element type and format, and whether the call rotates.
#pragma once

#include "core/kv_layout.h"
#include "kernels/kv_cache/params.h"
#include "kernels/kv_cache/token.cuh"

namespace rooftile::gpu {

template <class T, KvFormat f, bool rotate>
struct AppendTraits {
  static constexpr int warps = append_warps, threads = 32 * warps;
  // RoPE and kivi's groups take registers: a CTA fewer an SM each.
  static constexpr int ctas_per_sm = 4 - (rotate ? 1 : 0) - (is_kivi(f) ? 1 : 0);
  // Rows of 32 Vec4s that a warp stages in shared memory: one head of a token, or a slice of a group.
  static constexpr int staged_rows = is_kivi(f) ? append_slice_tokens : max_head_dim / (4 * 32);

  struct SharedStorage {
    alignas(16) Vec4<T> staged[warps][staged_rows][32];  // (warp, staged row, lane)
  };
};

}  // namespace rooftile::gpu
