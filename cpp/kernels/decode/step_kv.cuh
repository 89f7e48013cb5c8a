// SPDX-License-Identifier: Apache-2.0
// Decode attention over a KV cache where a KV head has more than 8 columns (query heads times new tokens): several
// passes of split_kv.cuh at once, which read and unpack every byte once.
// A block takes one step of tokens after another, a tile for each warp. A warp finds the weights of its tile; through
// shared memory all warps get all weights, and each multiplies them with its own channels of the whole step's values.
// So the block has one softmax state, spread over its warps' registers, and a warp has room for N times 8 columns.
// Leaves, fold and nodes are those of split_kv.cuh.
//
// Bytes per KV head: S * (bytes of a token's K and V), once for N * 8 columns. Flops: 4 S D per column. Codes cost the
// same to unpack as with 8 columns: D = 128, int4-kivi: 700 instructions a warp and tile of 32 tokens with 16 columns,
// twice 600 else.
// What bounds it: the chain of a step, two barriers and two products; half of the issue slots are used.
//
// Memory to operands: cp.async into a ring of the block's own, `stages` steps deep, keys and values refilled apart.
#pragma once

#include "kernels/decode/block_state.cuh"
#include "kernels/decode/fold.cuh"
#include "kernels/decode/pages.cuh"
#include "kernels/decode/range.cuh"
#include "tile/grid.cuh"

namespace rooftile::gpu {

// Who has what: a warp has a tile of the step's tokens, and a block of 32 channels.
template <class Config>
struct Shares {
  static constexpr int D = Config::head_dim, warps = 4, threads = 32 * warps;
  static_assert(D == 32 * warps);
  static constexpr int tile_tokens = is_element_format(Config::format) ? 16 : 32, step_tokens = warps * tile_tokens;
  static constexpr int N = Config::column_tiles;  // times 8 columns
  static constexpr int C = 2;                     // tiles of 16 channels of a warp
};

template <class Config>
struct StepShared {
  using Of = Shares<Config>;
  using T = typename Config::T;
  static constexpr int D = Of::D;
  TileOf<Config> ring[Config::stages][Of::warps];
  // 16 bits for every format. Query columns are needed until the first weights are there; but raw keys meet them after
  // codes.
  static constexpr int weights_size = Of::N * Of::step_tokens * columns, queries_size = Of::N * columns * D;
  alignas(16) T
      weights_or_queries[is_kivi(Config::format) || weights_size > queries_size ? weights_size : queries_size];
  alignas(16) T raw_queries[is_kivi(Config::format) ? queries_size : 8];
  static constexpr int raw_tiles = 2;  // at once, keys and values each
  alignas(128) T raw[is_kivi(Config::format) ? raw_tiles : 1][2][is_kivi(Config::format) ? 16 * D : 8];
  float top[Of::warps][Of::N * columns];  // logits
  std::uint32_t top_scale[Of::warps];
  float l[Of::warps][Of::N * columns], shift[Of::warps][Of::N * columns], excess[Of::warps][Of::N * columns];
  FoldMemory<2 * Of::N, Of::N * Of::C * 4, Of::threads, Of::threads / 8, Config::near_levels> fold;
  BlockRange range;
  int bad_segment;  // the last one that met a page that is none

  __device__ T* weights(int n) { return weights_or_queries + n * Of::step_tokens * columns; }
  __device__ T* queries(int n) {
    return (is_kivi(Config::format) ? raw_queries : weights_or_queries) + n * columns * D;
  }
};

template <class Config>
class StepKv {
  using T = typename Config::T;
  using Of = Shares<Config>;
  static constexpr int D = Of::D, N = Of::N, C = Of::C, warps = Of::warps, tile_tokens = Of::tile_tokens,
                       step_tokens = Of::step_tokens;
  static constexpr KvFormat format = Config::format;
  static constexpr bool elements = is_element_format(format);
  static constexpr int node_values = N * C * 4;
  using LeafNode = Node<2 * N, node_values>;  // (n, j) at 2 n + j, (n, i, e) at (n * C + i) * 4 + e

 public:
  __device__ StepKv(const DecodeParams& p, StepShared<Config>& shared)
      : p(p),
        shared(shared),
        warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        page_shift(first_bit(p.cache.page_size)) {}

  __device__ void run() {
    if (!keep_range(find_range<format>(p), shared.range, shared.bad_segment)) return;
    each_segment<format>(p, shared.range, [&](const Task& task, const RowWork& w, int first, int last) {
      if (first < last) segment({task.b, task.kv_head, task.pass * N}, w, first, last, shared.range.share);
    });
  }

 private:
  __device__ bool bad() const { return shared.bad_segment == this_segment; }  // a page of this segment was none
  // The channel of value (i, e) of a node.
  __device__ int channel(int i, int e) const { return 16 * (C * warp + i) + 8 * (e / 2) + lane / 4; }

  // Leaves [first, last) of one task.
  __device__ void segment(const Task& task, const RowWork& w, int first, int last, int share) {
    const int used = p.q_per_kv * p.tokens - task.pass * columns;  // columns that are no padding
    ++this_segment;
    __syncthreads();  // the last segment's queries and weights have been read, and whether it met a page that is none
    constexpr int deep = decltype(shared.fold)::deep * node_values * Of::threads;
    Fold<2 * N, node_values, Of::threads, Of::threads / 8, Config::near_levels> fold(
        shared.fold, p.fold + std::int64_t{share_of_block()} * deep, threadIdx.x, warp * 4 + lane % 4, first,
        last - first == 1 && w.leaves > 1);
    int slot = share * slots_per_block + (first > 0 ? 0 : slots_inside);
    // Calls visit(n, j, column) for the lane's columns that are no padding.
    const auto each_column = [&](const auto& visit) {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          if (const int column = n * columns + lane % 4 * 2 + j; column < used) visit(n, j, column);
    };
    const auto each_value = [&](const LeafNode& node, int n, int j, const auto& visit) {
#pragma unroll
      for (int i = 0; i < C; ++i)
#pragma unroll
        for (int e = j; e < 4; e += 2) visit(channel(i, e), node.o[(n * C + i) * 4 + e]);
    };
    const bool has_first = warp == 0 && lane < 4;
    const auto emit = [&](const LeafNode& node) {
      const std::int64_t row = std::int64_t{slot++} * (N * columns);
      each_column([&](int n, int j, int column) {
        each_value(node, n, j, [&](int d, float o) { p.node_o[(row + column) * D + d] = o; });
        if (has_first)
          *reinterpret_cast<float2*>(p.node_ml + (row + column) * 2) =
              make_float2(node.m[2 * n + j], bad() ? -1.0f : node.l[2 * n + j]);
      });
    };
    state.reset();
    leaves(task, w, first, last, [&](int leaf, const float (&raw)[N* C][4]) { fold.push(end_leaf(raw), leaf, emit); });
    if (first > 0 || last < w.leaves) {
      fold.flush(emit);
      return;
    }
    const LeafNode result = fold.finish();
    if (bad()) return;
    each_column([&](int n, int j, int column) {
      ColumnResult<T> to(p, task, w, column);
      to.finish(result.m[2 * n + j], result.l[2 * n + j]);
      each_value(result, n, j, [&](int d, float o) {
        const float one[1] = {o};
        to.write(d, one);
      });
      if (has_first) to.write_lse();
    });
  }

  // The block's state as a node, and reset. raw: sums of elements beside those of codes.
  // Sync: what the warps tell each other is read behind the barrier, and written again behind a later step's.
  __device__ LeafNode end_leaf(const float (&raw)[N * C][4]) {
    constexpr bool codes = !elements, middle = CodeKind<format>::middle, min = has_min(format);
    const int t = lane % 4;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int step = 4; step < 32; step *= 2) {
          state.l[n][j] += __shfl_xor_sync(0xffffffffu, state.l[n][j], step);
          if constexpr (min) state.shift[n][j] += __shfl_xor_sync(0xffffffffu, state.shift[n][j], step);
        }
    if (lane < 4)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const auto tell = [&](float (&to)[warps][N* columns], float x, float y) {
          *reinterpret_cast<float2*>(&to[warp][n * columns + 2 * t]) = make_float2(x, y);
        };
        tell(shared.l, state.l[n][0], state.l[n][1]);
        if constexpr (min) tell(shared.shift, state.shift[n][0], state.shift[n][1]);
        if constexpr (middle) tell(shared.excess, state.excess[n][0], state.excess[n][1]);
      }
    __syncthreads();  // all sums are there
    LeafNode node;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const auto sum_of = [&](const float (&from)[warps][N* columns], float (&sum)[2]) {
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < warps; ++i) {
          const float2 x = *reinterpret_cast<const float2*>(&from[i][n * columns + 2 * t]);
          sum[0] += x.x;
          sum[1] += x.y;
        }
      };
      float excess[2] = {}, shift[2] = {};
      float l[2];
      sum_of(shared.l, l);
      if constexpr (middle) sum_of(shared.excess, excess);
      if constexpr (min) sum_of(shared.shift, shift);
      const CodeValues<T, format> values(excess, shift, {1.0f, 1.0f}, state.unit);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        node.m[2 * n + j] = state.m[n][j];
        node.l[2 * n + j] = l[j];
      }
#pragma unroll
      for (int i = 0; i < C; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float o = state.o[n * C + i][e];
          node.o[(n * C + i) * 4 + e] = (codes ? values(o, e) : o) + (is_kivi(format) ? raw[n * C + i][e] : 0.0f);
        }
    }
    state.reset();
    return node;
  }

  // leaf_end(leaf, raw): the block's state is whole.
  template <class LeafEnd>
  __device__ void leaves(const Task& task, const RowWork& w, int first, int last, const LeafEnd& leaf_end) {
    Visible see[N];
    look(task, w, false, see);
    if constexpr (elements) element_tiles(task, w, see, first, last, leaf_end);
    else code_tiles(task, w, see, first, last, leaf_end);
  }
  __device__ void look(const Task& task, const RowWork& w, bool raw, Visible (&see)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) see[n] = visible(p, {task.b, task.kv_head, task.pass + n}, w, lane, raw);
  }
  // Whether any column sees it; whether all see all of `tokens` from there on.
  __device__ static bool seen(const Visible (&see)[N], int token) {
    bool any = false;
#pragma unroll
    for (int n = 0; n < N; ++n) any |= token >= see[n].outer_begin && token < see[n].outer_end;
    return any;
  }
  __device__ static bool all_see(const Visible (&see)[N], int token, int tokens) {
    bool all = true;
#pragma unroll
    for (int n = 0; n < N; ++n) all &= all_seen(see[n], token, tokens);
    return all;
  }

  // The steps of leaves [first, last). A stage's keys are filled again as soon as all warps have the step's weights,
  // its values when they have been multiplied: keys(tile, token, pages) and values(...) start the copies of the warp's
  // tile, of no token where it lies behind the end. queries() starts the copies of what is needed besides, behind the
  // first keys; prepare() runs when that has come. compute(stage, token, arrived, refill): token is the step's first;
  // arrived() waits for the thread's copies of values, and refill(), behind the barrier that makes them all threads'
  // and the weights too, fills the keys again.
  struct Ahead {
    int token;        // of the warp's next tile to copy
    Pages next, now;  // of that tile, and of the one whose keys have been started
    bool there;       // that one's pages are pages
  };
  template <class Keys, class Values, class Queries, class Prepare, class Compute, class LeafEnd>
  __device__ void pipeline(const RowWork& w, int first, int last, const Keys& keys, const Values& values,
                           const Queries& queries, const Prepare& prepare, const Compute& compute,
                           const LeafEnd& leaf_end) {
    constexpr int pending = 2 * (Config::stages - 1);  // groups of copies that nobody waits for yet
    const int leaf_tokens = w.units * unit_tokens, stop = min(w.end, w.begin + last * leaf_tokens),
              own = warp * tile_tokens;
    const RowPages<format> row(p.cache, w, page_shift);
    const auto next_stage = [](int stage) { return stage + 1 < Config::stages ? stage + 1 : 0; };
    int token = w.begin + first * leaf_tokens, used = 0;
    Ahead ahead{token + own, {0, 0}, {0, 0}, true};
    if (ahead.token < stop) ahead.next = row.look_up(ahead.token);
    const auto start_keys = [&](int stage) {
      if (ahead.token < stop) {
        ahead.now = ahead.next;
        if (ahead.token + step_tokens < stop) ahead.next = row.look_up(ahead.token + step_tokens);
        ahead.there = row.are_pages(ahead.now);
        if (!ahead.there) shared.bad_segment = this_segment;  // the row is left alone
      }
      if (ahead.token - own < stop && ahead.there) keys(shared.ring[stage][warp], ahead.token, ahead.now);
      cute::cp_async_fence();
    };
    const auto start_values = [&](int stage) {
      if (ahead.token - own < stop && ahead.there) values(shared.ring[stage][warp], ahead.token, ahead.now);
      ahead.token += step_tokens;
      cute::cp_async_fence();
    };
#pragma unroll 1
    for (int i = 0; i < Config::stages; ++i) {
      start_keys(i);
      if (i + 1 == Config::stages) break;
      if (i == 0) queries();  // of the first values' group
      start_values(i);
    }
    cute::cp_async_wait<pending - 1>();
    __syncthreads();  // the queries have come, from all threads
    prepare();
    for (int leaf = first; leaf < last; ++leaf) {
      for (const int leaf_stop = min(token + leaf_tokens, stop); token < leaf_stop; token += step_tokens) {
        cute::cp_async_wait<pending>();
        // these keys have come, from all threads; every warp has read the last step's values and weights
        __syncthreads();
        start_values(used + Config::stages - 1 < Config::stages ? used + Config::stages - 1 : used - 1);
        compute(shared.ring[used], token, [] { cute::cp_async_wait<pending>(); }, [&] { start_keys(used); });
        used = next_stage(used);
      }
      leaf_end(leaf);
    }
    cute::cp_async_wait<0>();
  }

  // ---- a step's weights ----

  // All maxima follow the step's largest logits, s being the lane's own of them, and the unit the step's largest scale;
  // what has been summed is brought to them; rescale(n, factors) does so for sums that are not in the state.
  template <int M, class Rescale>
  __device__ void follow(const float (&s)[N][M][4], std::uint32_t top_scale, const Rescale& rescale) {
    const int t = lane % 4;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float top[2] = {largest(s[n], 0), largest(s[n], 1)};
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top[j] = fmaxf(top[j], __shfl_xor_sync(0xffffffffu, top[j], step));
      if (lane < 4) *reinterpret_cast<float2*>(&shared.top[warp][n * columns + 2 * t]) = make_float2(top[0], top[1]);
    }
    if (lane == 0) shared.top_scale[warp] = top_scale;
    __syncthreads();  // all maxima are there, and nobody reads weights
    float change = 1.0f;
    if constexpr (!elements) {
      std::uint32_t scale = 0;
#pragma unroll
      for (int i = 0; i < warps; ++i) scale = max(scale, shared.top_scale[i]);
      if (exceeds_unit(scale, state.unit)) {
        const float unit = unit_above(scale);
        change = state.unit * inverse_of_unit(unit);
        state.unit = unit;
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float scale[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < warps; ++i) top = fmaxf(top, shared.top[i][n * columns + 2 * t + j]);
        const bool follows = top > state.m[n][j] + slack;
        scale[j] = follows ? tile::fast_exp2(state.m[n][j] - top) : 1.0f;
        if (follows) state.m[n][j] = top;
        state.l[n][j] *= scale[j];
        state.shift[n][j] *= scale[j];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float by = scale[e % 2] * change;
#pragma unroll
        for (int i = 0; i < C; ++i) state.o[n * C + i][e] *= by;
        state.excess[n][e] *= by;
      }
      rescale(n, scale);
    }
  }

  // Weights of a step, from its logits: put(sum, shift) writes the lane's own and adds them up. Behind it all weights
  // are there, and what arrived() waits for. Weights of up to 2^slack are left as they are: their sum says whether one
  // may be larger. Where there is no maximum yet a weight may be 0 and the largest nevertheless; a leaf's first step
  // finds the maxima before any weight.
  template <int M, class Put, class Arrived, class Rescale>
  __device__ void weigh(const float (&s)[N][M][4], std::uint32_t top_scale, bool more, const Put& put,
                        const Arrived& arrived, const Rescale& rescale) {
    float sum[N][2], shift[N][2];
    arrived();
#pragma unroll 1
    for (bool follows = state.empty;; follows = true) {
      if (follows) follow(s, top_scale, rescale);
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n][0] = sum[n][1] = shift[n][0] = shift[n][1] = 0.0f;
      put(sum, shift);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          more |= state.m[n][j] == -INFINITY ? largest(s[n], j) > -INFINITY : sum[n][j] > most_weight;
      if (!__syncthreads_or(more && !follows)) break;  // all weights are there; is one too large?
    }
    state.empty = false;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        state.l[n][j] += sum[n][j];
        if constexpr (has_min(format)) state.shift[n][j] += shift[n][j];
      }
  }

  // ---- 16-bit rows ----

  template <class LeafEnd>
  __device__ void element_tiles(const Task& task, const RowWork& w, const Visible (&see)[N], int first, int last,
                                const LeafEnd& leaf_end) {
    const KvCacheView& c = p.cache;
    tile::FragmentB q[N][D / 16];
    const std::int64_t k_head = task.kv_head * c.k.head_stride, v_head = task.kv_head * c.v.head_stride;
    const float no_raw[N * C][4] = {};
    const auto copy = [&](T* to, const std::byte* rows, std::int64_t stride, int token) {
      if (token + 16 <= w.end && seen(see, token) && seen(see, token + 15))
        copy_rows_async<T, D, 32>(to, lane, rows, stride, [](int) { return true; });
      else
        copy_rows_async<T, D, 32>(to, lane, rows, stride,
                                  [&](int i) { return token + i < w.end && seen(see, token + i); });
    };
    const auto rows_of = [&](const KvCacheView::Plane& plane, std::int64_t head, int token, const Pages& at) {
      return plane.codes + at.first * plane.page_stride + head + (token & (c.page_size - 1)) * plane.token_stride;
    };
    pipeline(
        w, first, last,
        [&](ElementTile<T, D>& tile, int token, const Pages& at) {
          copy(tile.k, rows_of(c.k, k_head, token, at), c.k.token_stride, token);
        },
        [&](ElementTile<T, D>& tile, int token, const Pages& at) {
          copy(tile.v, rows_of(c.v, v_head, token, at), c.v.token_stride, token);
        },
        [&] { copy_queries(task, w); }, [&] { load_queries(q); },
        [&](const ElementTile<T, D>* tiles, int token, const auto& arrived, const auto& refill) {
          element_step([&](int i) { return tiles[i].k; }, [&](int i) { return tiles[i].v; },
                       std::integral_constant<int, warps>(), q, see, token, state.o, arrived, refill,
                       [](int, const float (&)[2]) {});
        },
        [&](int leaf) { leaf_end(leaf, no_raw); });
  }
  __device__ void copy_queries(const Task& task, const RowWork& w) const {
    copy_queries_async<T, D, N, Of::threads>(p, task, w, threadIdx.x, shared.queries(0));
  }
  __device__ void load_queries(tile::FragmentB (&q)[N][D / 16]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) load_query_fragments<T, D>(shared.queries(n), lane, q[n]);
  }

  // A step of 16-bit rows, `tiles` of 16 tokens from `token` on. keys, values: where tile i lies; rows that no column
  // sees are zeros.
  template <class Keys, class Values, class Tiles, class Arrived, class Refill, class Rescale>
  __device__ void element_step(const Keys& keys, const Values& values, Tiles tiles,
                               const tile::FragmentB (&q)[N][D / 16], const Visible (&see)[N], int token,
                               float (&o)[N * C][4], const Arrived& arrived, const Refill& refill,
                               const Rescale& rescale) {
    const int own = token + 16 * warp;
    float s[N][1][4];
    if (tiles == warps || warp < tiles) {
      scores16<T, D>(s, keys(warp), q, lane);
      const float factor = factor_of(p, 1.0f);
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][0][i] *= factor;
        soft_cap(s[n], p.softcap);
        mask(s[n], see[n], own, lane);
      }
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][0][i] = -INFINITY;
    }
    weigh(
        s, 0, false,
        [&](float (&sum)[N][2], float (&)[N][2]) {
#pragma unroll
          for (int n = 0; n < N; ++n) {
            float weight[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              weight[i] = weight_of(s[n][0][i], state.m[n][i & 1]);
              sum[n][i & 1] += weight[i];
            }
            put_weights(shared.weights(n) + 16 * warp * columns, weight, lane);
          }
        },
        arrived, rescale);
    refill();
#pragma unroll
    for (int at = 0; at < warps; at += 2) {
      if (tiles < warps && at >= tiles) break;
      tile::FragmentA weights[N];
#pragma unroll
      for (int n = 0; n < N; ++n) weights[n] = get_weights(shared.weights(n) + 16 * at * columns, lane);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (tiles < warps && at + i >= tiles) break;
        const int first = token + 16 * (at + i);
        tile::FragmentB of_tile[N];
#pragma unroll
        for (int n = 0; n < N; ++n) of_tile[n] = {{weights[n].r[2 * i], weights[n].r[2 * i + 1]}};
        if (p.tokens == 1 || all_see(see, first, 16)) {
          values16<T, D, C>(o, of_tile, values(at + i), C * warp, lane);
        } else {
#pragma unroll
          for (int n = 0; n < N; ++n)
            values16_apart<T, D, C>(o + n * C, of_tile[n], values(at + i), see[n], first, C * warp, lane);
        }
      }
    }
  }

  // ---- codes ----

  template <class LeafEnd>
  __device__ void code_tiles(const Task& task, const RowWork& w, const Visible (&see)[N], int first, int last,
                             const LeafEnd& leaf_end) {
    using Tile = CodeStage<format, D>;
    const KvCacheView& c = p.cache;
    CodeQueries<format, D> q[N];
    float factor[N][2];
    const CodeSource<format, D> source(c, task.kv_head, lane);
    const RawTiles raw = find_raw(task, w, last == w.leaves);
    pipeline(
        w, first, last,
        [&](Tile& tile, int token, const Pages& at) {
          if (token < w.end)
            tile.template copy_keys_async<32>(source, at.first * c.k.page_stride, at.second * c.k.page_stride,
                                              token & (c.page_size - 1), lane);
        },
        [&](Tile& tile, int token, const Pages& at) {
          if (token < w.end)
            tile.template copy_values_async<32>(source, at.first * c.k.page_stride, at.second * c.k.page_stride,
                                                token & (c.page_size - 1), lane);
        },
        [&] {
          copy_queries(task, w);
          if constexpr (is_kivi(format))
            if (raw.there) copy_raw(raw, task, w, raw.first);
        },
        [&] {
#pragma unroll
          for (int n = 0; n < N; ++n) {
            q[n].template load<T>(shared.queries(n), lane);
            factor[n][0] = factor_of(p, q[n].unit[0]);
            factor[n][1] = factor_of(p, q[n].unit[1]);
          }
        },
        [&](const Tile* tiles, int token, const auto& arrived, const auto& refill) {
          code_step(tiles, q, factor, see, token, arrived, refill);
        },
        [&](int leaf) {
          float raw_o[N * C][4] = {};
          if constexpr (is_kivi(format))
            if (raw.there && leaf + 1 == w.leaves) raw_steps(raw, task, w, raw_o);
          leaf_end(leaf, raw_o);
        });
  }

  // A step of codes, `warps` tiles of 32 tokens from `token` on. Where a tile lies behind the row's end its codes are
  // any, its weights 0.
  template <class Arrived, class Refill>
  __device__ void code_step(const CodeStage<format, D>* tiles, const CodeQueries<format, D> (&q)[N],
                            const float (&factor)[N][2], const Visible (&see)[N], int token, const Arrived& arrived,
                            const Refill& refill) {
    const int own = token + 32 * warp;
    const CodeStage<format, D>& own_tile = tiles[warp];
    const bool all = all_see(see, own, 32);
    const StepScales<format> scales(own_tile, all || seen(see, own + lane), lane, T(0.0f));
    float s[N][2][4];
    code_scores<T, format, D>(s, own_tile, q, factor, lane);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      soft_cap(s[n], p.softcap);
      if (!all) mask(s[n], see[n], own, lane);
    }
    tile::half* const at = reinterpret_cast<tile::half*>(shared.weights(0)) + 32 * warp * columns;
    constexpr int plane = step_tokens * columns;
    float middle[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      middle[i] = has_min(format) ? __shfl_sync(0xffffffffu, scales.centre, 8 * i + lane / 4) : 0.0f;
    weigh(
        s, scales.top, exceeds_unit(scales.top, state.unit),
        [&](float (&sum)[N][2], float (&shift)[N][2]) {
          const float scaled = scales.own * inverse_of_unit(state.unit);
          float scale[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) scale[i] = __shfl_sync(0xffffffffu, scaled, 8 * i + lane / 4);
          // A column that does not see a token must not meet its scale either, which may be no number.
          const auto put = [&](auto all_seen) {
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
              for (int mt = 0; mt < 2; ++mt) {
                float weight[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  const int j = i & 1, row = 2 * mt + i / 2, position = own + 8 * row + lane / 4;
                  const bool counts = all_seen || (position >= see[n].begin[j] && position < see[n].end[j]);
                  const float w = weight_of(s[n][mt][i], state.m[n][j]);
                  sum[n][j] += w;
                  if constexpr (has_min(format))
                    shift[n][j] = counts ? __fmaf_rn(w, middle[row], shift[n][j]) : shift[n][j];
                  weight[i] = counts ? w * scale[row] : 0.0f;
                }
                put_weights(at + n * plane + 16 * mt * columns, weight, lane);
              }
          };
          if (all) put(std::true_type());
          else put(std::false_type());
        },
        arrived, [](int, const float (&)[2]) {});
    refill();
    const auto weights_of = [&](int tile, tile::FragmentB(&weights)[2][N]) {
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const tile::FragmentA both =
            get_weights(reinterpret_cast<const tile::half*>(shared.weights(n)) + 32 * tile * columns, lane);
        weights[0][n] = {{both.r[0], both.r[1]}};
        weights[1][n] = {{both.r[2], both.r[3]}};
      }
    };
    if constexpr (CodeKind<format>::middle) {
      constexpr std::uint32_t excess = CodeKind<format>::excess_pair;
      tile::FragmentB weights[2][N];
      weights_of(warp, weights);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int mt = 0; mt < 2; ++mt)
          tile::mma<tile::half>(state.excess[n], {{excess, excess, excess, excess}}, weights[mt][n]);
    }
#pragma unroll
    for (int tile = 0; tile < warps; ++tile) {
      tile::FragmentB weights[2][N];
      weights_of(tile, weights);
      code_values<format, D, C>(state.o, weights, tiles[tile], warp, lane);
    }
  }

  // ---- the raw tokens of a kivi row ----

  // 64 at most, at the end of its last leaf: tiles of 16, some at once.
  static constexpr int raw_tiles = StepShared<Config>::raw_tiles;
  struct RawTiles {
    bool there;              // the run ends with raw tokens
    int first = 0;           // of them all
    int begin = 0, end = 0;  // what some column sees of them
  };
  __device__ RawTiles find_raw(const Task& task, const RowWork& w, bool ends) const {
    RawTiles raw{is_kivi(format) && ends && w.raw};
    if (!raw.there) return raw;
    Visible see[N];
    look(task, w, true, see);
    raw.first = max(w.length - w.count, 0) & ~(kv_group - 1);
    raw.begin = see[0].outer_begin;
    raw.end = see[0].outer_end;
#pragma unroll
    for (int n = 1; n < N; ++n) {
      raw.begin = min(raw.begin, see[n].outer_begin);
      raw.end = max(raw.end, see[n].outer_end);
    }
    return raw;
  }
  // Keys and values of the tiles from token `first` on, a warp one of them at a time.
  __device__ void copy_raw(const RawTiles& raw, const Task& task, const RowWork& w, int first) const {
#pragma unroll 1
    for (int half = warp; half < 2 * raw_tiles; half += warps) {
      const int token = first + half / 2 * 16;
      copy_rows_async<T, D, 32>(
          shared.raw[half / 2][half % 2], lane,
          (half % 2 == 0 ? p.cache.ring_k : p.cache.ring_v) + ring_offset<T, D>(p, task, w, token), D * sizeof(T),
          [from = raw.begin - token, to = raw.end - token](int i) { return i >= from && i < to; });
    }
  }
  __device__ void raw_steps(const RawTiles& raw, const Task& task, const RowWork& w, float (&o)[N * C][4]) {
    tile::FragmentB q[N][D / 16];
    load_queries(q);
    Visible see[N];
    look(task, w, true, see);
    for (int token = raw.first; token < w.length; token += 16 * raw_tiles) {
      if (token > raw.first) {
        __syncthreads();  // the tiles before have been read
        copy_raw(raw, task, w, token);
        cute::cp_async_fence();
        cute::cp_async_wait<0>();
      }
      __syncthreads();  // they have come, from all threads (the first of them with the queries); nobody reads weights
      element_step([&](int i) { return shared.raw[i][0]; }, [&](int i) { return shared.raw[i][1]; },
                   std::integral_constant<int, raw_tiles>(), q, see, token, o, [] {}, [] {},
                   [&](int n, const float (&factor)[2]) {
#pragma unroll
                     for (int i = 0; i < C; ++i)
#pragma unroll
                       for (int e = 0; e < 4; ++e) o[n * C + i][e] *= factor[e % 2];
                   });
    }
  }

  const DecodeParams& p;
  StepShared<Config>& shared;
  const int warp, lane, page_shift;
  int this_segment = 0;
  State<N, C, format> state;
};

template <class Config>
__global__ __launch_bounds__(Shares<Config>::threads,
                             Config::blocks_per_sm) void step_kv(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) unsigned char bytes[];
  fetch_ahead(p);
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();  // behind the wait: the combine counts on what this kernel found
  StepKv<Config>(p, *reinterpret_cast<StepShared<Config>*>(bytes)).run();
}

}  // namespace rooftile::gpu
