// SPDX-License-Identifier: Apache-2.0
// The shared memory of split_kv.
#pragma once

#include "kernels/decode/cluster_reduction.cuh"
#include "kernels/decode/cta_softmax.cuh"
#include "kernels/decode/reduction.cuh"
#include "kernels/decode/traits.cuh"
#include "kernels/decode/warp_softmax.cuh"
#include "kernels/decode/work_range.cuh"

namespace rooftile::gpu {

template <class Traits>
using Softmax = std::conditional_t<Traits::cta_softmax, CtaSoftmax<Traits>, WarpSoftmax<Traits>>;

// Raw tokens of a kivi row: KV tiles of 16 tokens in 16 bits. K and V of a tile are its two halves.
//   WarpRing: the raw tiles of a warp take the stages that no code needs any more. A warp with two raw tiles copies
//     four halves: 0 and 1 are K and V of the first, 2 and 3 of the second. Up to 128 channels:
//       4 stages (4 bits, 64 channels)       halves 0 to 3 in stages
//       3 stages (4 bits; 8 bits, 64)        halves 0 to 2 in stages, half 3 in memory of its own
//     With 2 stages (8 bits), and where warps share a tile (above 128 channels), no warp copies two raw tiles.
//   CtaRing: raw_tiles raw tiles at once have their own memory; codes of 8 bits leave memory for one.
template <class Traits>
struct RawStorage {
  using Element = tile::MmaType<typename Traits::T>;
  static constexpr int half_size = 16 * Traits::D, raw_tiles = code_bits(Traits::format) == 8 ? 1 : 2;
  static constexpr bool takes_two_tiles =
      Traits::kivi && !Traits::cta_softmax && Traits::warps_per_tile == 1 && Traits::stages > 2;
  static constexpr int halves = !Traits::kivi         ? 0
                                : Traits::cta_softmax ? 2 * raw_tiles
                                                      : takes_two_tiles && Traits::stages < 4;
  alignas(128) Element half[halves > 0 ? halves : 1][halves > 0 ? half_size : 8];
};

template <class Traits>
struct SharedStorage {
  using Element = tile::MmaType<typename Traits::T>;
  using Layout = typename Softmax<Traits>::Layout;
  static constexpr int D = Traits::D;
  static constexpr bool cta_softmax = Traits::cta_softmax;
  // KV tiles in flight. WarpRing: (warp_kv, stage); CtaRing: (stage, warp_kv).
  typename Traits::KvTile ring[cta_softmax ? Traits::stages : Traits::warps_kv]
                              [cta_softmax ? Traits::warps_kv : Traits::stages];
  typename Softmax<Traits>::Storage softmax;
  union {
    ReductionStorage<Layout::rows, Layout::values, Traits::threads, Layout::row_sets, Traits::smem_levels> reduction;
    std::conditional_t<Traits::clusters, ClusterPartials<D>, char> cluster;  // partials of a cluster
  };
  WorkRange range;
  // The last tile range with an invalid page: the CTA's KV splits of one work tile, counted from 1. 0: none.
  int bad_tile_range;
  // kivi: queries stay until the work tile ends, because raw keys need them after the codes.
  alignas(16) Element raw_queries[Traits::kivi ? Traits::block_m * D : 8];
  RawStorage<Traits> raw;

  __device__ Element* queries() { return Traits::kivi ? raw_queries : softmax.queries(); }  // QueryLayout
  // Half a raw tile in a stage of the ring.
  __device__ Element* raw_half(int warp_kv, int stage) {
    static_assert(sizeof(ring[0][0]) >= 16 * D * sizeof(Element));
    return reinterpret_cast<Element*>(&ring[warp_kv][stage]);
  }
  __device__ TreeStorage* tree_storage() {  // one per warp
    static_assert(sizeof(ring) >= Traits::warps * sizeof(TreeStorage));
    return reinterpret_cast<TreeStorage*>(&ring);
  }
};

}  // namespace rooftile::gpu
