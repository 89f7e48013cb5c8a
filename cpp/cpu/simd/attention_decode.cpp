// SPDX-License-Identifier: Apache-2.0
// Decode attention: the newest T queries of every row against its cache, split along the sequence.
//   q, out [B, T, Hq, D]     cache: pages of [K | V] blocks per KV head (core/kv_layout.h)
// A work tile is one (batch entry, KV head, block of queries). Its packed rows are the queries times the Hq / Hkv query
// heads: each K or V code is unpacked once and used for all rows. A work tile is cut along the tokens into chunks of
// 128 (fixed-size KV splits).
// Cost of a KV head: 4 * S * D * T * Hq / Hkv flop on S * (bytes of K and V) bytes. Memory bandwidth bounds 16-bit
// formats at T = 1, unpacking bounds 4-bit formats.
// Chunks start at multiples of 128 tokens. Their partials are merged in order, by the thread that finishes the last
// chunk of a work tile, so a row's bits depend on its own tokens alone. A row reads only the tokens it sees: a masked
// token is skipped, not added with weight 0.
#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>
#include <type_traits>

#include "core/kv_layout.h"
#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/scratch.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/kv_tile.h"
#include "cpu/simd/attention_math.h"
#ifdef ROOFTILE_AMX
#include "cpu/simd/attention_amx.h"
#endif

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

constexpr int max_rows = 64;  // of a work tile; more only if one query has more heads

// Neighbouring queries of one batch entry and KV head.
struct WorkTile {
  std::int64_t batch, head;  // KV head
  std::int64_t first_query, queries;
  std::int64_t cache_row;
  std::int64_t position;             // of the first query; negative: the query sees no token
  std::int64_t real;                 // queries before the entry's count; the others get out 0, lse -inf
  std::int64_t first_chunk, chunks;  // chunks 0: no token is visible
  std::int64_t first_task, tasks;    // tasks of the thread pool: 1, or one per chunk
  std::int32_t left;                 // unfinished tasks
};

// One thread's scratch arrays, [rows][width] floats unless noted.
struct Workspace {
  float *q, *q_paired, *q_scaled;
  float* s;                           // [rows][chunk]
  float* weight;                      // [row_block][tile]: probabilities times V scales
  float *k, *v;                       // [tile][width]
  float *channel, *channel_min;       // [width]
  float *acc, *total;                 // of the current chunk, and of all chunks so far
  SoftmaxState *state, *total_state;  // [rows]
  float* bias;                        // [rows]: dot(q, K min_term) of the tile, later the sum of p * V min_term
  Range* range;                       // [rows]
};

class Decode {
 public:
  Decode(const Parallel& parallel, const DecodeArgs& a);
  void run();

 private:
  std::int64_t plan();  // fills work_tiles_; returns the number of tasks
  void task(std::int64_t index, int thread);
  WorkTile& work_tile_of(std::int64_t task);
  void load_queries(const WorkTile& u, Workspace& workspace) const;
  void attend_chunk(const WorkTile& u, std::int64_t first_token, Workspace& workspace, float* acc,
                    SoftmaxState* state) const;
  template <class Body>
  void each_source(const WorkTile& u, std::int64_t tile_first, const Body& body) const;
  void compute_logits(const CachedHead&, bool ring, std::int64_t first, int offset, int n, int row0, int row1,
                      Workspace&) const;
  void accumulate_values(const CachedHead&, bool ring, std::int64_t first, int offset, int n, int row0, int row1,
                         Workspace&, float* acc) const;
  void scale_logits(float* s, F32 dots, F32 factor) const;
  template <class Body>
  void each_integer_block(const WorkTile& u, std::int64_t first_token, Workspace&, const Body& body) const;
  void epilogue(const WorkTile& u, Workspace& workspace) const;
  Workspace workspace(int thread) const;
  std::size_t workspace_bytes() const;
  std::int64_t rows_of(const WorkTile& u) const { return u.queries * group_; }
  float* partial(const WorkTile& u, std::int64_t c) const { return partials_ + (u.first_task + c) * partial_stride_; }

  const Parallel& parallel_;
  const DecodeArgs& a_;
  const KvCacheView& cache_;
  const std::int64_t group_;  // query heads per KV head
  const int width_;
  const bool integers_;               // codes are multiplied as integers
  const std::int64_t tile_queries_;   // queries of a work tile
  const std::int64_t max_tile_rows_;  // most packed rows of a work tile
  const std::int64_t partial_stride_;
  const std::int64_t work_tile_count_;
  const Scratch work_tile_memory_;
  WorkTile* const work_tiles_;
  bool split_ = false;  // some work tile has one task per chunk
  float* partials_ = nullptr;
  std::byte* workspaces_ = nullptr;
};

Decode::Decode(const Parallel& parallel, const DecodeArgs& a)
    : parallel_(parallel),
      a_(a),
      cache_(*a.cache),
      group_(a.q.shape[2] / a.cache->kv_heads),
      width_(tile_width(*a.cache)),
#ifdef ROOFTILE_AMX
      integers_(IntegerChunk::takes(*a.cache)),
#else
      integers_(false),
#endif
      tile_queries_(group_ >= max_rows                 ? 1
                    : max_rows / group_ < a.q.shape[1] ? max_rows / group_
                                                       : a.q.shape[1]),
      max_tile_rows_(tile_queries_ * group_),
      partial_stride_((max_tile_rows_ * (width_ + 2) + 15) / 16 * 16),
      work_tile_count_(a.q.shape[0] * a.cache->kv_heads * ((a.q.shape[1] + tile_queries_ - 1) / tile_queries_)),
      work_tile_memory_(static_cast<std::size_t>(work_tile_count_) * sizeof(WorkTile)),
      work_tiles_(reinterpret_cast<WorkTile*>(work_tile_memory_.data())) {
}

std::size_t Decode::workspace_bytes() const {
  const std::size_t rows = static_cast<std::size_t>(max_tile_rows_), width = static_cast<std::size_t>(width_);
  constexpr std::size_t arrays = 16;  // upper bound; alignment costs each array up to one cache line
  return aligned(sizeof(float) *
                     (5 * rows * width + rows * (chunk + 1) + row_block * tile + 2 * tile * width + 2 * width) +
                 rows * (2 * sizeof(SoftmaxState) + sizeof(Range)) + arrays * 64);
}

Workspace Decode::workspace(int thread) const {
  BumpAllocator take{workspaces_ + static_cast<std::size_t>(thread) * workspace_bytes()};
  Workspace r;
  take(r.q, max_tile_rows_ * width_);
  take(r.q_paired, max_tile_rows_ * width_);
  take(r.q_scaled, max_tile_rows_ * width_);
  take(r.s, max_tile_rows_ * chunk);
  take(r.weight, row_block * tile);
  take(r.k, tile * width_);
  take(r.v, tile * width_);
  take(r.channel, width_);
  take(r.channel_min, width_);
  take(r.acc, max_tile_rows_ * width_);
  take(r.total, max_tile_rows_ * width_);
  take(r.state, max_tile_rows_);
  take(r.total_state, max_tile_rows_);
  take(r.bias, max_tile_rows_);
  take(r.range, max_tile_rows_);
  return r;
}

std::int64_t Decode::plan() {
  WorkTile* next = work_tiles_;
  const std::int64_t batch = a_.q.shape[0], tokens = a_.q.shape[1];
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t row = a_.rows ? a_.rows[b] : b, length = cache_.lengths[row];
    const std::int64_t count = a_.counts ? a_.counts[b] : tokens;
    for (std::int64_t head = 0; head < cache_.kv_heads; ++head)
      for (std::int64_t i = 0; i < tokens; i += tile_queries_) {
        WorkTile u{
            b, head, i, tokens - i < tile_queries_ ? tokens - i : tile_queries_, row, length - count + i, 0, 0, 0,
            0, 0,    0};
        u.real = count - i < 0 ? 0 : count - i < u.queries ? count - i : u.queries;
        const std::int64_t last = u.position + u.real - 1;
        if (u.real > 0 && last >= 0) {
          std::int64_t first = 0;
          if (a_.logits.window > 0 && u.position - a_.logits.window + 1 > 0) first = u.position - a_.logits.window + 1;
          u.first_chunk = first / chunk;
          u.chunks = last / chunk + 1 - u.first_chunk;
        }
        *next++ = u;
      }
  }
  // One task per work tile if that keeps every thread busy; the task then merges the chunks as it computes them.
  const bool few = work_tile_count_ < 4 * parallel_.threads();
  std::int64_t task = 0;
  for (WorkTile* u = work_tiles_; u < next; ++u) {
    u->first_task = task;
    u->tasks = few && u->chunks > 1 ? u->chunks : 1;
    u->left = static_cast<std::int32_t>(u->tasks);
    split_ |= u->tasks > 1;
    task += u->tasks;
  }
  return task;
}

void Decode::run() {
  const std::int64_t tasks = plan();
  const std::size_t partial_bytes =
      split_ ? aligned(static_cast<std::size_t>(tasks * partial_stride_) * sizeof(float)) : 0;
  const Scratch scratch(partial_bytes + static_cast<std::size_t>(parallel_.threads()) * workspace_bytes());
  partials_ = reinterpret_cast<float*>(scratch.data());
  workspaces_ = scratch.data() + partial_bytes;
  parallel_.run(tasks, [this](std::int64_t i, int thread) { task(i, thread); });
}

WorkTile& Decode::work_tile_of(std::int64_t task) {
  std::int64_t low = 0, high = work_tile_count_;  // work_tiles_[low].first_task <= task < work_tiles_[high].first_task
  while (high - low > 1) {
    const std::int64_t mid = (low + high) / 2;
    (work_tiles_[mid].first_task <= task ? low : high) = mid;
  }
  return work_tiles_[low];
}

// Merges `partial`, whose keys follow those of `total`, into `total`. Not inlined: every caller gets the same bits.
__attribute__((noinline)) void merge_state(float* total, SoftmaxState& total_state, const float* partial,
                                           SoftmaxState partial_state, int width) {
  if (partial_state.sum == 0) return;  // the partial has no token
  if (total_state.sum == 0) {
    std::memcpy(total, partial, sizeof(float) * static_cast<std::size_t>(width));
    total_state = partial_state;
    return;
  }
  const float top = total_state.top > partial_state.top ? total_state.top : partial_state.top;
  const float a = ::expf(total_state.top - top), b = ::expf(partial_state.top - top);
  for (int d = 0; d < width; d += lanes) {
    const F32 kept = load(total + d) * a;
    store(total + d, fma(load(partial + d), splat(b), kept));
  }
  const float kept = total_state.sum * a;
  total_state = {top, kept + partial_state.sum * b};
}

void Decode::task(std::int64_t index, int thread) {
  WorkTile& u = work_tile_of(index);
  Workspace r = workspace(thread);
  const std::int64_t rows = rows_of(u);
  const auto clear = [&] {
    for (std::int64_t i = 0; i < rows; ++i) r.total_state[i] = {};
  };
  const auto merge = [&](const float* acc, const SoftmaxState* state) {
    for (std::int64_t i = 0; i < rows; ++i)
      merge_state(r.total + i * width_, r.total_state[i], acc + i * width_, state[i], width_);
  };
  if (u.chunks > 0) load_queries(u, r);
#ifdef ROOFTILE_AMX
  std::optional<TileRegisters> registers;  // of all chunks: to load their layout takes as long as a chunk's products
  if (integers_) registers.emplace(attention_tiles);
#endif
  if (u.tasks == 1) {
    clear();
    for (std::int64_t c = 0; c < u.chunks; ++c) {
      attend_chunk(u, (u.first_chunk + c) * chunk, r, r.acc, r.state);
      merge(r.acc, r.state);
    }
    return epilogue(u, r);
  }
  const auto states = [&](std::int64_t c) {
    return reinterpret_cast<SoftmaxState*>(partial(u, c) + max_tile_rows_ * width_);
  };
  const std::int64_t mine = index - u.first_task;
  attend_chunk(u, (u.first_chunk + mine) * chunk, r, partial(u, mine), states(mine));
  if (__atomic_sub_fetch(&u.left, 1, __ATOMIC_ACQ_REL) > 0) return;
  clear();
  for (std::int64_t c = 0; c < u.tasks; ++c) merge(partial(u, c), states(c));
  epilogue(u, r);
}

void Decode::load_queries(const WorkTile& u, Workspace& r) const {
  for (std::int64_t i = 0; i < u.queries; ++i)
    for (std::int64_t g = 0; g < group_; ++g) {
      const std::int64_t at = (i * group_ + g) * width_;
      const std::int64_t offset =
          u.batch * a_.q.stride[0] + (u.first_query + i) * a_.q.stride[1] + (u.head * group_ + g) * a_.q.stride[2];
      gather_row(a_.q, offset, a_.q.stride[3], cache_.head_dim, width_, r.q + at);
      if (is_paired(cache_.format)) pair_channels(r.q + at, width_, r.q_paired + at);
    }
}

// Calls body(ring, first row, last row + 1) for each source of a tile. Formats without groups have one source, the
// pages. In a kivi format the rows whose own group this tile is read raw tokens from the ring; later rows read codes.
template <class Body>
void Decode::each_source(const WorkTile& u, std::int64_t tile_first, const Body& body) const {
  const int rows = static_cast<int>(u.real * group_);
  if (!is_kivi(cache_.format)) return body(false, 0, rows);
  const auto row_at = [&](std::int64_t position) {  // first row whose query is at or after a position
    const std::int64_t i = position - u.position;
    return static_cast<int>((i < 0 ? 0 : i > u.real ? u.real : i) * group_);
  };
  const int raw = row_at(tile_first), coded = row_at(tile_first + tile);
  if (raw < coded) body(true, raw, coded);
  if (coded < rows) body(false, coded, rows);
}

void Decode::attend_chunk(const WorkTile& u, std::int64_t first_token, Workspace& r, float* acc,
                          SoftmaxState* state) const {
  const int rows = static_cast<int>(rows_of(u)), real = static_cast<int>(u.real * group_);
  const std::int64_t last_token = u.position + u.real - 1;  // of all rows
  Range all{chunk, 0};
  for (int i = 0; i < rows; ++i) {
    const std::int64_t position = u.position + i / group_, window = a_.logits.window;
    const std::int64_t first =
        window > 0 && position - window + 1 > first_token ? position - window + 1 - first_token : 0;
    const std::int64_t last = position + 1 - first_token < chunk ? position + 1 - first_token : chunk;
    Range& range = r.range[i];
    range = i < real && first < last ? Range{static_cast<int>(first), static_cast<int>(last)} : Range{};
    if (range.empty()) continue;
    all.first = range.first < all.first ? range.first : all.first;
    all.last = range.last > all.last ? range.last : all.last;
  }
  const CachedHead head{&cache_, u.cache_row, u.head};
  const auto each_tile = [&](const auto& body) {
    for (int offset = all.first / tile * tile; offset < all.last; offset += tile) {
      const std::int64_t first = first_token + offset;
      const int n = last_token + 1 - first < tile ? static_cast<int>(last_token + 1 - first) : tile;
      each_source(u, first, [&](bool ring, int row0, int row1) { body(ring, first, offset, n, row0, row1); });
    }
  };
  each_integer_block(u, first_token, r, [&](const auto& tokens, const Range*, int i, int count) {
    tokens.logits(r.q_paired + i * width_, count, r.s + i * chunk);
    for (int t = tokens.begin(); t < tokens.end(); ++t) {
      float scale[tile];
      tokens.key_scales(t, scale);
      for (int at = 0; at < tile; at += lanes)
        for (int j = i; j < i + count; ++j) {
          float* const s = r.s + j * chunk + t * tile + at;
          scale_logits(s, load(s), load(scale + at) * a_.logits.scale);
        }
    }
  });
  each_tile([&](bool ring, std::int64_t first, int offset, int n, int row0, int row1) {
    if (ring || !integers_) compute_logits(head, ring, first, offset, n, row0, row1, r);
  });
  for (int i = 0; i < rows; ++i) {
#ifdef ROOFTILE_AMX
    if (integers_) keep_awake();
#endif
    const Range range = r.range[i];
    state[i] = range.empty() ? SoftmaxState{} : exponentiate(r.s + i * chunk, range.first, range.last, minus_infinity);
    r.bias[i] = 0;
    for (int d = 0; d < width_; d += lanes) store(acc + i * width_ + d, F32{});
  }
  each_integer_block(u, first_token, r, [&](const auto& tokens, const Range* coded, int i, int count) {
    tokens.values(r.s + i * chunk, coded, count, acc + i * width_, r.bias + i);
  });
  each_tile([&](bool ring, std::int64_t first, int offset, int n, int row0, int row1) {
    if (ring || !integers_) accumulate_values(head, ring, first, offset, n, row0, row1, r, acc);
  });
  if (!has_min(cache_.format)) return;
  for (int i = 0; i < rows; ++i)
    for (int d = 0; d < width_; d += lanes) store(acc + i * width_ + d, load(acc + i * width_ + d) + r.bias[i]);
}

// Calls body(coded tokens, the tokens each row takes, first row, rows) for blocks of rows that read codes in integers.
template <class Body>
void Decode::each_integer_block(const WorkTile& u, std::int64_t first_token, Workspace& r, const Body& body) const {
#ifdef ROOFTILE_AMX
  if (!integers_) return;
  const int real = static_cast<int>(u.real * group_);
  const auto count = static_cast<int>(std::min<std::int64_t>(chunk, u.position + u.real - first_token));
  for (int i = 0; i < real; i += row_block) {
    const int rows = std::min(row_block, real - i);
    Range coded[row_block];
    int begin = chunk_tiles, end = 0;
    for (int j = 0; j < rows; ++j) {
      Range range = r.range[i + j];
      if (is_kivi(cache_.format)) {
        const std::int64_t raw = kivi_code_end(u.position + (i + j) / group_) - first_token;
        range.last = static_cast<int>(std::min<std::int64_t>(range.last, raw));
      }
      if (range.empty()) continue;
      coded[j] = range;
      begin = std::min(begin, range.first / tile);
      end = std::max(end, (range.last + tile - 1) / tile);
    }
    if (begin < end)
      body(IntegerChunk({&cache_, u.cache_row, u.head}, first_token, begin, end, count,
                        reinterpret_cast<std::uint8_t*>(r.k)),
           coded, i, rows);
  }
#else
  (void)u, (void)first_token, (void)r, (void)body;
#endif
}

// The factor and the soft cap of sixteen logits.
void Decode::scale_logits(float* s, F32 dots, F32 factor) const {
  F32 x = dots * factor;
  if (a_.logits.softcap > 0) x = soft_cap(x, a_.logits.softcap);
  store(s, x);
}

// Computes the logits of one tile of keys: s[row][offset .. offset + n), for rows [row0, row1).
void Decode::compute_logits(const CachedHead& head, bool ring, std::int64_t first, int offset, int n, int row0,
                            int row1, Workspace& r) const {
  TokenRows k;
  TileScales scales;
  scales.channel = r.channel;
  scales.channel_min = r.channel_min;
  const float* q = r.q;
  const bool coded = !is_element_format(cache_.format) && !ring;
  for (int i = row0; i < row1; ++i) r.bias[i] = 0;
  if (!coded) {
    find_elements(head, cache_.k, ring ? cache_.ring_k : nullptr, first, n, k);
    // few rows widen 16-bit keys as they read them; for many rows the tile is widened once
    if (cache_.head_dim % lanes || width_ != cache_.head_dim || (k.dtype != DType::f32 && row1 - row0 > 2 * row_block))
      widen(k, n, cache_.head_dim, width_, r.k);
  } else {
    unpack_k(head, first, n, r.k, scales);
    scratch_rows(r.k, n, width_, k);
    if (is_paired(cache_.format)) q = r.q_paired;
    if (is_kivi(cache_.format)) {  // sum q (u scale + min) = sum (q scale) (u - 8) + sum q (min + 8 scale)
      if (has_min(cache_.format)) to_zero_point(r.channel, r.channel_min, width_);
      for (int i = row0; i < row1; ++i) {
        F32 bias{};
        for (int d = 0; d < width_; d += lanes) {
          const F32 x = load(q + i * width_ + d);
          store(r.q_scaled + i * width_ + d, x * load(scales.channel + d));
          if (has_min(cache_.format)) bias = fma(x, load(scales.channel_min + d), bias);
        }
        r.bias[i] = sum(bias);
      }
      q = r.q_scaled;
    }
  }
  float* s = r.s + offset;
  for (int i = row0; i < row1; i += row_block)
    with_rows(row1 - i, [&](auto count) __attribute__((always_inline)) {
      Range visible{tile, 0};
      for (int j = i; j < i + count; ++j) {
        if (r.range[j].empty()) continue;
        visible.first = r.range[j].first - offset < visible.first ? r.range[j].first - offset : visible.first;
        visible.last = r.range[j].last - offset > visible.last ? r.range[j].last - offset : visible.last;
      }
      visible = {visible.first < 0 ? 0 : visible.first, visible.last > tile ? tile : visible.last};
      if (visible.empty()) return;
      with_token_type(k.dtype, [&](auto e) __attribute__((always_inline)) {
        dot_rows<decltype(e), decltype(count)::value>(q + i * width_, width_, k, visible.first, visible.last,
                                                      s + i * chunk, chunk);
      });
      F32 factor[2] = {splat(a_.logits.scale), splat(a_.logits.scale)};
      if (coded && !is_kivi(cache_.format))
        for (int h = 0; h < 2; ++h) factor[h] *= load(scales.token + h * lanes);
      for (int j = i; j < i + count; ++j)
        for (int h = 0; h < 2; ++h) {
          float* at = s + j * chunk + h * lanes;
          scale_logits(at, load(at) + r.bias[j], factor[h]);
        }
    });
}

// acc += p V for one tile of values and rows [row0, row1).
void Decode::accumulate_values(const CachedHead& head, bool ring, std::int64_t first, int offset, int n, int row0,
                               int row1, Workspace& r, float* acc) const {
  TokenRows v;
  TileScales scales;
  const bool coded = !is_element_format(cache_.format) && !ring;
  if (!coded) {
    find_elements(head, cache_.v, ring ? cache_.ring_v : nullptr, first, n, v);
    if (cache_.head_dim % lanes || width_ != cache_.head_dim || (v.dtype != DType::f32 && row1 - row0 > 2 * row_block))
      widen(v, n, cache_.head_dim, width_, r.v);
  } else {
    unpack_v(head, first, n, r.v, scales);
    if (has_min(cache_.format)) to_zero_point(scales.token, scales.token_min, tile);
    scratch_rows(r.v, n, width_, v);
  }
  const auto visible_range = [&](int row) {
    const Range range = r.range[row];
    const int from = range.first - offset, to = range.last - offset;
    return Range{from < 0 ? 0 : from, to > tile ? tile : to};
  };
  for (int i = row0; i < row1;) {
    const Range visible = visible_range(i);
    int count = 1;  // rows that see the same tokens
    while (count < row_block && i + count < row1 && visible_range(i + count).first == visible.first &&
           visible_range(i + count).last == visible.last)
      ++count;
    if (!visible.empty()) {
      const float* p = r.s + i * chunk + offset;
      int stride = chunk;
      if (coded) {
        for (int j = 0; j < count; ++j)
          for (int h = 0; h < tile; h += lanes) {
            const F32 x = load(p + j * chunk + h);
            store(r.weight + j * tile + h, x * load(scales.token + h));
            if (!has_min(cache_.format)) continue;
            const F32 mid = x * load(scales.token_min + h);
            r.bias[i + j] += sum(select_range(mid, h, visible.first, visible.last, F32{}));
          }
        p = r.weight;
        stride = tile;
      }
      with_rows(count, [&](auto rows) __attribute__((always_inline)) {
        with_token_type(v.dtype, [&](auto e) __attribute__((always_inline)) {
          add_values<decltype(e), decltype(rows)::value>(p, stride, v, visible.first, visible.last, acc + i * width_,
                                                         width_);
        });
      });
    }
    i += count;
  }
}

void Decode::epilogue(const WorkTile& u, Workspace& r) const {
  for (std::int64_t i = 0; i < u.queries; ++i)
    for (std::int64_t g = 0; g < group_; ++g) {
      const std::int64_t row = i * group_ + g, h = u.head * group_ + g, t = u.first_query + i;
      row_epilogue(a_.logits, i < u.real, h, r.total_state[row], r.total + row * width_, cache_.head_dim, width_,
                   a_.out, u.batch * a_.out.stride[0] + t * a_.out.stride[1] + h * a_.out.stride[2], a_.lse,
                   u.batch * a_.lse.stride[0] + t * a_.lse.stride[1] + h * a_.lse.stride[2]);
    }
}

}  // namespace

void decode_attention(const Parallel& parallel, const DecodeArgs& a) { Decode(parallel, a).run(); }

}  // namespace rooftile::cpu::ROOFTILE_ISA
