// SPDX-License-Identifier: Apache-2.0
// Decode attention over a KV cache, split along the sequence.
//   q, out [B, T, Hq, D]    cache: pages of K and V per KV head, one block-table row per sequence (or consecutive
//                           pages)
// A persistent grid covers the work units of scheduler.h, or a cluster of CTAs has one work tile. A CTA computes one
// work tile at a time, and its warps take the KV tiles in turn. Each warp keeps a softmax state of its own in
// registers. At the end of a KV split these states are merged through shared memory, and the split's partial goes into
// the reduction. A work tile that one CTA computed whole is written at once. Partials of the others are left to
// combine.cuh or, in a cluster, to cluster_reduction.cuh.
// One warp computes a KV tile; above 128 channels two warps, above 256 four. These warps read the same tile and share
// the output's channels: fewer registers per warp, and more warps for the same shared memory.
// The query heads of a KV head (times new tokens) are the packed rows, the N of the MMAs, so they share every byte of K
// and V.
//
// Bytes per KV head: S * (bytes of a token's K and V). Flops: 4 S D per packed row, for 8 rows whether used or not.
// 16-bit, D = 128: 512 bytes and 8 KFLOP a token: bound by bandwidth, the tensor cores take a third of the time.
// int4-kivi: 148 bytes a token, the same products, and 5 instructions for 8 codes: bound by the latencies that eight
// warps can hide.
//
// step_kv is split_kv with BLK_M = 16 and a CTA-wide softmax: for KV heads with more than 8 packed rows. What a CTA does
// with a work tile is this file's; how its warps compute KV splits is the mainloop's, of a warp (warp_mainloop.cuh) or of
// the CTA (cta_mainloop.cuh).
//
// Copies: cp.async into a ring of `stages` KV tiles that belongs to the warps of a tile. Codes are loaded to registers
// as they are and decoded there, 16-bit rows by ldmatrix.
// Sync: a KV tile's warps wait for its copies, compute it, and refill the stage. CTA barriers are only at the ends of
// KV splits and before the queries are read.
#pragma once

#include "kernels/decode/cluster_reduction.cuh"
#include "kernels/decode/cta_mainloop.cuh"
#include "kernels/decode/reduction.cuh"
#include "kernels/decode/warp_mainloop.cuh"
#include "kernels/decode/work_range.cuh"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {

template <class Config>
using Mainloop = std::conditional_t<(Config::n_tiles > 1), CtaMainloop<Config>, WarpMainloop<Config>>;

template <class Config>
struct SplitKvStorage {
  using Map = typename Mainloop<Config>::Map;
  static constexpr int threads = 32 * Config::warps;
  using Reduction = ReductionStorage<sizeof(Map::ThreadPartial::m) / sizeof(float), Map::S, threads, Map::row_sets,
                                     Config::smem_levels>;
  typename Mainloop<Config>::Storage mainloop;
  union {
    Reduction reduction;
    std::conditional_t<Config::clusters, ClusterPartials<Config::head_dim>, char> cluster;  // partials of a cluster
  };
  WorkRange range;
};

template <class Config>
class SplitKv {
  using T = typename Config::T;
  using Storage = SplitKvStorage<Config>;
  using Map = typename Storage::Map;
  using ThreadPartial = typename Map::ThreadPartial;
  static constexpr int D = Config::head_dim, threads = Storage::threads;
  static constexpr KvFormat format = Config::format;

 public:
  __device__ SplitKv(const DecodeParams& p, Storage& smem) : p(p), smem(smem), mainloop(p, smem.mainloop) {}

  __device__ void run() {
    const bool clustered = Config::clusters && tile::has_clusters && p.cluster_size > 1;
    {
      const WorkRange found = clustered ? cluster_work_range() : find_work_range<format>(p);
      if (!store_range(found, smem.range, smem.mainloop.bad_tile_range)) return;
    }
    for_each_tile_range<format>(p, smem.range, [&](const WorkTile& tile, const RowWork& w, int first, int last) {
      if (first < last || clustered)
        compute_tile_range({tile.b, tile.kv_head, tile.m_block * Config::n_tiles}, w, first, last,
                           smem.range.range_index, clustered);
    });
  }

 private:
  // The only work tile of this CTA's cluster. CTA 0 of the cluster reports faults and answers rows without visible
  // keys.
  __device__ WorkRange cluster_work_range() {
    const auto [tile_index, cta_rank] = tile::cluster_coord();
    WorkRange range = one_work_tile(p, tile_index, cta_rank, p.cluster_size, 0,
                                    [&](int b) { return row_work_of(p, format, b, read); });
    const RowWork& w = range.work;
    if (range.begin < range.end) {
      range.find_own_splits(threadIdx.x % 32);
      return range;
    }
    if (cta_rank > 0) return range;
    const int kv_head = divide(range.tile, p.by_m_blocks);
    if (w.fault == KvFault::none) {
      store({range.entry, kv_head, range.tile - kv_head * p.m_blocks}, w, no_keys());
    } else if (range.tile == 0 && threadIdx.x == 0) {
      *p.cache.fault = static_cast<int>(w.fault) + 16 * (w.fault == KvFault::row ? range.entry : w.row);
    }
    return range;
  }

  // Computes KV splits [first, last) of one work tile. In a cluster the range may be empty.
  __device__ void compute_tile_range(const WorkTile& tile, const RowWork& w, int first, int last, int range_index,
                                     bool clustered) {
    const int rows_used = p.q_per_kv * p.tokens - tile.m_block * mma_n;  // packed rows that are not padding
    const Map map;
    const bool has_row = map.has_row(rows_used);
    mainloop.begin_tile_range();
    // All threads have read the previous range's partials and weights, whose memory the queries may take, and
    // bad_tile_range.
    __syncthreads();
    PartialReduction reduction(
        smem.reduction,
        p.reduction_o + std::int64_t{work_range_index()} * (Storage::Reduction::gmem_levels * Map::S * threads),
        threadIdx.x, map.row_set(), first, last - first == 1 && w.splits > 1);
    int partial_index = range_index * partials_per_cta + (first > 0 ? 0 : partials_inside);
    const auto mark_fault = [&](float l) { return mainloop.saw_invalid_page() ? -1.0f : l; };
    const auto emit = [&](const ThreadPartial& partial) {
      const std::int64_t first_row = std::int64_t{partial_index++} * Map::rows;
      map.for_each_row(rows_used, [&](int k, int m_row) {
        const std::int64_t at = first_row + m_row;
        map.for_each_vec(partial.o, k, [&](int d, const typename Map::Vec& o) {
          *reinterpret_cast<typename Map::Vec*>(p.partial_o + at * D + d) = o;
        });
        if (map.writes_ml())
          *reinterpret_cast<float2*>(p.partial_ml + at * 2) = make_float2(partial.m[k], mark_fault(partial.l[k]));
      });
    };
    const auto add = [&](const ThreadPartial& partial, int split) {
      if (!has_row) return;
      if constexpr (Config::clusters)
        if (clustered) {
          ClusterPartials<D>* const to = tile::map_shared_rank(&smem.cluster, cta_of_row(p, map.m_row));
          const int at = cluster_partial(p, split, map.m_row);
          map.for_each_vec(partial.o, 0, [&](int d, const typename Map::Vec& o) {
            *reinterpret_cast<typename Map::Vec*>(to->o[at] + d) = o;
          });
          if (map.writes_ml()) to->ml[at] = make_float2(partial.m[0], mark_fault(partial.l[0]));
          return;
        }
      reduction.push(partial, split, emit);
    };
    if constexpr (Config::clusters)
      if (clustered) tile::wait_for_cluster();  // all CTAs of the cluster have started
    mainloop.compute_splits(tile, w, first, last, add);
    if constexpr (Config::clusters && tile::has_clusters)
      if (clustered) {
        reduce_cluster<T, D, threads>(p, tile, w, tile::cluster_coord().rank, smem.cluster,
                                      smem.mainloop.tree_storage());
        return;
      }
    if (!has_row) return;
    if (first > 0 || last < w.splits) {
      reduction.flush(emit);
      return;
    }
    const ThreadPartial result = reduction.result();
    if (!mainloop.saw_invalid_page()) store(tile, w, result);
  }

  // Stores the thread's channels of its packed rows: the result of a work tile.
  __device__ void store(const WorkTile& tile, const RowWork& w, const ThreadPartial& result) const {
    const Map map;
    map.for_each_row(p.q_per_kv * p.tokens - tile.m_block * mma_n, [&](int k, int m_row) {
      RowEpilogue<T> epilogue(p, tile, w, m_row);
      epilogue.finalize(result.m[k], result.l[k]);
      map.for_each_vec(result.o, k, [&](int d, const typename Map::Vec& o) { epilogue.store(d, o.x); });
      if (map.writes_ml()) epilogue.store_lse();
    });
  }
  __device__ static ThreadPartial no_keys() {
    ThreadPartial partial = {};
    for (float& m : partial.m) m = -INFINITY;
    return partial;
  }

  const DecodeParams& p;
  Storage& smem;
  Mainloop<Config> mainloop;
};

template <class Config>
__device__ __forceinline__ void run_split_kv(const DecodeParams& p) {
  extern __shared__ __align__(128) unsigned char bytes[];
  if constexpr (Config::clusters)
    if (tile::has_clusters && p.cluster_size > 1) tile::arrive_at_cluster();
  prefetch_lengths(p);
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();  // after the wait: combine relies on what this kernel waited for
  SplitKv<Config>(p, *reinterpret_cast<SplitKvStorage<Config>*>(bytes)).run();
}
template <class Config>
__global__ __launch_bounds__(32 * Config::warps,
                             Config::ctas_per_sm) void split_kv(const __grid_constant__ DecodeParams p) {
  run_split_kv<Config>(p);
}
// The same under the name of the configs with more than 8 packed rows.
template <class Config>
__global__ __launch_bounds__(32 * Config::warps,
                             Config::ctas_per_sm) void step_kv(const __grid_constant__ DecodeParams p) {
  run_split_kv<Config>(p);
}

}  // namespace rooftile::gpu
