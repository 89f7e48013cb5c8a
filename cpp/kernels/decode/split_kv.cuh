// SPDX-License-Identifier: Apache-2.0
// Decode attention over a KV cache, split along the sequence.
//   q, out [B, T, Hq, D]    cache: pages of K and V per KV head, one block-table row per sequence (or consecutive pages)
// A persistent grid walks the units of schedule.h. A block takes one task at a time, its four warps every fourth tile of
// the task's tokens; each warp keeps a softmax state of its own, in registers. At the end of a leaf the four states are
// merged through shared memory and the leaf goes into the fold. A task that one block computed whole is written at once,
// the others' nodes are left to combine.cuh.
// The query heads of a KV head (times new tokens) are the columns of the products, so they share every byte read.
//
// Bytes per KV head: S * (bytes of a token's K and V). Flops: 4 S D per column, on 8 columns whether used or not.
// 16-bit, D = 128: 512 bytes a token and 8 KFLOP: bandwidth is the roof, tensor cores take a third of the time. int4-kivi:
// 148 bytes a token, the same products and 2 instructions per pair of codes: bandwidth again, issue slots close behind.
//
// Memory to operands. Codes: global -> registers, decoded there; K of the next tile is loaded while this tile's softmax
// and values run, V of the next while its scores run. 16 bit: cp.async -> shared memory of the warp's own -> ldmatrix,
// `stages` tiles deep. No barrier between warps but at leaf ends.
#pragma once

#include "kernels/decode/fold.cuh"
#include "kernels/decode/tiles.cuh"

namespace rooftile::gpu {

inline constexpr int decode_warps = 4, decode_threads = 32 * decode_warps;

template <class Config>
struct DecodeShared {
  static constexpr int D = Config::head_dim, S = D / 16;   // S: values a thread merges
  float o[decode_warps][columns][D + 4];                   // the warps' states at the end of a leaf; padded against conflicts
  float m[decode_warps][columns], l[decode_warps][columns];
  FoldMemory<S, decode_threads, columns> fold;
  std::int64_t scan[decode_warps];
  std::int64_t found_base;
  int found_entry;
  alignas(128) typename Config::T ring[decode_warps][Config::stages > 0 ? Config::stages : 1][Config::stages > 0 ? 2 * 16 * D : 8];
};

// Where this block starts: its units, and the batch entry that holds the first.
struct BlockRange {
  std::int64_t begin, end;     // units
  std::int64_t entry_base;     // first unit of that entry
  int entry;
};

__device__ __forceinline__ std::int64_t block_scan(std::int64_t x, std::int64_t* warps) {   // inclusive
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const std::int64_t left = __shfl_up_sync(0xffffffffu, x, step);
    if (lane >= step) x += left;
  }
  if (lane == 31) warps[warp] = x;
  __syncthreads();
  for (int w = 0; w < warp; ++w) x += warps[w];
  __syncthreads();
  return x;
}

// Every block counts the units of all entries; block 0 also leaves their prefix sums for the combine, and reports faults.
template <class Shared>
__device__ BlockRange find_range(const DecodeParams& p, Shared& shared) {
  const int batch = static_cast<int>(p.q.shape[0]), thread = threadIdx.x;
  const std::int64_t tasks = std::int64_t{p.cache.kv_heads} * p.passes;
  std::int64_t sum = 0;
  for (int b = thread; b < batch; b += decode_threads) {
    const RowWork w = row_work_of(p, b);
    if (blockIdx.x == 0 && w.fault != KvFault::none) *p.cache.fault = static_cast<int>(w.fault) + 16 * w.row;
    sum += w.task_units() * tasks;
  }
  sum = block_scan(sum, shared.scan);
  if (thread == decode_threads - 1) shared.found_base = sum;
  __syncthreads();
  const std::int64_t total = shared.found_base;
  __syncthreads();
  const Split split(total, p.blocks);
  BlockRange r{split.begin(blockIdx.x), split.begin(blockIdx.x + 1), 0, 0};
  if (thread == 0) shared.found_entry = -1;
  std::int64_t before = 0;
  for (int first = 0; first < batch; first += decode_threads) {
    const int b = first + thread;
    const std::int64_t units = b < batch ? row_work_of(p, b).task_units() * tasks : 0;
    const std::int64_t end = before + block_scan(units, shared.scan);
    if (blockIdx.x == 0 && b < batch) p.row_begin[b] = end - units;
    if (end - units <= r.begin && r.begin < end) {
      shared.found_entry = b;
      shared.found_base = end - units;
    }
    if (thread == decode_threads - 1) shared.scan[0] = end;
    __syncthreads();
    before = shared.scan[0];
    const bool found = shared.found_entry >= 0;
    __syncthreads();
    if (found && blockIdx.x != 0) break;
  }
  if (blockIdx.x == 0 && thread == 0) p.row_begin[batch] = total;
  r.entry = shared.found_entry;
  r.entry_base = shared.found_base;
  return r;
}

// A page that the table must not name counts as page 0, and is reported.
__device__ __forceinline__ std::int64_t checked_page(const KvCacheView& c, int row, int token) {
  const std::int64_t page = kv_page(c, row, token);
  if (page >= 0 && page < c.pages) return page;
  *c.fault = static_cast<int>(KvFault::page) + 16 * row;
  return 0;
}

template <class Config>
class SplitKv {
  using T = typename Config::T;
  static constexpr int D = Config::head_dim, S = D / 16;
  static constexpr KvFormat format = Config::format;
  static constexpr bool elements = is_element_format(format);
  static constexpr int tile_tokens = elements ? 16 : 32;
  static constexpr int tiles_per_unit = unit_tokens / decode_warps / tile_tokens;   // of one warp

 public:
  __device__ SplitKv(const DecodeParams& p, DecodeShared<Config>& shared)
      : p(p), shared(shared), lane(threadIdx.x % 32), warp(threadIdx.x / 32) {}

  __device__ void run() {
    const BlockRange range = find_range(p, shared);
    if (range.begin >= range.end) return;
    const int tasks = p.cache.kv_heads * p.passes;
    std::int64_t base = range.entry_base;
    for (int b = range.entry; b < p.q.shape[0] && base < range.end; ++b) {
      const RowWork w = row_work_of(p, b);
      const std::int64_t units = w.task_units();
      if (units == 0) continue;
      const int first_task = range.begin > base ? static_cast<int>((range.begin - base) / units) : 0;
      for (int task = first_task; task < tasks; ++task) {
        const std::int64_t task_base = base + task * units;
        if (task_base >= range.end) return;
        const int first = w.leaf_from(range.begin - task_base), last = min(w.all_leaves(), w.leaf_from(range.end - task_base));
        if (first < last) segment({b, task / p.passes, task % p.passes}, w, first, last);
      }
      base += units * tasks;
    }
  }

 private:
  // Leaves [first, last) of one task.
  __device__ void segment(const Task& task, const RowWork& w, int first, int last) {
    const int column = threadIdx.x / 16, d0 = threadIdx.x % 16 * S;
    Fold<S, decode_threads, columns> fold(shared.fold, threadIdx.x, column, first);
    int slot = blockIdx.x * slots_per_block + (first > 0 ? 0 : slots_inside);
    const auto emit = [&](const Node<S>& node) {
      const std::int64_t at = std::int64_t{slot++} * columns + column;
#pragma unroll
      for (int i = 0; i < S; i += 4)
        *reinterpret_cast<float4*>(p.node_o + at * D + d0 + i) = make_float4(node.o[i], node.o[i + 1], node.o[i + 2], node.o[i + 3]);
      if (d0 == 0) *reinterpret_cast<float2*>(p.node_ml + at * 2) = make_float2(node.m, node.l);
    };
    state.reset();
    paged_leaves(task, w, first, min(last, w.leaves), [&](int leaf) { fold.push(merge_warps(column, d0), leaf, 0, emit); });
    if constexpr (is_kivi(format))
      if (w.raw && last == w.all_leaves()) {
        raw_leaf(task, w);
        fold.push(merge_warps(column, d0), w.leaves, 0, emit);
      }
    if (first > 0 || last < w.all_leaves()) {
      fold.flush(emit);
      return;
    }
    const Node<S> result = fold.finish();
    write_result<T>(p, task, w, column, d0, d0 == 0, result.m, result.l, result.o);
  }

  // The four warps' states become one node, and are reset.
  __device__ Node<S> merge_warps(int column, int d0) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int j = 0; j < 2; ++j)
#pragma unroll
      for (int step = 4; step < 32; step *= 2) {
        state.l[j] += __shfl_xor_sync(0xffffffffu, state.l[j], step);
        state.shift[j] += __shfl_xor_sync(0xffffffffu, state.shift[j], step);
      }
    if (g == 0)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        shared.m[warp][2 * t + j] = state.m[j];
        shared.l[warp][2 * t + j] = state.l[j];
      }
#pragma unroll
    for (int i = 0; i < D / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        shared.o[warp][2 * t + e % 2][16 * i + 8 * (e / 2) + g] = state.o[i][e] * state.unit + state.shift[e % 2];
    state.reset();
    __syncthreads();   // all states are there
    Node<S> node;
    node.m = -INFINITY;
#pragma unroll
    for (int w = 0; w < decode_warps; ++w) node.m = fmaxf(node.m, shared.m[w][column]);
    const float base = node.m == -INFINITY ? 0.0f : node.m;
    node.l = 0.0f;
#pragma unroll
    for (int i = 0; i < S; ++i) node.o[i] = 0.0f;
#pragma unroll
    for (int w = 0; w < decode_warps; ++w) {
      const float weight = exp2f(shared.m[w][column] - base);
      node.l = __fmaf_rn(shared.l[w][column], weight, node.l);
#pragma unroll
      for (int i = 0; i < S; ++i) node.o[i] = __fmaf_rn(shared.o[w][column][d0 + i], weight, node.o[i]);
    }
    __syncthreads();   // the states may be overwritten
    return node;
  }

  template <class LeafEnd>
  __device__ void paged_leaves(const Task& task, const RowWork& w, int first, int last, const LeafEnd& leaf_end) {
    if (first >= last) return;
    const Visible see = visible(p, task, w, lane, false);
    const int steps = w.units * tiles_per_unit;   // of one warp in one leaf
    const auto token_of = [&](int k) { return w.begin + (k * decode_warps + warp) * tile_tokens; };
    if constexpr (elements) element_tiles(task, w, see, first * steps, last * steps, steps, token_of, leaf_end);
    else code_tiles(task, w, see, first * steps, last * steps, steps, token_of, leaf_end);
  }

  // factor of scores_to_logits. unit: what the queries were divided by.
  __device__ float factor_of(float unit) const { return unit * (p.softcap != 0.0f ? p.scale / p.softcap : p.scale * tile::log2_e); }

  template <class TokenOf, class LeafEnd>
  __device__ void element_tiles(const Task& task, const RowWork& w, const Visible& see, int k, int k_end, int steps,
                                const TokenOf& token_of, const LeafEnd& leaf_end) {
    const KvCacheView& c = p.cache;
    tile::FragmentB q[D / 16];
    load_query_fragments<T, D>(p, task, w, lane, q);
    const float factor[2] = {factor_of(1.0f), factor_of(1.0f)};
    const std::int64_t k_head = task.kv_head * c.k.head_stride, v_head = task.kv_head * c.v.head_stride;
    const auto issue = [&](int step) {   // always one group of copies, maybe empty
      const int token = token_of(step);
      if (step < k_end && token < w.end) {
        T* to = shared.ring[warp][step % Config::stages];
        const std::int64_t page = checked_page(c, w.row, token), slot = token % c.page_size;
        const std::byte* k_rows = c.k.codes + page * c.k.page_stride + k_head + slot * c.k.token_stride;
        const std::byte* v_rows = c.v.codes + page * c.v.page_stride + v_head + slot * c.v.token_stride;
        const auto wanted = [&](int i) { return token + i >= see.outer_begin && token + i < see.outer_end; };
        copy_rows_async<T, D>(to, lane, [&](int i) { return k_rows + i * c.k.token_stride; }, wanted);
        copy_rows_async<T, D>(to + 16 * D, lane, [&](int i) { return v_rows + i * c.v.token_stride; }, wanted);
      }
      cute::cp_async_fence();
    };
#pragma unroll
    for (int i = 0; i < Config::stages - 1; ++i) issue(k + i);
    for (; k < k_end; ++k) {
      __syncwarp();   // every lane has read the stage that is filled next
      issue(k + Config::stages - 1);
      cute::cp_async_wait<Config::stages - 1>();
      __syncwarp();   // this tile has come, from all lanes
      const int token = token_of(k);
      if (token < w.end) element_tile(shared.ring[warp][k % Config::stages], shared.ring[warp][k % Config::stages] + 16 * D, q, factor, see, token);
      if ((k + 1) % steps == 0) leaf_end(k / steps);
    }
    cute::cp_async_wait<0>();
  }

  __device__ void element_tile(const T* k, const T* v, const tile::FragmentB (&q)[D / 16], const float (&factor)[2],
                               const Visible& see, int token) {
    float s[1][4];
    scores16<T, D>(s, k, q, lane);
    scores_to_logits(s, factor, p.softcap);
    mask(s, see, token, lane);
    online_softmax(s, state);
    values16<T, D>(state, s, v, lane);
  }

  template <class TokenOf, class LeafEnd>
  __device__ void code_tiles(const Task& task, const RowWork& w, const Visible& see, int k, int k_end, int steps,
                             const TokenOf& token_of, const LeafEnd& leaf_end) {
    const KvCacheView& c = p.cache;
    CodeQueries<format, D> q;
    q.template load<T>(p, task, w, lane);
    const float factor[2] = {factor_of(q.unit[0]), factor_of(q.unit[1])};
    const std::int64_t head = task.kv_head * c.k.head_stride;
    const auto there = [&](int step) { return step < k_end && token_of(step) < w.end; };
    // Pages of a tile: two where a page holds 16 tokens. Looked up one tile ahead of its loads.
    struct Pages {
      std::int64_t first, second;
    };
    const auto pages_of = [&](int step) {
      if (!there(step)) return Pages{0, 0};
      const int token = token_of(step);
      const std::int64_t first = checked_page(c, w.row, token);
      return Pages{first, c.page_size == 16 && token + 16 < w.end ? checked_page(c, w.row, token + 16) : first};
    };
    const auto place = [&](int step, const Pages& pages) {
      const int token = token_of(step), slots = c.page_size - 1;
      return [=, this](int i) {
        struct {
          std::int64_t offset;
          int slot;
        } at{(i < 16 ? pages.first : pages.second) * c.k.page_stride + head, (token + i) & slots};
        return at;
      };
    };
    const auto wanted = [&](int step) {
      const int token = token_of(step) + lane;
      return token >= see.outer_begin && token < see.outer_end;
    };
    CodeTile<format, D> x;
    Pages pages = pages_of(k);
    if (there(k)) {
      x.load_k(c, place(k, pages), lane);
      x.load_v(c, place(k, pages), lane, wanted(k));
    }
    pages = pages_of(k + 1);
    for (; k < k_end; ++k) {
      const bool now = there(k), next = there(k + 1);
      const auto next_place = place(k + 1, pages);
      float s[2][4];
      if (now) {
        code_scores<T, format, D>(s, x, q);
        if constexpr (!is_kivi(format)) scale_scores<T>(s, x.k_scale[0], lane);
      }
      if (next) x.load_k(c, next_place, lane);
      if (now) {
        const int token = token_of(k);
        scores_to_logits(s, factor, p.softcap);
        mask(s, see, token, lane);
        online_softmax(s, state);
        code_values<T, format, D>(state, s, x, lane);
      }
      if (next) x.load_v(c, next_place, lane, wanted(k + 1));
      pages = pages_of(k + 2);
      if ((k + 1) % steps == 0) leaf_end(k / steps);
    }
  }

  // The raw tokens of a kivi row: at most 64, one tile a warp, through the warp's part of shared.o.
  __device__ void raw_leaf(const Task& task, const RowWork& w) {
    const KvCacheView& c = p.cache;
    const Visible see = visible(p, task, w, lane, true);
    const int token = static_cast<int>(kivi_code_end(w.length > w.count ? w.length - w.count : 0)) + 16 * warp;
    if (token >= w.length) return;
    static_assert(sizeof(shared.o[0]) >= 16 * D * sizeof(T));
    T* rows = reinterpret_cast<T*>(&shared.o[warp][0][0]);
    tile::FragmentB q[D / 16];
    load_query_fragments<T, D>(p, task, w, lane, q);
    const float factor[2] = {factor_of(1.0f), factor_of(1.0f)};
    const std::int64_t row_bytes = D * sizeof(T);
    const std::int64_t from = ((std::int64_t{w.row} * c.kv_heads + task.kv_head) * c.ring_size + token % c.ring_size) * row_bytes;
    const auto wanted = [&](int i) { return token + i >= see.outer_begin && token + i < see.outer_end; };
    const auto copy = [&](const std::byte* ring) {
      __syncwarp();   // what was there has been read
      copy_rows_async<T, D>(rows, lane, [&](int i) { return ring + from + i * row_bytes; }, wanted);
      cute::cp_async_fence();
      cute::cp_async_wait<0>();
      __syncwarp();
    };
    float s[1][4];
    copy(c.ring_k);
    scores16<T, D>(s, rows, q, lane);
    scores_to_logits(s, factor, p.softcap);
    mask(s, see, token, lane);
    online_softmax(s, state);
    copy(c.ring_v);
    values16<T, D>(state, s, rows, lane);
    __syncwarp();
  }

  const DecodeParams& p;
  DecodeShared<Config>& shared;
  const int lane, warp;
  WarpState<D> state;
};

template <class Config>
__global__ __launch_bounds__(decode_threads, Config::blocks_per_sm) void split_kv(const __grid_constant__ DecodeParams p) {
  extern __shared__ __align__(128) unsigned char bytes[];
  SplitKv<Config>(p, *reinterpret_cast<DecodeShared<Config>*>(bytes)).run();
}

}  // namespace rooftile::gpu
