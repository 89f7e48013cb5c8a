// SPDX-License-Identifier: Apache-2.0
// Decode attention over a KV cache, split along the sequence.
//   q, out [B, T, Hq, D]    cache: pages of K and V per KV head, one block-table row per sequence (or consecutive
//                           pages)
// A persistent grid covers the work tiles by their cost (scheduler.h), or a cluster of CTAs has one work tile. A CTA
// computes one work tile at a time. The query heads of a KV head (times new tokens) are the packed rows, the N of the
// MMAs, so they share every byte of K and V. A work tile that one CTA computed whole is written at once. Partials of
// the others are left to combine.cuh or, in a cluster, to cluster_reduction.cuh.
//
// Up to 8 packed rows: the warps take the KV tiles in turn, each with a softmax state of its own in registers
// (warp_softmax.cuh). At the end of a KV split these states are merged through shared memory, and the split's partial
// goes into the reduction. One warp computes a KV tile; above 128 channels two warps, above 256 four. These warps read
// the same tile and share the output's channels: fewer registers per warp, and more warps for the same shared memory.
// 16 packed rows: the CTA takes one step of tokens after another, one KV tile for each warp, and has one softmax state
// (cta_softmax.cuh). Every byte is read and decoded once for two n-tiles.
//
// Per token and KV head: the bytes of its K and V, and 4 D flops for each packed row of the MMAs, used or not.
// 16-bit, D = 128, 8 rows: 512 bytes and 4 KFLOP a token: bound by bandwidth.
// int4-kivi: 148 bytes a token, the same products, and 5 instructions for 8 codes: bound by latency, since registers
// allow eight warps an SM, too few to hide it. 16 packed rows: bound by the dependency chain of a step, two barriers
// and two products.
//
// Copies: cp.async into a ring of KV tiles (kv_ring.cuh). Codes are loaded to registers as they are and decoded there,
// 16-bit rows by ldmatrix.
// Sync: a KV tile's warps wait for its copies, compute it, and refill the stage. With 8 packed rows CTA barriers are
// only at the ends of KV splits and before the queries are read; with 16 there are two in a step.
#pragma once

#include "kernels/decode/cluster_reduction.cuh"
#include "kernels/decode/epilogue.cuh"
#include "kernels/decode/mainloop.cuh"
#include "kernels/decode/reduction.cuh"
#include "kernels/decode/work_range.cuh"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {

template <class Config>
class SplitKv {
  using Traits = DecodeTraits<Config>;
  using T = typename Traits::T;
  using Layout = typename Softmax<Traits>::Layout;  // how a thread holds a partial
  using ThreadPartial = typename Layout::Type;
  using Reduction =
      PartialReduction<Layout::rows, Layout::values, Traits::threads, Layout::row_sets, Traits::smem_levels>;
  static constexpr int D = Traits::D, threads = Traits::threads;
  static constexpr KvFormat format = Traits::format;

 public:
  __device__ SplitKv(const DecodeParams& p, SharedStorage<Traits>& smem)
      : p_(p), smem_(smem), mainloop_(p, smem, at_) {}

  __device__ void run() {
    const bool clustered = Traits::clusters && tile::has_clusters && p_.cluster_size > 1;
    {
      const WorkRange found = clustered ? cluster_work_range() : find_work_range<format>(p_);
      if (!store_range(found, smem_.range, smem_.bad_tile_range)) return;
    }
    for_each_tile_range<format, Traits::N>(p_, smem_.range,
                                           [&](const WorkTile& tile, const RowWork& w, int first, int last) {
                                             if (first < last || clustered)
                                               compute_tile_range(tile, w, first, last, clustered);
                                           });
  }

 private:
  // The only work tile of this CTA's cluster. CTA 0 of the cluster reports faults and answers rows without visible
  // keys.
  __device__ WorkRange cluster_work_range() {
    const auto [tile_index, cta_rank] = tile::cluster_coord();
    WorkRange range = one_work_tile(p_, tile_index, cta_rank, p_.cluster_size, 0,
                                    [&](int b) { return row_work_of(p_, format, b, load_l1); });
    const RowWork& w = range.work;
    if (range.begin < range.end) {
      range.find_own_splits(threadIdx.x % 32);
      return range;
    }
    if (cta_rank > 0) return range;
    const int kv_head = divide(range.tile, p_.by_m_blocks);
    if (w.fault == KvFault::none) {
      ThreadPartial nothing{};
      for (float& m : nothing.m) m = -INFINITY;
      write_result(nothing, {range.entry, kv_head, (range.tile - kv_head * p_.m_blocks) * Traits::N}, w);
    } else if (range.tile == 0 && threadIdx.x == 0) {
      *p_.cache.fault = kv_fault_word(w.fault, w.fault == KvFault::row ? range.entry : w.row);
    }
    return range;
  }

  // Computes KV splits [first, last) of one work tile. In a cluster the range may be empty.
  __device__ void compute_tile_range(const WorkTile& tile, const RowWork& w, int first, int last, bool clustered) {
    const int rows_used = p_.q_per_kv * p_.tokens - tile.first_n_tile * mma_n;  // packed rows that are not padding
    ++this_tile_range_;
    // All threads have read the previous range's partials and weights, whose memory the queries may take, and
    // bad_tile_range.
    __syncthreads();
    constexpr int gmem_floats = decltype(smem_.reduction)::gmem_levels * Traits::block_m * D;
    const Layout layout;
    Reduction reduction(smem_.reduction, p_.reduction_o + std::int64_t{work_range_index()} * gmem_floats, threadIdx.x,
                        layout.row_set(), first, last - first == 1 && w.splits > 1);
    int partial_index = smem_.range.range_index * partials_per_cta + (first > 0 ? 0 : partials_inside);
    const auto emit = [&](const ThreadPartial& partial) {
      write_partial(p_, layout, partial, partial_index++, rows_used, saw_invalid_page());
    };
    // Warps without a packed row have nothing to merge or to write.
    const bool has_row = Traits::cta_softmax || mma_n / Traits::warps * at_.warp() < rows_used;
    if constexpr (Traits::clusters)
      if (clustered) tile::wait_for_cluster();  // all CTAs of the cluster have started
    mainloop_.run(tile, w, first, last, this_tile_range_, [&](int split, const ThreadPartial& partial) {
      if (!has_row) return;
      if constexpr (Traits::clusters)
        if (clustered) return send_partial(partial, split);
      reduction.push(partial, split, emit);
    });
    if constexpr (Traits::clusters && tile::has_clusters)
      if (clustered) {
        reduce_cluster<T, D, threads>(p_, tile, w, tile::cluster_coord().rank, smem_.cluster, smem_.tree_storage());
        return;
      }
    if (!has_row) return;
    if (first > 0 || last < w.splits) {
      reduction.flush(emit);
      return;
    }
    const ThreadPartial result = reduction.result();
    if (!saw_invalid_page()) write_result(result, tile, w);
  }
  __device__ bool saw_invalid_page() const { return smem_.bad_tile_range == this_tile_range_; }  // in this tile range

  // Writes the thread's part of a split's partial to the CTA of the cluster that the packed row belongs to.
  __device__ void send_partial(const ThreadPartial& partial, int split) const {
    const Layout layout;
    layout.for_each_row(mma_n, [&](int k, int m_row) {
      ClusterPartials<D>* const to = tile::map_shared_rank(&smem_.cluster, cta_of_row(p_, m_row));
      const int at = cluster_partial(p_, split, m_row);
      layout.for_each_vec(partial.o, k, [&](int d, const auto& o) { store_vec(to->o[at] + d, o); });
      if (layout.writes_ml()) to->ml[at] = make_float2(partial.m[k], saw_invalid_page() ? -1.0f : partial.l[k]);
    });
  }
  // Writes the thread's part of a work tile's result.
  __device__ void write_result(const ThreadPartial& result, const WorkTile& tile, const RowWork& w) const {
    const Layout layout;
    layout.for_each_row(p_.q_per_kv * p_.tokens - tile.first_n_tile * mma_n, [&](int k, int m_row) {
      RowEpilogue<T> epilogue(p_, tile, w, m_row);
      epilogue.finalize(result.m[k], result.l[k]);
      layout.for_each_vec(result.o, k, [&](int d, const auto& o) { epilogue.store(d, o); });
      if (layout.writes_ml()) epilogue.store_lse();
    });
  }

  const DecodeParams& p_;
  SharedStorage<Traits>& smem_;
  const WarpCoord<Traits> at_;
  int this_tile_range_ = 0;
  Mainloop<Config> mainloop_;
};

template <class Config>
__global__ __launch_bounds__(32 * Config::warps,
                             Config::ctas_per_sm) void split_kv(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) unsigned char bytes[];
  if constexpr (DecodeTraits<Config>::clusters)
    if (tile::has_clusters && p.cluster_size > 1) tile::arrive_at_cluster();
  prefetch_lengths(p);
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();  // after the wait: combine relies on what this kernel waited for
  SplitKv<Config>(p, *reinterpret_cast<SharedStorage<DecodeTraits<Config>>*>(bytes)).run();
}

}  // namespace rooftile::gpu
