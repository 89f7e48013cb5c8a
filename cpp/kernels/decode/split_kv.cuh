// SPDX-License-Identifier: Apache-2.0
// Decode attention over a KV cache, split along the sequence.
//   q, out [B, T, Hq, D]    cache: pages of K and V per KV head, one block-table row per sequence (or consecutive pages)
// A persistent grid walks the units of schedule.h, or a cluster of blocks has one task. A block takes one task at a time, its
// teams take its tiles of tokens in turn; each warp keeps a softmax state of its own, in registers. At the end of a leaf these
// are merged through shared memory and the leaf goes into the fold. A task that one block computed whole is written at once,
// the others' nodes are left to combine.cuh or, of a cluster, to cluster.cuh.
// A team is a warp; of more than 128 channels two, which read the same tiles and own half of the output's channels each: half of
// the registers of one warp, and twice as many warps for the same memory.
// The query heads of a KV head (times new tokens) are the columns of the products, so they share every byte read.
//
// Bytes per KV head: S * (bytes of a token's K and V). Flops: 4 S D per column, on 8 columns whether used or not.
// 16-bit, D = 128: 512 bytes a token and 8 KFLOP: bandwidth is the roof, tensor cores take a third of the time. int4-kivi:
// 148 bytes a token, the same products and 5 instructions for 8 codes: what eight warps can hide of their latencies.
//
// Memory to operands: cp.async into a ring of the team's own, `stages` tiles deep; from there codes go to registers as
// they are and are decoded in them, 16-bit rows through ldmatrix. No barrier between teams but at leaf ends and before queries.
#pragma once

#include "kernels/decode/cluster.cuh"
#include "kernels/decode/fold.cuh"
#include "kernels/decode/tiles.cuh"
#include "tile/grid.cuh"
#include "tile/team.cuh"

namespace rooftile::gpu {

// What a team keeps in flight for itself: `stages` tiles of this type.
template <class T, int D>
struct ElementStage {
  alignas(128) T k[16 * D], v[16 * D];
};
template <class Config>
using StageOf = std::conditional_t<is_element_format(Config::format), ElementStage<typename Config::T, Config::head_dim>,
                                   CodeStage<Config::format, Config::head_dim>>;

__device__ __forceinline__ int read(const std::int32_t* from) { return *from; }

// What a block has to do: units, from the batch entry that holds the first, or its part of one task.
struct BlockRange {
  int begin, end;           // units; of one task its first
  int entry_base;           // first unit of that entry
  int entry;
  bool even;                // all tasks are as long
  RowWork work;             // of that entry
  int share = 0;            // where its nodes go
  int rank = 0, ranks = 0;  // of the blocks that have the task to themselves; 0: it has units
  int task = 0, first = 0, last = 0;   // in a cluster: the task of the entry, and the block's leaves of it
};

template <class Config>
struct DecodeShared {
  static constexpr int D = Config::head_dim, teams = Config::warps / Config::team, threads = 32 * Config::warps;
  StageOf<Config> ring[teams][Config::stages];
  alignas(16) float o[teams][columns][D + 4];       // the teams' states at the end of a leaf; padded against conflicts
  float m[teams][columns], l[teams][columns];
  FoldMemory<columns * D / threads, threads, columns, Config::near_levels> fold;
  BlockRange range;
  KeptLeaves kept;                                  // in a cluster
  int bad_segment;                                  // the last one that met a page that is none
  // Query columns that are needed until the task ends: raw keys meet them after codes.
  static constexpr bool needs_queries = is_kivi(Config::format);
  alignas(16) typename Config::T raw_queries[teams][needs_queries ? columns * D : 1];

  // A team's memory in other uses: query columns before its next state is written; 16-bit keys or values in a stage.
  __device__ typename Config::T* queries(int team) { return needs_queries ? raw_queries[team] : reinterpret_cast<typename Config::T*>(&o[team][0][0]); }
  __device__ typename Config::T* raw(int team, int stage) {
    static_assert(sizeof(ring[0][0]) >= 16 * D * sizeof(typename Config::T));
    return reinterpret_cast<typename Config::T*>(&ring[team][stage]);
  }
  __device__ TreeMemory* after_tiles() {   // one of each warp
    static_assert(sizeof(ring) >= Config::warps * sizeof(TreeMemory));
    return reinterpret_cast<TreeMemory*>(&ring);
  }
};

// Neighbouring shares go to one multiprocessor: where only every second has work, no two of these meet.
__device__ __forceinline__ int share_of_block() { return static_cast<int>(blockIdx.x * gridDim.y + blockIdx.y); }
// A part of one task, the batch's number `index`.
template <KvFormat format>
__device__ __forceinline__ BlockRange one_task(const DecodeParams& p, int index, int rank, int ranks, int share) {
  const int tasks = p.cache.kv_heads * p.passes, b = p.batch == 1 ? 0 : divide(index, tasks), in_row = index - b * tasks;
  if (b >= p.batch) return {};
  const RowWork w = row_work_of(p, format, b, read);
  const int units = w.task_units();
  return {in_row * units, in_row * units + (units > 0), 0, b, true, w, share, rank, ranks};
}
__device__ __forceinline__ RowWork broadcast(const RowWork& w, int lane) {
  const auto from = [lane](int x) { return __shfl_sync(0xffffffffu, x, lane); };
  return {from(w.row), from(w.length), from(w.count), from(w.begin), from(w.end), from(w.units), from(w.leaves), from(w.leaf_cost), from(w.raw) != 0,
          static_cast<KvFault>(from(static_cast<int>(w.fault)))};
}

__device__ __forceinline__ int warp_scan(int x, int lane) {   // inclusive
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int left = __shfl_up_sync(0xffffffffu, x, step);
    if (lane >= step) x += left;
  }
  return x;
}

// Every warp counts the units of all entries for itself, 32 entries at a time. Block 0 also leaves their prefix sums for
// the combine, and reports faults.
template <KvFormat format>
__device__ inline BlockRange find_range(const DecodeParams& p) {
  const int lane = threadIdx.x % 32, tasks = p.cache.kv_heads * p.passes, share = share_of_block();
  const bool reports = share == 0 && threadIdx.x < 32;
  const auto work_of = [&](int b) {
    const RowWork w = b < p.batch ? row_work_of(p, format, b, read) : RowWork{};
    if (reports && w.fault != KvFault::none) *p.cache.fault = static_cast<int>(w.fault) + 16 * (w.fault == KvFault::row ? b : w.row);
    return w;
  };
  const auto units_of = [tasks](const RowWork& w) { return w.task_units() * tasks; };
  RowWork own = work_of(lane);
  const int first_task = __shfl_sync(0xffffffffu, own.task_units(), 0);
  int sum = units_of(own);
  bool even = lane >= p.batch || own.task_units() == first_task;
  for (int b = lane + 32; b < p.batch; b += 32) {
    const RowWork w = work_of(b);
    sum += units_of(w);
    even &= w.task_units() == first_task;
  }
  even = __all_sync(0xffffffffu, even);
  if (const int ranks = ranks_of(even, first_task, std::int64_t{p.batch} * tasks, p.blocks)) {
    for (int i = lane; reports && i < p.batch + 2; i += 32) p.row_begin[i] = i == p.batch + 1 ? even : i * first_task * tasks;
    const int index = divide(share, ranks);
    return one_task<format>(p, index, share - index * ranks, ranks, share);
  }
  const auto weighed = [&](RowWork w) {
    if (!even) w.weigh(format);
    return w;
  };
  own = weighed(own);
  if (!even) {
    sum = units_of(own);
    for (int b = lane + 32; b < p.batch; b += 32) sum += units_of(weighed(row_work_of(p, format, b, read)));
  }
  const Split split(__reduce_add_sync(0xffffffffu, sum), p.blocks, even);
  BlockRange r{split.begin(share), split.begin(share + 1), 0, -1, even, {}, share};
  if (r.begin >= r.end && !reports) return r;
  int before = 0;
  for (int first = 0; first < p.batch && (r.entry < 0 || reports); first += 32) {
    if (first > 0) own = first + lane < p.batch ? weighed(row_work_of(p, format, first + lane, read)) : RowWork{};
    const int units = units_of(own), end = before + warp_scan(units, lane);
    if (reports && first + lane < p.batch) p.row_begin[first + lane] = end - units;
    const unsigned holds = __ballot_sync(0xffffffffu, end - units <= r.begin && r.begin < end);
    if (holds) {
      const int owner = first_bit(holds);
      r.entry = first + owner;
      r.entry_base = __shfl_sync(0xffffffffu, end - units, owner);
      r.work = broadcast(own, owner);
    }
    before = __shfl_sync(0xffffffffu, end, 31);
  }
  if (reports && lane == 0) {
    p.row_begin[p.batch] = split.total;
    p.row_begin[p.batch + 1] = even;
  }
  return r;
}

template <class Config>
class SplitKv {
  using T = typename Config::T;
  static constexpr int D = Config::head_dim, warps = Config::warps, threads = 32 * warps, column_threads = threads / columns;
  static constexpr int teams = warps / Config::team, lanes = 32 * Config::team, W = D / Config::team;   // of a team; channels of a warp
  static constexpr int S = D / column_threads, N = piece_values<D>, apart = N * column_threads;   // a thread's values of a column, in pieces
  static constexpr KvFormat format = Config::format;
  static constexpr bool elements = is_element_format(format);
  static constexpr int tile_tokens = elements ? 16 : 32;

 public:
  __device__ SplitKv(const DecodeParams& p, DecodeShared<Config>& shared)
      : p(p), shared(shared), lane(threadIdx.x % 32), team(threadIdx.x / lanes), part(threadIdx.x / 32 % Config::team), page_shift(first_bit(p.cache.page_size)) {}

  __device__ void run() {
    const bool clustered = Config::clusters && tile::has_clusters && p.cluster > 1;
    {
      const BlockRange found = clustered ? cluster_range() : find_range<format>(p);
      if (found.begin >= found.end) return;
      if (threadIdx.x == 0) {
        shared.range = found;
        shared.bad_segment = 0;
      }
    }
    __syncthreads();   // the range is there; before any warp finds a page that is none
    const BlockRange& range = shared.range;
    const int tasks = p.cache.kv_heads * p.passes;
    int base = range.entry_base;
    for (int b = range.entry; b < p.batch && base < range.end; ++b) {
      RowWork w = range.work;
      if (b != range.entry) {
        w = row_work_of(p, format, b, read);
        if (!range.even) w.weigh(format);
      }
      const int units = w.task_units();
      if (units == 0) continue;
      for (int task = clustered ? range.task : range.begin > base ? divide(range.begin - base, units) : 0; task < tasks; ++task) {
        const int task_base = base + task * units;
        if (task_base >= range.end) return;
        const int first = clustered ? range.first : range.ranks ? w.leaf_of_rank(range.rank, range.ranks) : w.leaf_from(range.begin - task_base);
        const int last = clustered      ? range.last
                         : range.ranks ? w.leaf_of_rank(range.rank + 1, range.ranks)
                                       : min(w.leaves, w.leaf_from(range.end - task_base));
        if (first < last || clustered) {
          const int kv_head = divide(task, p.passes);
          segment({b, kv_head, task - kv_head * p.passes}, w, first, last, range.share, clustered);
        }
      }
      base += units * tasks;
    }
  }

 private:
  __device__ void sync() const { tile::sync_team<Config::team>(team); }

  struct alignas(4 * N) Piece {
    float x[N];
  };

  // The one task of this block's cluster. A lane finds a leaf's owner, so that all of it takes one division. Its first block says
  // what is wrong, and answers rows that see nothing.
  __device__ BlockRange cluster_range() {
    const auto [index, rank] = tile::place_in_cluster();
    BlockRange range = one_task<format>(p, index, rank, p.cluster, 0);
    const RowWork& w = range.work;
    const int tasks = p.cache.kv_heads * p.passes;
    range.task = index - range.entry * tasks;
    if (range.begin < range.end) {
      const int leaf = min(lane, w.leaves - 1), owner = w.rank_of_leaf(leaf, p.cluster);
      const auto leaves_of = [&](int ranks) { return __popc(__ballot_sync(0xffffffffu, lane < w.leaves && owner < ranks)); };
      range.first = leaves_of(rank);
      range.last = leaves_of(rank + 1);
      const unsigned same = __match_any_sync(0xffffffffu, owner);   // its first leaf is the lowest of these lanes
      if (threadIdx.x < cluster_leaves) find_leaf(shared.kept, shared.fold, threadIdx.x, owner, leaf - first_bit(same));
      return range;
    }
    if (rank > 0) return range;
    const int kv_head = divide(range.task, p.passes);
    if (w.fault == KvFault::none) {
      const float nothing[S] = {};
      const int column = threadIdx.x / column_threads, d0 = threadIdx.x % column_threads * N;
      write_result<T, N>(p, {range.entry, kv_head, range.task - kv_head * p.passes}, w, column, d0, apart, d0 == 0, -INFINITY, 0.0f, nothing);
    } else if (range.task == 0 && threadIdx.x == 0) {
      *p.cache.fault = static_cast<int>(w.fault) + 16 * (w.fault == KvFault::row ? range.entry : w.row);
    }
    return range;
  }

  // Leaves [first, last) of one task; of a cluster maybe none.
  __device__ void segment(const Task& task, const RowWork& w, int first, int last, int share, bool clustered) {
    const int column = threadIdx.x / column_threads, d0 = threadIdx.x % column_threads * N;
    const bool merges = task.pass * columns + columns / warps * (team * Config::team + part) < p.q_per_kv * p.tokens;   // the warp has a column that is no padding
    ++this_segment;
    __syncthreads();   // the last segment's states, where queries may go, have been read, and whether it met a page that is none
    Fold<S, threads, columns, Config::near_levels> fold(shared.fold, p.fold + std::int64_t{share_of_block()} * decltype(shared.fold)::deep * columns * D, threadIdx.x, column, first);
    int slot = share * slots_per_block + (first > 0 ? 0 : slots_inside);
    const auto with_fault = [&](float l) { return shared.bad_segment == this_segment ? -1.0f : l; };
    const auto emit = [&](const Node<S>& node) {
      const std::int64_t at = std::int64_t{slot++} * columns + column;
#pragma unroll
      for (int i = 0; i < S / N; ++i) *reinterpret_cast<Piece*>(p.node_o + at * D + d0 + i * apart) = *reinterpret_cast<const Piece*>(&node.o[i * N]);
      if (d0 == 0) *reinterpret_cast<float2*>(p.node_ml + at * 2) = make_float2(node.m, with_fault(node.l));
    };
    const auto add = [&](const Node<S>& node, int leaf) {
      if (!merges) return;
      if (Config::clusters && clustered) fold.keep(node, with_fault(node.l), leaf - first);
      else fold.push(node, leaf, emit);
    };
    state.reset();
    leaves(task, w, first, last, [&](int leaf, bool elements_now) {
      if (elements_now) add(merge_warps<false>(column, d0), leaf);
      else if constexpr (!elements) add(merge_warps<true>(column, d0), leaf);
    });
    if constexpr (Config::clusters && tile::has_clusters)
      if (clustered) {
        merge_cluster<T, D, threads>(p, task, w, tile::place_in_cluster().rank, first < last, shared.kept, shared.after_tiles());
        return;
      }
    if (!merges) return;
    if (first > 0 || last < w.leaves) {
      fold.flush(emit);
      return;
    }
    const Node<S> result = fold.finish();
    if (shared.bad_segment != this_segment) write_result<T, N>(p, task, w, column, d0, apart, d0 == 0, result.m, result.l, result.o);
  }

  // The teams' states become one node, and are reset. Codes: they hold values of codes. Each warp brings its values to
  // the common maximum while it writes them, so that the threads that merge only add.
  // Sync: m is read between the barriers, l and o behind the second; they are written again before the next call's first
  // barrier and behind it, where nobody reads them.
  template <bool Codes>
  __device__ Node<S> merge_warps(int column, int d0) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        state.l[j] += __shfl_xor_sync(0xffffffffu, state.l[j], step);
        if constexpr (Codes && has_min(format)) state.shift[j] += __shfl_xor_sync(0xffffffffu, state.shift[j], step);
      }
    if (g == 0 && part == 0) *reinterpret_cast<float2*>(&shared.m[team][2 * t]) = make_float2(state.m[0], state.m[1]);
    __syncthreads();   // all maxima are there
    Node<S> node;
    node.m = -INFINITY;
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int w = 0; w < teams; ++w) {
      const float2 m = *reinterpret_cast<const float2*>(&shared.m[w][2 * t]);
      top[0] = fmaxf(top[0], m.x);
      top[1] = fmaxf(top[1], m.y);
      node.m = fmaxf(node.m, shared.m[w][column]);
    }
    float weight[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) weight[j] = exp2f(state.m[j] - (top[j] == -INFINITY ? 0.0f : top[j]));
    if (g == 0 && part == 0) *reinterpret_cast<float2*>(&shared.l[team][2 * t]) = make_float2(state.l[0] * weight[0], state.l[1] * weight[1]);
    const typename WarpState<W, format>::template Values<T, Codes> values(state, weight);
#pragma unroll
    for (int i = 0; i < W / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) shared.o[team][2 * t + e % 2][part * W + 16 * i + 8 * (e / 2) + g] = values(state.o[i][e], e);
    state.reset();
    __syncthreads();   // all sums are there
    node.l = 0.0f;
#pragma unroll
    for (int i = 0; i < S; ++i) node.o[i] = 0.0f;
#pragma unroll
    for (int w = 0; w < teams; ++w) {
      node.l += shared.l[w][column];
#pragma unroll
      for (int i = 0; i < S / N; ++i) {
        const Piece o = *reinterpret_cast<const Piece*>(&shared.o[w][column][d0 + i * apart]);
#pragma unroll
        for (int j = 0; j < N; ++j) node.o[i * N + j] += o.x[j];
      }
    }
    return node;
  }

  // leaf_end(leaf, elements_now): the warps' states are whole; whether they hold sums of elements, or of codes.
  template <class LeafEnd>
  __device__ void leaves(const Task& task, const RowWork& w, int first, int last, const LeafEnd& leaf_end) {
    if (first >= last) return;
    copy_queries_async<T, D, lanes>(p, task, w, part * 32 + lane, shared.queries(team));
    cute::cp_async_fence();
    const Visible see = visible(p, task, w, lane, false);
    if constexpr (elements) element_tiles(task, w, see, first, last, leaf_end);
    else code_tiles(task, w, see, first, last, leaf_end);
  }

  // kv_page of core/kv_layout.h, its part of the row done once: the row's part of the block table, or null and the number of
  // its first page.
  struct RowPages {
    const std::int32_t* table;
    int first;
  };
  __device__ RowPages pages_of(const RowWork& w) const {
    return {p.cache.block_table ? p.cache.block_table + w.row * p.cache.table_stride : nullptr, w.row * p.cache.max_pages};
  }
  // The pages of a tile's first token and, where codes may cross a page, of its seventeenth. Looked up a tile ahead of their
  // use: the lookup is a read of global memory.
  struct Pages {
    int first, second;
  };
  __device__ Pages look_up(const RowPages& row, const RowWork& w, int token) const {
    const auto at = [&](int index) { return row.table ? row.table[index] : row.first + index; };
    const int index = token >> page_shift, first = at(index);
    const bool crosses = !elements && !is_kivi(format) && p.cache.page_size == 16 && token + 16 < w.end;
    return {first, crosses ? at(index + 1) : first};
  }
  // Whether both are pages; if the table must not name one, that is reported, and the row is left alone.
  __device__ bool are_pages(const RowWork& w, const Pages& at) const {
    const auto pages = static_cast<unsigned>(p.cache.pages);
    if (static_cast<unsigned>(at.first) < pages && static_cast<unsigned>(at.second) < pages) return true;
    *p.cache.fault = static_cast<int>(KvFault::page) + 16 * w.row;
    shared.bad_segment = this_segment;
    return false;
  }

  // The team's tiles of leaves [first, last): issue(stage, token, pages) starts a tile's copies, `stages - 1` tiles ahead
  // of compute(stage, token); both are left out for tiles behind the row's end. prepare() runs when the queries have come.
  // behind(stage) may start other copies into stages, one a call, that no tile needs any more: `stages - 1` times at least.
  template <class Issue, class Behind, class Prepare, class Compute, class LeafEnd>
  __device__ void pipeline(const RowWork& w, int first, int last, const Issue& issue, const Behind& behind, const Prepare& prepare,
                           const Compute& compute, const LeafEnd& leaf_end) {
    constexpr int stride = teams * tile_tokens;   // from a tile of this team to its next
    const int leaf_tokens = w.units * unit_tokens, stop = min(w.end, w.begin + last * leaf_tokens);
    const RowPages row = pages_of(w);
    const auto next_stage = [](int stage) { return stage + 1 < Config::stages ? stage + 1 : 0; };
    int token = w.begin + first * leaf_tokens + team * tile_tokens, ahead = token, filled = 0, used = 0;
    Pages pages{0, 0};
    if (ahead < stop) pages = look_up(row, w, ahead);
    const auto start = [&] {   // always one group of copies, maybe empty
      if (ahead < stop) {
        const Pages now = pages;
        if (ahead + stride < stop) pages = look_up(row, w, ahead + stride);
        if (are_pages(w, now)) issue(shared.ring[team][filled], ahead, now);
      } else {
        behind(filled);
      }
      cute::cp_async_fence();
      ahead += stride;
      filled = next_stage(filled);
    };
#pragma unroll
    for (int i = 0; i < Config::stages - 1; ++i) start();
    cute::cp_async_wait<Config::stages - 1>();
    sync();   // the queries have come, from all threads
    prepare();
    for (int leaf = first; leaf < last; ++leaf) {
      for (int left = leaf_tokens / stride; left > 0; --left) {
        sync();   // every thread has read the stage that is filled next
        start();
        cute::cp_async_wait<Config::stages - 1>();
        sync();   // this tile has come, from all threads
        if (token < w.end) compute(shared.ring[team][used], token);
        token += stride;
        used = next_stage(used);
      }
      leaf_end(leaf);
    }
    cute::cp_async_wait<0>();
  }

  // Scores -> logits in units of log2, or, under a soft cap, to multiples of the cap. unit: what the queries were divided by.
  __device__ float factor_of(float unit) const { return unit * (p.softcap != 0.0f ? p.scale / p.softcap : p.scale * tile::log2_e); }

  template <class LeafEnd>
  __device__ void element_tiles(const Task& task, const RowWork& w, const Visible& see, int first, int last, const LeafEnd& leaf_end) {
    const KvCacheView& c = p.cache;
    tile::FragmentB q[D / 16];
    const float factor[2] = {factor_of(1.0f), factor_of(1.0f)};
    const std::int64_t k_head = task.kv_head * c.k.head_stride, v_head = task.kv_head * c.v.head_stride;
    pipeline(w, first, last,
        [&](ElementStage<T, D>& stage, int token, const Pages& at) {
          const std::int64_t slot = token & (c.page_size - 1);
          const std::byte* k_rows = c.k.codes + at.first * c.k.page_stride + k_head + slot * c.k.token_stride;
          const std::byte* v_rows = c.v.codes + at.first * c.v.page_stride + v_head + slot * c.v.token_stride;
          const auto copy = [&](const auto& wanted) {
            copy_rows_async<T, D, lanes>(stage.k, part * 32 + lane, k_rows, c.k.token_stride, wanted);
            copy_rows_async<T, D, lanes>(stage.v, part * 32 + lane, v_rows, c.v.token_stride, wanted);
          };
          if (token >= see.outer_begin && token + 16 <= see.outer_end) copy([](int) { return true; });
          else copy([&](int i) { return token + i >= see.outer_begin && token + i < see.outer_end; });
        },
        [](int) {}, [&] { load_query_fragments<T, D>(shared.queries(team), lane, q); },
        [&](const ElementStage<T, D>& stage, int token) { element_tile(stage.k, stage.v, q, factor, see, token); },
        [&](int leaf) { leaf_end(leaf, true); });
  }

  __device__ void element_tile(const T* k, const T* v, const tile::FragmentB (&q)[D / 16], const float (&factor)[2],
                               const Visible& see, int token) {
    float s[1][4];
    scores16<T, D>(s, k, q, lane);
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][i] *= factor[i & 1];
    soft_cap(s, p.softcap);
    mask(s, see, token, lane);
    online_softmax(s, state);
    if (p.tokens == 1 || all_seen(see, token, 16)) values16<T, D>(state, s, v, lane, part);
    else values16_apart<T, D>(state, s, v, see, token, lane, part);
  }

  template <class LeafEnd>
  __device__ void code_tiles(const Task& task, const RowWork& w, const Visible& see, int first, int last, const LeafEnd& leaf_end) {
    using Stage = CodeStage<format, D>;
    const KvCacheView& c = p.cache;
    CodeQueries<format, D> q;
    float factor[2];
    const CodeSource<format, D> source(c, task.kv_head, part * 32 + lane);
    RawTile raw(p, task, w, team, last == w.leaves);
    pipeline(w, first, last,
        [&](Stage& stage, int token, const Pages& at) {
          stage.template copy_async<lanes>(source, at.first * c.k.page_stride, at.second * c.k.page_stride, token & (c.page_size - 1), part * 32 + lane);
        },
        [&](int stage) {
          if constexpr (is_kivi(format))
            if (raw.halves < 2) start_raw(raw, task, w, stage);
        },
        [&] {
          q.template load<T>(shared.queries(team), lane);
          factor[0] = factor_of(q.unit[0]);
          factor[1] = factor_of(q.unit[1]);
        },
        [&](const Stage& stage, int token) {
          TokenScales<format> scales;
          scales.template load<T>(state, stage, see, token, lane);
          float s[2][4];
          code_scores<T, format, D>(s, stage, q, factor, lane);
          soft_cap(s, p.softcap);
          mask(s, see, token, lane);
          online_softmax(s, state);
          code_values<T, format, D>(state, s, stage, scales, see, token, lane, part);
        },
        [&](int leaf) {
          if constexpr (is_kivi(format))
            if (raw.there && leaf + 1 == w.leaves) {
              raw_tiles(raw, task, w);
              leaf_end(leaf, true);
              return;
            }
          leaf_end(leaf, false);
        });
  }

  // The raw tokens of a kivi row, 64 at most, are tiles of 16 at the end of its last leaf: of the teams in turn, from the one
  // whose turn it would be to take one more tile of codes.
  struct RawTile {
    bool there;         // the run ends with raw tokens
    int token;          // first of the team's own tile
    int halves = 0;     // of it that have been started: its keys, its values
    int k_stage = 0, v_stage = 0;
    __device__ RawTile(const DecodeParams& p, const Task& task, const RowWork& w, int team, bool ends) : there(is_kivi(format) && ends && w.raw) {
      const int tiles = (w.end - w.begin) / tile_tokens;
      token = (max(w.length - w.count, 0) & ~(kv_group - 1)) + (team - tiles & teams - 1) * 16;
      if (!there || token >= w.length) halves = 2;
    }
  };
  __device__ void start_raw(RawTile& raw, const Task& task, const RowWork& w, int stage) const {
    const KvCacheView& c = p.cache;
    const Visible see = visible(p, task, w, lane, true);
    const std::int64_t row = ((std::int64_t{w.row} * c.kv_heads + task.kv_head) * c.ring_size + raw.token % c.ring_size) * (D * sizeof(T));
    copy_rows_async<T, D, lanes>(shared.raw(team, stage), part * 32 + lane, (raw.halves == 0 ? c.ring_k : c.ring_v) + row, D * sizeof(T),
                          [&](int i) { return raw.token + i >= see.outer_begin && raw.token + i < see.outer_end; });
    (raw.halves == 0 ? raw.k_stage : raw.v_stage) = stage;
    ++raw.halves;
  }
  __device__ void raw_tiles(RawTile& raw, const Task& task, const RowWork& w) {
    cute::cp_async_wait<0>();
    sync();   // its own has come, from all threads
    state.template become_elements<T>();
    if (raw.token >= w.length) return;
    tile::FragmentB q[D / 16];
    load_query_fragments<T, D>(shared.queries(team), lane, q);
    const float factor[2] = {factor_of(1.0f), factor_of(1.0f)};
    const Visible see = visible(p, task, w, lane, true);
    while (true) {
      element_tile(shared.raw(team, raw.k_stage), shared.raw(team, raw.v_stage), q, factor, see, raw.token);
      raw.token += 16 * teams;
      if (teams * 16 >= kv_ring || raw.token >= w.length) break;
      sync();   // it has been read
      raw.halves = 0;
      start_raw(raw, task, w, raw.k_stage);
      start_raw(raw, task, w, raw.v_stage);
      cute::cp_async_fence();
      cute::cp_async_wait<0>();
      sync();   // the next has come, from all threads
    }
  }

  const DecodeParams& p;
  DecodeShared<Config>& shared;
  const int lane, team, part, page_shift;   // part: which of its team's warps this one is
  int this_segment = 0;
  WarpState<W, format> state;
};

template <class Config>
__global__ __launch_bounds__(32 * Config::warps, Config::blocks_per_sm) void split_kv(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) unsigned char bytes[];
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();   // behind the wait: the combine counts on what this kernel found
  SplitKv<Config>(p, *reinterpret_cast<DecodeShared<Config>*>(bytes)).run();
}

}  // namespace rooftile::gpu
