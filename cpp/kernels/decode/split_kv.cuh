// SPDX-License-Identifier: Apache-2.0
// Decode attention over a KV cache, split along the sequence.
//   q, out [B, T, Hq, D]    cache: pages of K and V per KV head, one block-table row per sequence (or consecutive
//                           pages)
// A persistent grid walks the units of schedule.h, or a cluster of blocks has one task. A block takes one task at a
// time, its teams take its tiles of tokens in turn; each warp keeps a softmax state of its own, in registers. At the
// end of a leaf these are merged through shared memory and the leaf goes into the fold. A task that one block computed
// whole is written at once, the others' nodes are left to combine.cuh or, of a cluster, to cluster.cuh.
// A team is a warp; of more than 128 channels two, of more than 256 four, which read the same tiles and share the
// output's channels: fewer registers of each warp, and more warps for the same memory.
// The query heads of a KV head (times new tokens) are the columns of the products, so they share every byte read.
//
// Bytes per KV head: S * (bytes of a token's K and V). Flops: 4 S D per column, on 8 columns whether used or not.
// 16-bit, D = 128: 512 bytes a token and 8 KFLOP: bandwidth is the roof, tensor cores take a third of the time.
// int4-kivi: 148 bytes a token, the same products and 5 instructions for 8 codes: what eight warps can hide of their
// latencies.
//
// Memory to operands: cp.async into a ring of the team's own, `stages` tiles deep; from there codes go to registers as
// they are and are decoded in them, 16-bit rows through ldmatrix. No barrier between teams but at leaf ends and before
// queries.
#pragma once

#include "kernels/decode/cluster.cuh"
#include "kernels/decode/fold.cuh"
#include "kernels/decode/pages.cuh"
#include "kernels/decode/range.cuh"
#include "kernels/decode/warp_state.cuh"
#include "tile/grid.cuh"
#include "tile/team.cuh"

namespace rooftile::gpu {

template <class Config>
struct DecodeShared {
  static constexpr int D = Config::head_dim, teams = Config::warps / Config::team, threads = 32 * Config::warps;
  TileOf<Config> ring[teams][Config::stages];  // what a team keeps in flight for itself
  alignas(16) float o[teams][columns][D + 4];  // the teams' states at the end of a leaf; padded against conflicts
  float m[teams][columns], l[teams][columns];
  union {
    FoldMemory<1, columns * D / threads, threads, columns, Config::near_levels> fold;
    std::conditional_t<Config::clusters, ClusterStates<D>, char> states;  // in a cluster
  };
  BlockRange range;
  int bad_segment;  // the last one that met a page that is none
  // Query columns that are needed until the task ends: raw keys meet them after codes.
  static constexpr bool needs_queries = is_kivi(Config::format);
  alignas(16) typename Config::T raw_queries[needs_queries ? columns * D : 8];
  // A team that has two raw tiles has four halves of them.
  static constexpr bool pairs_raw = is_kivi(Config::format) && Config::team == 1;
  alignas(16) typename Config::T raw_half[pairs_raw && Config::stages < 4 ? 16 * D : 8];

  // Memory in other uses: query columns before the next states are written; 16-bit keys or values in a stage.
  __device__ typename Config::T* queries() {
    return needs_queries ? raw_queries : reinterpret_cast<typename Config::T*>(&o[0][0][0]);
  }
  __device__ typename Config::T* raw(int team, int stage) {
    static_assert(sizeof(ring[0][0]) >= 16 * D * sizeof(typename Config::T));
    return reinterpret_cast<typename Config::T*>(&ring[team][stage]);
  }
  __device__ TreeMemory* after_tiles() {  // one of each warp
    static_assert(sizeof(ring) >= Config::warps * sizeof(TreeMemory));
    return reinterpret_cast<TreeMemory*>(&ring);
  }
};

template <class Config>
class SplitKv {
  using T = typename Config::T;
  static constexpr int D = Config::head_dim, warps = Config::warps, threads = 32 * warps,
                       column_threads = threads / columns;
  static constexpr int teams = warps / Config::team, lanes = 32 * Config::team,
                       W = D / Config::team;  // of a team; channels of a warp
  static constexpr int S = D / column_threads, N = piece_values<D>,
                       apart = N * column_threads;  // a thread's values of a column, in pieces
  static constexpr KvFormat format = Config::format;
  static constexpr bool elements = is_element_format(format);
  static constexpr int tile_tokens = elements ? 16 : 32;

 public:
  __device__ SplitKv(const DecodeParams& p, DecodeShared<Config>& shared)
      : p(p),
        shared(shared),
        lane(threadIdx.x % 32),
        team(tile::uniform(threadIdx.x / lanes)),
        part(threadIdx.x / 32 % Config::team),
        page_shift(first_bit(p.cache.page_size)) {}

  __device__ void run() {
    const bool clustered = Config::clusters && tile::has_clusters && p.cluster > 1;
    {
      const BlockRange found = clustered ? cluster_range() : find_range<format>(p);
      if (!keep_range(found, shared.range, shared.bad_segment)) return;
    }
    each_segment<format>(p, shared.range, [&](const Task& task, const RowWork& w, int first, int last) {
      if (first < last || clustered) segment(task, w, first, last, shared.range.share, clustered);
    });
  }

 private:
  __device__ void sync() const { tile::sync_team<Config::team>(team); }

  struct alignas(4 * N) Piece {
    float x[N];
  };

  // The one task of this block's cluster. Its first block says what is wrong, and answers rows that see nothing.
  __device__ BlockRange cluster_range() {
    const auto [index, rank] = tile::place_in_cluster();
    BlockRange range = one_task(p, index, rank, p.cluster, 0, [&](int b) { return row_work_of(p, format, b, read); });
    const RowWork& w = range.work;
    if (range.begin < range.end) {
      range.own_leaves(lane);
      return range;
    }
    if (rank > 0) return range;
    const int kv_head = divide(range.task, p.by_passes);
    if (w.fault == KvFault::none) {
      ColumnResult<T> to(p, {range.entry, kv_head, range.task - kv_head * p.passes}, w, threadIdx.x / column_threads);
      to.finish(-INFINITY, 0.0f);
      write(to, {});
    } else if (range.task == 0 && threadIdx.x == 0) {
      *p.cache.fault = static_cast<int>(w.fault) + 16 * (w.fault == KvFault::row ? range.entry : w.row);
    }
    return range;
  }

  // Leaves [first, last) of one task; of a cluster maybe none.
  __device__ void segment(const Task& task, const RowWork& w, int first, int last, int share, bool clustered) {
    const int column = threadIdx.x / column_threads, d0 = threadIdx.x % column_threads * N;
    const bool merges = task.pass * columns + columns / warps * (team * Config::team + part) <
                        p.q_per_kv * p.tokens;  // the warp has a column that is no padding
    ++this_segment;
    // the last segment's states, where queries may go, have been read, and whether it met a page that is none
    __syncthreads();
    Fold<1, S, threads, columns, Config::near_levels> fold(
        shared.fold, p.fold + std::int64_t{share_of_block()} * decltype(shared.fold)::deep * columns * D, threadIdx.x,
        column, first, last - first == 1 && w.leaves > 1);
    int slot = share * slots_per_block + (first > 0 ? 0 : slots_inside);
    const auto with_fault = [&](float l) { return shared.bad_segment == this_segment ? -1.0f : l; };
    const auto emit = [&](const Node<1, S>& node) {
      const std::int64_t at = std::int64_t{slot++} * columns + column;
#pragma unroll
      for (int i = 0; i < S / N; ++i)
        *reinterpret_cast<Piece*>(p.node_o + at * D + d0 + i * apart) = *reinterpret_cast<const Piece*>(&node.o[i * N]);
      if (d0 == 0) *reinterpret_cast<float2*>(p.node_ml + at * 2) = make_float2(node.m[0], with_fault(node.l[0]));
    };
    const auto add = [&](const Node<1, S>& node, int leaf) {
      if (!merges) return;
      if constexpr (Config::clusters)
        if (clustered) {
          ClusterStates<D>* const to = tile::in_block(&shared.states, block_of_column(p, column));
          const int at = cluster_slot(p, leaf, column);
#pragma unroll
          for (int i = 0; i < S / N; ++i)
            *reinterpret_cast<Piece*>(to->o[at] + d0 + i * apart) = *reinterpret_cast<const Piece*>(&node.o[i * N]);
          if (d0 == 0) to->ml[at] = make_float2(node.m[0], with_fault(node.l[0]));
          return;
        }
      fold.push(node, leaf, emit);
    };
    if constexpr (Config::clusters)
      if (clustered) tile::wait_for_cluster();  // all its blocks have started
    state.reset();
    leaves(task, w, first, last, [&](int leaf, bool elements_now) {
      if (elements_now) add(merge_warps<false>(column, d0), leaf);
      else if constexpr (!elements) add(merge_warps<true>(column, d0), leaf);
    });
    if constexpr (Config::clusters && tile::has_clusters)
      if (clustered) {
        merge_cluster<T, D, threads>(p, task, w, tile::place_in_cluster().rank, shared.states, shared.after_tiles());
        return;
      }
    if (!merges) return;
    if (first > 0 || last < w.leaves) {
      fold.flush(emit);
      return;
    }
    const Node<1, S> result = fold.finish();
    if (shared.bad_segment == this_segment) return;
    ColumnResult<T> to(p, task, w, column);
    to.finish(result.m[0], result.l[0]);
    write(to, result.o);
  }
  // The thread's values of its column.
  __device__ void write(const ColumnResult<T>& to, const float (&o)[S]) const {
    const int d0 = threadIdx.x % column_threads * N;
#pragma unroll
    for (int i = 0; i < S / N; ++i) to.write(d0 + i * apart, reinterpret_cast<const Piece*>(&o[i * N])->x);
    if (d0 == 0) to.write_lse();
  }

  // The teams' states become one node, and are reset. Codes: they hold values of codes. Each warp brings its values to
  // the common maximum while it writes them, so that the threads that merge only add.
  // Sync: m is read between the barriers, l and o behind the second; they are written again before the next call's
  // first barrier and behind it, where nobody reads them.
  template <bool Codes>
  __device__ Node<1, S> merge_warps(int column, int d0) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        state.l[j] += __shfl_xor_sync(0xffffffffu, state.l[j], step);
        if constexpr (Codes && has_min(format)) state.shift[j] += __shfl_xor_sync(0xffffffffu, state.shift[j], step);
      }
    if (g == 0 && part == 0) *reinterpret_cast<float2*>(&shared.m[team][2 * t]) = make_float2(state.m[0], state.m[1]);
    __syncthreads();  // all maxima are there
    Node<1, S> node;
    node.m[0] = -INFINITY;
    float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int w = 0; w < teams; ++w) {
      const float2 m = *reinterpret_cast<const float2*>(&shared.m[w][2 * t]);
      top[0] = fmaxf(top[0], m.x);
      top[1] = fmaxf(top[1], m.y);
      node.m[0] = fmaxf(node.m[0], shared.m[w][column]);
    }
    float weight[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) weight[j] = exp2f(state.m[j] - (top[j] == -INFINITY ? 0.0f : top[j]));
    if (g == 0 && part == 0)
      *reinterpret_cast<float2*>(&shared.l[team][2 * t]) = make_float2(state.l[0] * weight[0], state.l[1] * weight[1]);
    const auto write = [&](const auto& values) {
#pragma unroll
      for (int i = 0; i < W / 16; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          shared.o[team][2 * t + e % 2][part * W + 16 * i + 8 * (e / 2) + g] = values(state.o[i][e], e);
    };
    if constexpr (Codes) write(state.template code_values<T>(weight));
    else write([&](float o, int e) { return o * weight[e % 2]; });
    state.reset();
    __syncthreads();  // all sums are there
    node.l[0] = 0.0f;
#pragma unroll
    for (int i = 0; i < S; ++i) node.o[i] = 0.0f;
#pragma unroll
    for (int w = 0; w < teams; ++w) {
      node.l[0] += shared.l[w][column];
#pragma unroll
      for (int i = 0; i < S / N; ++i) {
        const Piece o = *reinterpret_cast<const Piece*>(&shared.o[w][column][d0 + i * apart]);
#pragma unroll
        for (int j = 0; j < N; ++j) node.o[i * N + j] += o.x[j];
      }
    }
    return node;
  }

  __device__ void copy_queries(const Task& task, const RowWork& w) {
    copy_queries_async<T, D, 1, threads>(p, task, w, threadIdx.x, shared.queries());
  }

  // leaf_end(leaf, elements_now): the warps' states are whole; whether they hold sums of elements, or of codes.
  template <class LeafEnd>
  __device__ void leaves(const Task& task, const RowWork& w, int first, int last, const LeafEnd& leaf_end) {
    if (first >= last) return;
    const Visible see = visible(p, task, w, lane, false);
    if constexpr (elements) element_tiles(task, w, see, first, last, leaf_end);
    else code_tiles(task, w, see, first, last, leaf_end);
  }

  // The team's tiles of leaves [first, last): issue(stage, token, pages) starts a tile's copies, compute(stage, token)
  // comes when they are there; both are left out for tiles behind the row's end. A stage is filled again when its tile
  // has been read. queries() starts their copies behind the first tile's, prepare() runs when they have come.
  // behind(stage) may start other copies into stages, one a call, that no tile needs any more: `stages` times at least.
  template <class Issue, class Behind, class Queries, class Prepare, class Compute, class LeafEnd>
  __device__ void pipeline(const RowWork& w, int first, int last, const Issue& issue, const Behind& behind,
                           const Queries& queries, const Prepare& prepare, const Compute& compute,
                           const LeafEnd& leaf_end) {
    constexpr int stride = teams * tile_tokens;  // from a tile of this team to its next
    const int leaf_tokens = w.units * unit_tokens, stop = min(w.end, w.begin + last * leaf_tokens);
    const RowPages<format> row(p.cache, w, page_shift);
    const auto next_stage = [](int stage) { return stage + 1 < Config::stages ? stage + 1 : 0; };
    int token = w.begin + first * leaf_tokens + team * tile_tokens, ahead = token, used = 0;
    Pages pages{0, 0};
    if (ahead < stop) pages = row.look_up(ahead);
    const auto fill = [&](int stage) {  // always one group of copies, maybe empty
      if (ahead < stop) {
        Pages now = pages;
        asm volatile(""
                     : "+r"(now.first), "+r"(now.second));  // moved before the next are on their way, not behind them
        pages = row.template look_up<true>(min(ahead + stride, stop - 1));  // behind the last tile the last one's again
        if (row.are_pages(now)) issue(shared.ring[team][stage], ahead, now);
        else shared.bad_segment = this_segment;  // the row is left alone
      } else {
        behind(stage);
      }
      cute::cp_async_fence();
      ahead += stride;
    };
#pragma unroll 1
    for (int stage = 0; stage < Config::stages; ++stage) {
      fill(stage);
      if (stage > 0) continue;
      queries();
      cute::cp_async_fence();
    }
    cute::cp_async_wait<Config::stages - 1>();
    __syncthreads();  // the queries have come, from all threads
    if (token < stop) prepare();
    for (int leaf = first; leaf < last; ++leaf) {
      for (int left = leaf_tokens / stride; left > 0; --left) {
        cute::cp_async_wait<Config::stages - 1>();
        sync();  // this tile has come, from all threads
        if (token < w.end) compute(shared.ring[team][used], token);
        sync();  // every thread has read it
        fill(used);
        token += stride;
        used = next_stage(used);
      }
      leaf_end(leaf);
    }
    cute::cp_async_wait<0>();
  }

  template <class LeafEnd>
  __device__ void element_tiles(const Task& task, const RowWork& w, const Visible& see, int first, int last,
                                const LeafEnd& leaf_end) {
    const KvCacheView& c = p.cache;
    tile::FragmentB q[1][D / 16];
    const float factor[2] = {factor_of(p, 1.0f), factor_of(p, 1.0f)};
    const std::int64_t k_head = task.kv_head * c.k.head_stride, v_head = task.kv_head * c.v.head_stride;
    pipeline(
        w, first, last,
        [&](ElementTile<T, D>& stage, int token, const Pages& at) {
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
        [](int) {}, [&] { copy_queries(task, w); }, [&] { load_query_fragments<T, D>(shared.queries(), lane, q[0]); },
        [&](const ElementTile<T, D>& stage, int token) { element_tile(stage.k, stage.v, q, factor, see, token); },
        [&](int leaf) { leaf_end(leaf, true); });
  }

  __device__ void element_tile(const T* k, const T* v, const tile::FragmentB (&q)[1][D / 16], const float (&factor)[2],
                               const Visible& see, int token) {
    float of_all[1][1][4];
    scores16<T, D>(of_all, k, q, lane);
    float (&s)[1][4] = of_all[0];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[0][i] *= factor[i & 1];
    soft_cap(s, p.softcap);
    mask(s, see, token, lane);
    online_softmax(s, state);
    if (p.tokens == 1 || all_seen(see, token, 16)) add_values16<T, D>(state, s[0], v, lane, part);
    else add_values16_apart<T, D>(state, s[0], v, see, token, lane, part);
  }

  template <class LeafEnd>
  __device__ void code_tiles(const Task& task, const RowWork& w, const Visible& see, int first, int last,
                             const LeafEnd& leaf_end) {
    using Stage = CodeStage<format, D>;
    const KvCacheView& c = p.cache;
    CodeQueries<format, D> q[1];
    float factor[1][2];
    CodeSource<format, D> source(c, task.kv_head, part * 32 + lane);
    source.keep(part * 32 + lane);
    RawTile raw(p, task, w, team, lane, last == w.leaves);
    int plain_end = p.softcap == 0.0f ? see.inner_end : 0;  // the logits of tiles up to there stay as they are
    asm("" : "+r"(plain_end));                              // kept, not found again for every tile
    pipeline(
        w, first, last,
        [&](Stage& stage, int token, const Pages& at) {
          const std::int64_t first = at.first * c.k.page_stride, second = at.second * c.k.page_stride;
          stage.template copy_keys_async<lanes, true>(source, first, second, token & (c.page_size - 1),
                                                      part * 32 + lane);
          stage.template copy_values_async<lanes>(source, first, second, token & (c.page_size - 1), part * 32 + lane);
        },
        [&](int stage) {
          if constexpr (is_kivi(format))
            if (raw.started < raw.halves) start_raw(raw, task, w, stage);
        },
        [&] {
          copy_queries(task, w);
          if constexpr (is_kivi(format))
            if (raw.halves > Config::stages) copy_raw(raw, task, w, 3);
        },
        [&] {
          q[0].template load<T>(shared.queries(), lane);
          factor[0][0] = factor_of(p, q[0].unit[0]);
          factor[0][1] = factor_of(p, q[0].unit[1]);
        },
        [&](const Stage& stage, int token) {
          TokenScales<format> scales;
          scales.template load<T>(stage, see, token, lane);
          float of_all[1][2][4];
          code_scores<T, format, D>(of_all, stage, q, factor, lane);
          scales.spread(lane);
          float (&s)[2][4] = of_all[0];
          if (token >= see.inner_begin &&
              token + 32 <= plain_end) {  // from here on two copies: weights and values are one run of instructions
            add_code_values<true>(state, s, stage, scales, see, token, lane, part);
          } else {
            soft_cap(s, p.softcap);
            mask(s, see, token, lane);
            add_code_values<false>(state, s, stage, scales, see, token, lane, part);
          }
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

  // The raw tokens of a kivi row, 64 at most, are tiles of 16 at the end of its last leaf: of the teams in turn, from
  // the one whose turn it would be to take one more tile of codes. That one takes two at once where it has a tile of
  // codes less than others.
  struct RawTile {
    bool there;              // the run ends with raw tokens
    int first = 0;           // of them all
    int token = 0;           // of the team's own tiles the first
    int halves = 0;          // of them: keys, values, and of a second one
    int started = 0;         // of those, in stages, one after another
    int stage = 0;           // of the first
    int begin = 0, end = 0;  // what some column sees of the row's raw tokens
    __device__ RawTile(const DecodeParams& p, const Task& task, const RowWork& w, int team, int lane, bool ends)
        : there(is_kivi(format) && ends && w.raw) {
      if (!there) return;
      const Visible see = visible(p, task, w, lane, true);
      begin = see.outer_begin;
      end = see.outer_end;
      first = max(w.length - w.count, 0) & ~(kv_group - 1);
      const int tiles = (w.end - w.begin) / tile_tokens, turn = team - tiles & teams - 1;
      const bool pairs = DecodeShared<Config>::pairs_raw && (tiles & teams - 1) != 0 && w.length - first > 16 &&
                         w.length - first <= 32;
      token = first + turn * 16;
      if (token < w.length) halves = !pairs ? 2 : turn == 0 ? 4 : 0;
    }
  };
  __device__ T* raw_half(const RawTile& raw, int half) const {
    return DecodeShared<Config>::pairs_raw && half >= Config::stages
               ? shared.raw_half
               : shared.raw(team, (raw.stage + half) % Config::stages);
  }
  __device__ void copy_raw(const RawTile& raw, const Task& task, const RowWork& w, int half) const {
    const int token = raw.token + half / 2 * 16;
    copy_rows_async<T, D, lanes>(
        raw_half(raw, half), part * 32 + lane,
        (half % 2 == 0 ? p.cache.ring_k : p.cache.ring_v) + ring_offset<T, D>(p, task, w, token), D * sizeof(T),
        [from = raw.begin - token, to = raw.end - token](int i) { return i >= from && i < to; });
  }
  __device__ void start_raw(RawTile& raw, const Task& task, const RowWork& w, int stage) const {
    if (raw.started == 0) raw.stage = stage;
    if (raw.started < Config::stages) copy_raw(raw, task, w, raw.started);
    ++raw.started;
  }
  __device__ void raw_tiles(RawTile& raw, const Task& task, const RowWork& w) {
    cute::cp_async_wait<0>();
    sync();  // its own has come, from all threads
    state.template become_elements<T>();
    if (teams * 16 >= kv_ring && raw.halves == 0) return;
    tile::FragmentB q[1][D / 16];
    load_query_fragments<T, D>(shared.queries(), lane, q[0]);
    const float factor[2] = {factor_of(p, 1.0f), factor_of(p, 1.0f)};
    const Visible see = visible(p, task, w, lane, true);
#pragma unroll 1
    for (int first = raw.first;;) {
#pragma unroll 1
      for (int half = 0; half < raw.halves; half += 2)
        element_tile(raw_half(raw, half), raw_half(raw, half + 1), q, factor, see, raw.token + half / 2 * 16);
      first += 16 * teams;
      if (teams * 16 >= kv_ring || first >= w.length) break;
      __syncthreads();  // all teams' have been read
      raw.token += 16 * teams;
      raw.halves = raw.token < w.length ? 2 : 0;
      for (int half = 0; half < raw.halves; ++half) copy_raw(raw, task, w, half);
      cute::cp_async_fence();
      cute::cp_async_wait<0>();
      __syncthreads();  // the next have come, from all threads
    }
  }

  const DecodeParams& p;
  DecodeShared<Config>& shared;
  const int lane, team, part, page_shift;  // part: which of its team's warps this one is
  int this_segment = 0;
  WarpState<W, format> state;
};

template <class Config>
__global__ __launch_bounds__(32 * Config::warps,
                             Config::blocks_per_sm) void split_kv(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) unsigned char bytes[];
  if constexpr (Config::clusters)
    if (tile::has_clusters && p.cluster > 1) tile::arrive_at_cluster();
  fetch_ahead(p);
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();  // behind the wait: the combine counts on what this kernel found
  SplitKv<Config>(p, *reinterpret_cast<DecodeShared<Config>*>(bytes)).run();
}

}  // namespace rooftile::gpu
