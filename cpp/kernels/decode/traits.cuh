// SPDX-License-Identifier: Apache-2.0
// What follows from a config: how a step of tokens is distributed over the warps of a CTA, and the types of KV tiles.
#pragma once

#include "kernels/decode/code_tile.cuh"
#include "kernels/decode/element_tile.cuh"
#include "kernels/decode/kv_traits.cuh"
#include "kernels/decode/scheduler.h"
#include "tile/warps.cuh"

namespace rooftile::gpu {

// The CTA takes step_tokens tokens at a time, one KV tile for each group of warps_per_tile warps.
// Up to 8 packed rows: the warps of a KV tile share a softmax state and divide the output's channels among themselves.
// 16 packed rows (cta_softmax): all warps share one state, each has its own channels of the whole step.
template <class Config>
struct DecodeTraits {
  using T = typename Config::T;
  static constexpr KvFormat format = Config::format;
  static constexpr bool elements = is_element_format(format), kivi = is_kivi(format);
  static constexpr int D = Config::head_dim, stages = Config::stages, warps = Config::warps, threads = 32 * warps;
  static constexpr int smem_levels = Config::smem_levels;
  // The operands are swapped: packed query rows, FlashAttention's BLK_M, lie along the MMA's N.
  static constexpr int N = Config::n_tiles, block_m = N * mma_n;  // n-tiles of 8 packed rows; packed rows
  static constexpr bool cta_softmax = N > 1;
  // Both members of SharedStorage's union hold o of [n][8 packed rows][D]; the cluster's must not be the larger one.
  static constexpr bool clusters = !cta_softmax && smem_levels >= cluster_partials;

  static constexpr int warps_per_tile = Config::warps_per_tile, tile_threads = 32 * warps_per_tile;
  static constexpr int warps_kv = warps / warps_per_tile;  // KV tiles that the CTA computes at once
  static constexpr int tile_tokens = elements ? 16 : 32, step_tokens = warps_kv * tile_tokens;
  // Warps and KV tiles of one softmax state; MMA m-tiles of 16 channels of a warp.
  static constexpr int state_warps = cta_softmax ? warps : warps_per_tile, state_tiles = cta_softmax ? warps_kv : 1;
  static constexpr int C = D / state_warps / 16;

  using KvTile = std::conditional_t<elements, ElementTile<T, D>, CodeTile<format, D>>;
};

// A warp's place in its CTA.
template <class Traits>
struct WarpCoord {
  int lane;
  int warp_kv;      // the KV tile of a step whose copies and scores are this warp's
  int warp_d;       // the warp's part of the output's channels
  int tile_thread;  // index of this thread among the threads of its KV tile
  __device__ int warp() const { return Traits::cta_softmax ? warp_kv : warp_kv * Traits::warps_per_tile + warp_d; }
  __device__ WarpCoord()
      : lane(threadIdx.x % 32),
        warp_kv(Traits::cta_softmax ? threadIdx.x / 32 : tile::warp_uniform(threadIdx.x / Traits::tile_threads)),
        warp_d(Traits::cta_softmax ? threadIdx.x / 32 : threadIdx.x / 32 % Traits::warps_per_tile),
        tile_thread(Traits::cta_softmax ? lane : warp_d * 32 + lane) {}
};

}  // namespace rooftile::gpu
