// SPDX-License-Identifier: Apache-2.0
// Reduces the partials that split_kv stored for work tiles that several CTAs share, and answers rows without visible
// keys.
//   partial_o [ctas, partials_per_cta, block_m, D], partial_ml [ctas, partials_per_cta, block_m, 2] -> out, lse
// One CTA per packed row of a work tile, or where most work tiles have no partials, one per work tile; one thread per
// channel. The CTA locates the work tile's partials by the arithmetic of scheduler.h, one thread per KV split, and
// reduces them by TreeReduction.
// Bytes: 4 (D + 2) per partial, at most 64 partials. Bound by latency: load the lengths, then the partials.
// Sync: the positions of the partials follow from the lengths, which were final before split_kv began (split_kv
// triggers this kernel only after its own wait). So the positions are computed while split_kv runs, and the partials
// are loaded after wait_for_previous_kernel. With more than 32 batch entries, split_kv computes the prefix sums of
// the cost, and everything comes after the wait.
#pragma once

#include "kernels/decode/epilogue.cuh"
#include "kernels/decode/work_range.cuh"
#include "kernels/decode/tree_reduction.cuh"
#include "tile/copy.cuh"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {

template <int D>
struct CombineStorage {
  TreeStorage tree[D / 32];  // one per warp
  // (split): index of (partial, packed row) in partial_ml, for the partial that starts at this split; -1: none starts
  // here. many_tiles: of packed row 0.
  int partial[max_splits];
};

// (m, l) and this thread's value of a packed row with at most N splits. row_offset: from the rows in smem.partial to
// it. Returns false if a partial is marked invalid; split_kv has set the fault word then.
template <int D, int N>
__device__ __forceinline__ bool reduce_partials(const DecodeParams& p, CombineStorage<D>& smem, int row_offset,
                                                float& m, float& l, float& value) {
  using Reduction = TreeReduction<N>;
  TreeStorage& tree = smem.tree[threadIdx.x / 32];
  Reduction reduction([&](int split) {
    const int partial = smem.partial[split];
    return partial < 0 ? make_float2(-INFINITY, 0.0f)
                       : tile::load_vec_at<float2>(p.partial_ml + std::int64_t{partial + row_offset} * 2);
  });
  float o[N];  // (split): this thread's channel
#pragma unroll
  for (int split = 0; split < N; ++split)
    o[split] =
        smem.partial[split] < 0 ? 0.0f : p.partial_o[std::int64_t{smem.partial[split] + row_offset} * D + threadIdx.x];
  if (!reduction.compute_factors(tree)) return false;
  m = reduction.m();
  l = reduction.l();
  value = Reduction::reduce(tree, o);
  return true;
}

// Before the wait, a line in L1 may be older than the launch.
__device__ __forceinline__ int load_l2(const std::int32_t* from) { return __ldcg(from); }

// The work of batch entry b, the cost before it, and that of the batch.
struct EntryWork {
  RowWork work;
  int cost_before = 0, total_cost = 0;
  bool uniform = false;  // all work tiles have the same length
};
// Computed by every warp; at most 32 batch entries.
__device__ __forceinline__ EntryWork count_work(const DecodeParams& p, int b) {
  const int lane = threadIdx.x % 32;
  RowWork w;
  if (lane < p.batch) w = row_work_of(p, p.cache.format, lane, load_l2);
  const int first_cost = __shfl_sync(0xffffffffu, w.work_tile_cost(), 0);
  EntryWork entry;
  entry.uniform = __all_sync(0xffffffffu, lane >= p.batch || w.work_tile_cost() == first_cost);
  if (entry.uniform) {
    entry.cost_before = b * p.tiles_per_entry * first_cost;
    entry.total_cost = p.batch * p.tiles_per_entry * first_cost;
  } else {
    w.add_overheads(p.cache.format);
    const int cost = w.work_tile_cost() * p.tiles_per_entry;
    entry.cost_before = __reduce_add_sync(0xffffffffu, lane < b ? cost : 0);
    entry.total_cost = __reduce_add_sync(0xffffffffu, cost);
  }
  entry.work = broadcast(w, b);
  return entry;
}

// many_tiles: a CTA has all packed rows of work tile blockIdx.x; else row blockIdx.y of it.
template <class T, int D, bool many_tiles>
__global__ __launch_bounds__(D) void combine(const __grid_constant__ DecodeParams p) {
  tile::let_next_kernel_start();  // this early: CTA 0 waits for split_kv, so who waits for combine waits for both
  __shared__ CombineStorage<D> smem;
  const int thread = threadIdx.x, tile_index = static_cast<int>(blockIdx.x);
  const int b = divide(tile_index, p.by_tiles_per_entry), tile_in_entry = tile_index - b * p.tiles_per_entry;
  const int kv_head = divide(tile_in_entry, p.by_m_blocks);
  const WorkTile tile{b, kv_head, (tile_in_entry - kv_head * p.m_blocks) * (p.block_m / mma_n)};

  const bool counts_here = p.batch <= 32;
  EntryWork entry;
  if (counts_here) {
    entry = count_work(p, b);
  } else {
    entry.work = row_work_of(p, p.cache.format, b, load_l2);
    tile::wait_for_previous_kernel();
    entry.cost_before = p.work_prefix[b];
    entry.total_cost = p.work_prefix[p.batch];
    entry.uniform = p.work_prefix[p.batch + 1] != 0;
    if (!entry.uniform) entry.work.add_overheads(p.cache.format);
  }
  const RowWork& w = entry.work;
  const int splits = w.splits, ctas_per_tile = ctas_per_tile_of(entry.uniform, w.work_tile_cost(), p.ctas_per_tile);
  int m_row = static_cast<int>(blockIdx.y);
  RowEpilogue<T> epilogue(p, tile, w, m_row);
  const auto next_row = [&] {  // false: the CTA has no other
    if (!many_tiles || ++m_row >= min(p.rows_used, p.q_per_kv * p.tokens - tile.first_n_tile * mma_n)) return false;
    epilogue = RowEpilogue<T>(p, tile, w, m_row);
    __syncwarp();  // the previous row's factors have been read
    return true;
  };
  const auto store = [&](float m, float l, float value) {
    const float o[1] = {value};
    epilogue.finalize(m, l);
    epilogue.store(thread, o);
    if (thread == 0) epilogue.store_lse();
  };
  // The range of splits [at, end), owned by one CTA, that holds this thread's split.
  const int split = min(thread, splits - 1);
  int range_index = 0, at = 0, end = splits;
  if (splits > 0 && ctas_per_tile) {
    const int cta_in_tile = w.cta_of_split(split, ctas_per_tile);
    range_index = tile_index * ctas_per_tile + cta_in_tile;
    at = w.first_split_of_cta(cta_in_tile, ctas_per_tile);
    end = w.first_split_of_cta(cta_in_tile + 1, ctas_per_tile);
  } else if (splits > 0) {
    const WorkPartition partition(entry.total_cost, p.ctas, entry.uniform);
    const int base = entry.cost_before + tile_in_entry * w.work_tile_cost();
    range_index = partition.owner(base + w.split_begin(split));
    at = w.first_split_from(partition.begin(range_index) - base);
    end = w.first_split_from(partition.begin(range_index + 1) - base);
  }
  if (at == 0 && end == splits) {  // one CTA has written the result, or the row has no splits
    if (splits == 0 && w.fault == KvFault::none) {
      do { store(-INFINITY, 0.0f, 0.0f); } while (next_row());
    }
    if (counts_here && blockIdx.x == 0) tile::wait_for_previous_kernel();
    return;
  }
  if (thread < max_splits) {
    // Steps through the owner CTA's partials, each 2^partial_level splits, to the one that starts at `split`.
    int index = range_index * partials_per_cta + (at > 0 ? 0 : partials_inside);
    for (; at < split; ++index) at += 1 << partial_level(at, end);
    smem.partial[thread] = thread < splits && at == split ? index * p.block_m + (many_tiles ? 0 : m_row) : -1;
  }
  __syncthreads();  // the indices of the partials are in shared memory
  if (counts_here) tile::wait_for_previous_kernel();

  do {
    float m, l, value;
    constexpr int short_row = 16, medium_row = 32;  // KV splits: a smaller tree is faster
    const int row_offset = many_tiles ? m_row : 0;
    const bool valid = splits <= short_row    ? reduce_partials<D, short_row>(p, smem, row_offset, m, l, value)
                       : splits <= medium_row ? reduce_partials<D, medium_row>(p, smem, row_offset, m, l, value)
                                              : reduce_partials<D, max_splits>(p, smem, row_offset, m, l, value);
    if (valid) store(m, l, value);
  } while (next_row());
}

}  // namespace rooftile::gpu
