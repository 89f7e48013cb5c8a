// SPDX-License-Identifier: Apache-2.0
// Append: tokens of k, v [B, T, Hkv, D] -> pages, rings and codes; with cos given, k and q are turned on the way.
//
// Blocks walk the work of one batch entry, one warp a task:
//   element formats, int8, int4   (token, side, head): D elements of one token
//   kivi formats                  (group, head): K of 32 tokens, or V of 8 of them. A task encodes its tokens if their
//                                 group closes in this call and then writes the raw ones into the ring.
//   q                             (token, head)
// Every warp judges its entry before it writes: what the host cannot see (rows, counts, lengths, table entries,
// positions) is checked here, and an entry that cannot be is left alone. A second launch, `grow`, judges again, reports
// and lets the lengths of the others grow: inside one launch no block knows when all others have read them.
//
// Bytes per token and head: 4 D read, the stored codes written, so memory is the roof; about 20 instructions a value
// (two of them a division's) stay below it from two blocks an SM on. T = 1 is latency: rows -> length -> table -> data.
//
// The bytes are those of the CPU: each value is the same fp32 operation, rounded once, and nothing here may be
// contracted (the _rn intrinsics), scales round as core/half.h does it. A turned value is the exact sum of two exact
// products in fp64, rounded to fp32 and then to the dtype, as on the CPU.
#include <cstdint>
#include <cstdio>
#include <limits>
#include <type_traits>

#include "core/half.h"
#include "core/kv_layout.h"
#include "kernels/backend.h"
#include "kernels/launch.h"
#include "kernels/warmup.h"
#include "tile/element.cuh"

namespace rooftile::gpu {
namespace {

using tile::to_float;

constexpr int warps = 4;                            // of a block
constexpr int max_head_dim = 256;
constexpr int lane_quads = max_head_dim / (4 * 32);   // a lane holds so many times four values of a token
constexpr int v_part = 8;                           // tokens of a group whose V is one warp's
constexpr int group_tasks = 1 + kv_group / v_part;  // of one group's head: K, then the parts of V

struct Strided {   // [B, T, H, D] of 16-bit elements
  void* data = nullptr;
  std::int64_t batch = 0, token = 0, head = 0, dim = 0;   // strides in elements
  bool wide = false;                                      // four neighbours are one 8-byte access
};

struct Rope {   // tables [max_position, pairs], positions [B, T]
  const void *cos = nullptr, *sin = nullptr, *positions = nullptr;
  std::int64_t cos_row = 0, cos_column = 0, sin_row = 0, sin_column = 0, position_batch = 0, position_token = 0;
  std::int64_t max_position = 0;
  int pairs = 0;
  bool fp32 = false, wide_positions = false;   // tables are fp32, else the cache's dtype; positions are int64
};

struct AppendParams {
  KvCacheView c;
  Strided k, v, q, q_out;
  Rope rope;                                // cos null: nothing turns
  const std::int32_t *rows, *counts;        // [B] or null
  int batch, tokens, q_heads, entry_blocks;   // entry_blocks: blocks that share one batch entry
  bool wide_pool, wide_ring;                // as Strided::wide
};

// ---- may this entry be written? ----

struct Entry {
  std::int64_t row = 0, length = 0;   // length: tokens stored before this call; 0 where nothing is to be stored
  int tokens = 0;
  KvFault fault = KvFault::none;      // what this thread found; the rest is known to all threads of the block
};

__device__ std::int64_t position_of(const Rope& r, int b, int token) {
  const std::int64_t at = b * r.position_batch + token * r.position_token;
  return r.wide_positions ? static_cast<const std::int64_t*>(r.positions)[at] : static_cast<const std::int32_t*>(r.positions)[at];
}

__device__ Entry judge(const AppendParams& p, int b) {
  const KvCacheView& c = p.c;
  Entry e;
  e.row = p.rows ? p.rows[b] : b;
  const int tokens = p.counts ? p.counts[b] : p.tokens;
  if (e.row < 0 || e.row >= c.max_rows) {
    e.fault = KvFault::row;
    return e;
  }
  if (tokens < 0 || tokens > p.tokens) {
    e.fault = KvFault::count;
    return e;
  }
  if (p.rope.cos)
    for (int i = threadIdx.x; i < p.tokens; i += blockDim.x) {
      const std::int64_t position = position_of(p.rope, b, i);
      if (position < 0 || position >= p.rope.max_position) e.fault = KvFault::position;
    }
  if (tokens == 0) return e;   // a padding row; it may name a row that another entry writes
  e.tokens = tokens;
  e.length = c.lengths[e.row];
  const std::int64_t capacity = std::int64_t{c.max_pages} * c.page_size, end = e.length + tokens;
  if (e.length < 0 || e.length > capacity) {
    e.fault = KvFault::length;
    return e;
  }
  if (end > capacity) {
    e.fault = KvFault::capacity;
    return e;
  }
  if (c.block_table)
    for (std::int64_t i = e.length / c.page_size + threadIdx.x; i <= (end - 1) / c.page_size; i += blockDim.x) {
      const int page = c.block_table[e.row * c.table_stride + i];
      if (page < 0 || page >= c.pages) e.fault = KvFault::page;
    }
  if (p.rows)
    for (int i = threadIdx.x; i < p.batch; i += blockDim.x)
      if (i != b && p.rows[i] == e.row && (!p.counts || p.counts[i] != 0)) e.fault = KvFault::twice;
  return e;
}

// ---- four values of a token ----

template <class T>
struct alignas(8) Quad {
  T x[4];
};

// Which dims are quad q of a token. K codes are stored in order; the V codes of d, d + 8, d + 16, d + 24 lie together.
struct InOrder {
  static __device__ int dim(int q, int j) { return 4 * q + j; }
};
struct ByEight {
  static __device__ int dim(int q, int j) { return q / 8 * 32 + q % 8 + 8 * j; }
};

template <class T>
struct Token {   // one head of one token
  T* at;
  std::int64_t stride;
  bool wide;
};
template <class T>
__device__ Token<T> token_of(const Strided& s, int b, int token, int head) {
  return {static_cast<T*>(s.data) + (b * s.batch + token * s.token + head * s.head), s.dim, s.wide};
}

// 0 past head_dim.
template <class Order, class T>
__device__ Quad<T> load(const Token<T>& from, int q, int head_dim) {
  if constexpr (std::is_same_v<Order, InOrder>)
    if (from.wide && 4 * q < head_dim) return *reinterpret_cast<const Quad<T>*>(from.at + 4 * q);
  Quad<T> quad;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int d = Order::dim(q, j);
    quad.x[j] = d < head_dim ? from.at[d * from.stride] : tile::from_float<T>(0.0f);
  }
  return quad;
}

template <class T>
__device__ void store(const Token<T>& to, int q, int head_dim, const Quad<T>& quad) {
  if (to.wide && 4 * q < head_dim) {
    *reinterpret_cast<Quad<T>*>(to.at + 4 * q) = quad;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (4 * q + j < head_dim) to.at[(4 * q + j) * to.stride] = quad.x[j];
}

// Quad q, in order, of a token that the rotation of its position turns.
template <class T>
__device__ Quad<T> turned(const Rope& r, std::int64_t position, const Token<T>& from, int q, int head_dim) {
  const auto entry = [&](const void* table, std::int64_t at) {
    return static_cast<double>(r.fp32 ? static_cast<const float*>(table)[at] : to_float(static_cast<const T*>(table)[at]));
  };
  Quad<T> quad;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int d = 4 * q + j, i = d < r.pairs ? d : d - r.pairs;
    if (d >= head_dim) {
      quad.x[j] = tile::from_float<T>(0.0f);
    } else if (d >= 2 * r.pairs) {
      quad.x[j] = from.at[d * from.stride];
    } else {
      const double c = entry(r.cos, position * r.cos_row + i * r.cos_column);
      const double s = entry(r.sin, position * r.sin_row + i * r.sin_column);
      const double low = to_float(from.at[i * from.stride]), high = to_float(from.at[(i + r.pairs) * from.stride]);
      const double y = d < r.pairs ? low * c - high * s : high * c + low * s;
      quad.x[j] = tile::from_float<T>(static_cast<float>(y));
    }
  }
  return quad;
}

// ---- groups: range, scale, codes ----

// Least and greatest value of a group, as integers in the values' order; symmetric formats: the greatest magnitude.
template <KvFormat f>
struct Range {
  int low = std::numeric_limits<int>::max(), high = has_min(f) ? std::numeric_limits<int>::min() : 0;

  static constexpr int infinity = 0x7f800000;
  static __device__ int flip(int x) { return x ^ ((x >> 31) & 0x7fffffff); }   // its own inverse

  __device__ void add(float x) {
    if constexpr (has_min(f)) {
      const int key = flip(__float_as_int(x));
      low = min(low, key);
      high = max(high, key);
    } else {
      high = max(high, __float_as_int(x) & 0x7fffffff);
    }
  }
  __device__ void join() {   // all lanes hold parts of one group
    if constexpr (has_min(f)) low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
  }
  __device__ bool broken() const {   // holds a NaN or an infinity: they lie past all numbers
    return high >= infinity || (has_min(f) && low <= flip(infinity | static_cast<int>(0x80000000u)));
  }
  __device__ float least() const { return __int_as_float(flip(low)); }
  __device__ float greatest() const { return __int_as_float(has_min(f) ? flip(high) : high); }
};

template <class T>   // rounds as the CPU does, NaN included
using ScaleOf = std::conditional_t<std::is_same_v<T, tile::bf16>, BFloat16, Half>;

// Scale and minimum as a reader sees them, and the codes they give.
template <class T, KvFormat f>
struct Grid {
  using Scale = ScaleOf<T>;
  static constexpr bool bf16 = std::is_same_v<T, tile::bf16>;
  static constexpr float smallest = bf16 ? 0x1p-133f : 0x1p-24f;   // subnormal
  static constexpr float largest_scale = rooftile::largest_scale(bf16 ? DType::bf16 : DType::f16, has_min(f));
  static constexpr float top = has_min(f) ? 15.0f : static_cast<float>(qmax(f)), bottom = has_min(f) ? 0.0f : -top;

  Scale stored_scale, stored_minimum;
  float scale, minimum;

  explicit __device__ Grid(const Range<f>& r) {
    const float nan = __int_as_float(0x7fc00000);
    const float width = has_min(f) ? __fsub_rn(r.greatest(), r.least()) : r.greatest();
    const float step = width > 0.0f ? fminf(fmaxf(__fdiv_rn(width, top), smallest), largest_scale) : 0.0f;
    stored_scale = rooftile::from_float<Scale>(r.broken() ? nan : step);
    scale = rooftile::to_float(stored_scale);
    minimum = 0.0f;
    if constexpr (has_min(f)) {
      constexpr float largest_minimum = bf16 ? 0x1.fep+127f : 65504.0f;
      // + 0: a group of zeros of both signs has minimum +0
      const float least = fminf(fmaxf(__fadd_rn(r.least(), 0.0f), -largest_minimum), largest_minimum);
      stored_minimum = rooftile::from_float<Scale>(r.broken() ? nan : least);
      minimum = rooftile::to_float(stored_minimum);
    }
  }

  __device__ int code(float x) const {   // 0 where the scale is 0 or NaN
    if (!(scale > 0.0f)) return 0;
    const float ratio = __fdiv_rn(has_min(f) ? __fsub_rn(x, minimum) : x, scale);
    return __float2int_rn(fminf(fmaxf(ratio, bottom), top));
  }
};

// Four codes side by side, the first lowest.
template <KvFormat f>
__device__ std::uint32_t packed(const int (&codes)[4]) {
  constexpr std::uint32_t mask = (1u << code_bits(f)) - 1;
  std::uint32_t word = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) word |= (static_cast<std::uint32_t>(codes[j]) & mask) << (j * code_bits(f));
  return word;
}

template <KvFormat f, class Order>
__device__ void store_codes(const KvCacheView& c, std::byte* section, int slot, int q, std::uint32_t word) {
  constexpr bool is_v = std::is_same_v<Order, ByEight>;
  const int d = Order::dim(q, 0);
  const std::int64_t index = is_v ? v_code_index(f, c.page_size, c.head_dim, slot, d) : k_code_index(c.head_dim, slot, d);
  if constexpr (code_bits(f) == 4) {
    *reinterpret_cast<std::uint16_t*>(section + index / 2) = static_cast<std::uint16_t>(word);
  } else if constexpr (is_v) {
#pragma unroll
    for (int j = 0; j < 4; ++j) section[index + 4 * j] = static_cast<std::byte>(word >> (8 * j));
  } else {
    *reinterpret_cast<std::uint32_t*>(section + index) = word;
  }
}

// ---- what one warp does ----

template <class T, KvFormat f>
struct Warp {
  const AppendParams& p;
  const Entry& e;
  int b, lane;

  using Scale = ScaleOf<T>;

  __device__ std::byte* section(const KvCacheView::Plane& plane, std::byte* base, std::int64_t page, int head) const {
    return base + page * plane.page_stride + head * plane.head_stride;
  }
  __device__ Quad<T> new_k(int token, int head, int q) const {
    const Token<T> from = token_of<T>(p.k, b, token, head);
    return p.rope.cos ? turned(p.rope, position_of(p.rope, b, token), from, q, p.c.head_dim) : load<InOrder>(from, q, p.c.head_dim);
  }
  __device__ Token<T> ring(std::byte* base, std::int64_t position, int head) const {
    const std::int64_t slot = (e.row * p.c.kv_heads + head) * kv_ring + position % kv_ring;
    return {reinterpret_cast<T*>(base) + slot * p.c.head_dim, 1, p.wide_ring};
  }

  __device__ void copy_element(int token, int head, bool is_v) const {
    const KvCacheView& c = p.c;
    const std::int64_t position = e.length + token;
    const KvCacheView::Plane& plane = is_v ? c.v : c.k;
    std::byte* at = section(plane, plane.codes, kv_page(c, e.row, position), head) + position % c.page_size * plane.token_stride;
    const Token<T> to{reinterpret_cast<T*>(at), 1, p.wide_pool};
    for (int q = lane; 4 * q < c.head_dim; q += 32)
      store(to, q, c.head_dim, is_v ? load<InOrder>(token_of<T>(p.v, b, token, head), q, c.head_dim) : new_k(token, head, q));
  }

  // One token as one group.
  template <class Order>
  __device__ void encode_token(const KvCacheView::Plane& plane, std::int64_t position, int head, const Quad<T> (&x)[lane_quads]) const {
    const KvCacheView& c = p.c;
    const std::int64_t page = kv_page(c, e.row, position);
    const int slot = static_cast<int>(position % c.page_size), quads = padded_head_dim(c.head_dim) / 4;
    Range<f> range;
#pragma unroll
    for (int r = 0; r < lane_quads; ++r)
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (Order::dim(lane + 32 * r, j) < c.head_dim) range.add(to_float(x[r].x[j]));
    range.join();
    const Grid<T, f> grid(range);
    if (lane == 0) {
      reinterpret_cast<Scale*>(section(plane, plane.scale, page, head))[slot] = grid.stored_scale;
      if constexpr (has_min(f)) reinterpret_cast<Scale*>(section(plane, plane.min, page, head))[slot] = grid.stored_minimum;
    }
#pragma unroll
    for (int r = 0; r < lane_quads; ++r) {
      const int q = lane + 32 * r;
      if (q >= quads) break;
      int codes[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[j] = Order::dim(q, j) < c.head_dim ? grid.code(to_float(x[r].x[j])) : 0;
      store_codes<f, Order>(c, section(plane, plane.codes, page, head), slot, q, packed<f>(codes));
    }
  }

  __device__ void encode_new(int token, int head, bool is_v) const {
    Quad<T> x[lane_quads];
    if (is_v) {
      const Token<T> from = token_of<T>(p.v, b, token, head);
#pragma unroll
      for (int r = 0; r < lane_quads; ++r) x[r] = load<ByEight>(from, lane + 32 * r, p.c.head_dim);
      encode_token<ByEight>(p.c.v, e.length + token, head, x);
    } else {
#pragma unroll
      for (int r = 0; r < lane_quads; ++r) x[r] = new_k(token, head, lane + 32 * r);
      encode_token<InOrder>(p.c.k, e.length + token, head, x);
    }
  }

  // K of the 32 tokens from `first` on, one group a channel: those that are older than the call lie in the ring.
  // staged: the lane's own column, [token][lane].
  __device__ void close_k(std::int64_t first, int head, Quad<T> (*staged)[32]) const {
    const KvCacheView& c = p.c;
    const std::int64_t page = kv_page(c, e.row, first);
    const int slot = static_cast<int>(first % c.page_size), padded = padded_head_dim(c.head_dim);
    for (int q = lane; 4 * q < padded; q += 32) {
      Range<f> range[4];
      const auto stage = [&](int t, const Quad<T>& x) {
        staged[t][lane] = x;
#pragma unroll
        for (int j = 0; j < 4; ++j) range[j].add(to_float(x.x[j]));
      };
      const int old = static_cast<int>(max(e.length - first, std::int64_t{0})), token = static_cast<int>(first - e.length);
#pragma unroll 4
      for (int t = 0; t < old; ++t) stage(t, load<InOrder>(ring(c.ring_k, first + t, head), q, c.head_dim));
      if (p.rope.cos) {
#pragma unroll 1
        for (int t = old; t < kv_group; ++t) stage(t, new_k(token + t, head, q));
      } else {
#pragma unroll 4
        for (int t = old; t < kv_group; ++t) stage(t, load<InOrder>(token_of<T>(p.k, b, token + t, head), q, c.head_dim));
      }
      const Grid<T, f> grid[4] = {Grid<T, f>(range[0]), Grid<T, f>(range[1]), Grid<T, f>(range[2]), Grid<T, f>(range[3])};
      const std::int64_t index = std::int64_t{slot / kv_group} * padded + 4 * q;
      Scale* scales = reinterpret_cast<Scale*>(section(c.k, c.k.scale, page, head)) + index;
#pragma unroll
      for (int j = 0; j < 4; ++j) scales[j] = grid[j].stored_scale;
      if constexpr (has_min(f)) {
        Scale* minima = reinterpret_cast<Scale*>(section(c.k, c.k.min, page, head)) + index;
#pragma unroll
        for (int j = 0; j < 4; ++j) minima[j] = grid[j].stored_minimum;
      }
      std::byte* codes_at = section(c.k, c.k.codes, page, head);
#pragma unroll 2
      for (int t = 0; t < kv_group; ++t) {
        const Quad<T> x = staged[t][lane];
        int codes[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) codes[j] = grid[j].code(to_float(x.x[j]));
        store_codes<f, InOrder>(c, codes_at, slot + t, q, packed<f>(codes));
      }
    }
  }

  // V of the v_part tokens from `first` on.
  __device__ void close_v(std::int64_t first, int head) const {
    Quad<T> x[v_part][lane_quads];
#pragma unroll
    for (int t = 0; t < v_part; ++t) {   // all of them on their way before the first is used
      const std::int64_t position = first + t;
      const Token<T> from = position < e.length ? ring(p.c.ring_v, position, head)
                                                : token_of<T>(p.v, b, static_cast<int>(position - e.length), head);
#pragma unroll
      for (int r = 0; r < lane_quads; ++r) x[t][r] = load<ByEight>(from, lane + 32 * r, p.c.head_dim);
    }
#pragma unroll
    for (int t = 0; t < v_part; ++t) encode_token<ByEight>(p.c.v, first + t, head, x[t]);
  }

  // Raw tokens into the ring slots of positions [first, first + count), which lie in one of the call's first two groups:
  // each slot gets the newest token that belongs there, if it is new. So what a closing group reads from a slot and what
  // overwrites it later are one warp's, in this order.
  __device__ void fill_ring(std::int64_t first, int count, int head, bool is_v) const {
    const std::int64_t end = e.length + e.tokens;
    for (std::int64_t slot = first; slot < first + count && slot < end; ++slot) {
      const std::int64_t position = slot + (end - 1 - slot) / kv_ring * kv_ring;
      if (position < e.length) continue;
      const int token = static_cast<int>(position - e.length);
      const Token<T> to = ring(is_v ? p.c.ring_v : p.c.ring_k, position, head);
      for (int q = lane; 4 * q < p.c.head_dim; q += 32)
        store(to, q, p.c.head_dim, is_v ? load<InOrder>(token_of<T>(p.v, b, token, head), q, p.c.head_dim) : new_k(token, head, q));
    }
  }

  __device__ void do_group(int index, int part, int head, Quad<T> (*staged)[32]) const {
    const bool is_v = part > 0;
    const std::int64_t group = (e.length / kv_group + index) * kv_group, first = is_v ? group + (part - 1) * v_part : group;
    const bool closes = group + kv_group <= e.length + e.tokens;
    if (closes && !is_v) close_k(first, head, staged);
    if (closes && is_v) close_v(first, head);
    __syncwarp();   // the lanes that read a slot of the ring -> the lanes that write it
    if (index < 2) fill_ring(first, is_v ? v_part : kv_group, head, is_v);
  }

  // q_out may be q: a lane reads what another writes.
  __device__ void turn_q(int token, int head) const {
    const Token<T> from = token_of<T>(p.q, b, token, head), to = token_of<T>(p.q_out, b, token, head);
    const std::int64_t position = position_of(p.rope, b, token);
    Quad<T> y[lane_quads];
#pragma unroll
    for (int r = 0; r < lane_quads; ++r) y[r] = turned(p.rope, position, from, lane + 32 * r, p.c.head_dim);
    __syncwarp();   // all of the head is read -> it may be overwritten
#pragma unroll
    for (int r = 0; r < lane_quads; ++r) store(to, lane + 32 * r, p.c.head_dim, y[r]);
  }
};

template <class T, KvFormat f>
__global__ __launch_bounds__(warps * 32) void append(const __grid_constant__ AppendParams p) {
  __shared__ Quad<T> staged[is_kivi(f) ? warps : 1][is_kivi(f) ? kv_group : 1][32];
  const int b = static_cast<int>(blockIdx.x) / p.entry_blocks, heads = p.c.kv_heads;
  const Entry e = judge(p, b);
  if (__syncthreads_or(e.fault != KvFault::none)) return;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Warp<T, f> w{p, e, b, static_cast<int>(threadIdx.x) % 32};

  int stored = e.tokens * 2 * heads;
  if constexpr (is_kivi(f)) {
    const std::int64_t groups = e.tokens == 0 ? 0 : (e.length + e.tokens - 1) / kv_group - e.length / kv_group + 1;
    stored = static_cast<int>(groups) * group_tasks * heads;
  }
  const int tasks = stored + (p.rope.cos ? p.tokens * p.q_heads : 0);
  for (int task = static_cast<int>(blockIdx.x) % p.entry_blocks * warps + warp; task < tasks; task += p.entry_blocks * warps) {
    if (task >= stored) {
      w.turn_q((task - stored) / p.q_heads, (task - stored) % p.q_heads);
      continue;
    }
    const int head = task % heads, rest = task / heads;
    if constexpr (is_kivi(f)) {
      w.do_group(rest / group_tasks, rest % group_tasks, head, staged[warp]);
    } else if constexpr (is_element_format(f)) {
      w.copy_element(rest / 2, head, rest % 2 != 0);
    } else {
      w.encode_new(rest / 2, head, rest % 2 != 0);
    }
  }
}

// One block an entry.
__global__ __launch_bounds__(256) void grow(const __grid_constant__ AppendParams p) {
  const int b = static_cast<int>(blockIdx.x);
  const Entry e = judge(p, b);
  if (e.fault != KvFault::none && p.c.fault)   // any thread that found something; a row that is none has no number
    *p.c.fault = static_cast<std::int32_t>(e.fault) + 16 * static_cast<std::int32_t>(e.fault == KvFault::row ? b : e.row);
  if (!__syncthreads_or(e.fault != KvFault::none) && threadIdx.x == 0 && e.tokens > 0) p.c.lengths[e.row] += e.tokens;
}

// ---- host ----

bool eights(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 8 == 0; }

Strided strided(const TensorView& t) {
  if (!t.given()) return {};
  bool wide = eights(t.data) && t.shape[3] % 4 == 0 && t.stride[3] == 1;
  for (int i = 0; i < 3; ++i) wide = wide && (t.shape[i] <= 1 || t.stride[i] % 4 == 0);
  return {t.data, t.stride[0], t.stride[1], t.stride[2], t.stride[3], wide};
}

Rope rope_of(const AppendArgs& a) {
  if (!a.cos.given()) return {};
  return {.cos = a.cos.data,
          .sin = a.sin.data,
          .positions = a.positions.data,
          .cos_row = a.cos.stride[0],
          .cos_column = a.cos.stride[1],
          .sin_row = a.sin.stride[0],
          .sin_column = a.sin.stride[1],
          .position_batch = a.positions.stride[0],
          .position_token = a.positions.stride[1],
          .max_position = a.cos.shape[0],
          .pairs = static_cast<int>(a.cos.shape[1]),
          .fp32 = a.cos.dtype == DType::f32,
          .wide_positions = a.positions.dtype == DType::i64};
}

bool wide_pool(const KvCacheView& c) {
  if (!is_element_format(c.format)) return false;
  bool wide = c.head_dim % 4 == 0;
  for (const KvCacheView::Plane* plane : {&c.k, &c.v})
    wide = wide && eights(plane->codes) && plane->page_stride % 8 == 0 && plane->head_stride % 8 == 0 && plane->token_stride % 8 == 0;
  return wide;
}

using Kernel = void (*)(AppendParams);

template <class T>
Kernel kernel_for(KvFormat f) {
  switch (f) {
    case KvFormat::int8: return append<T, KvFormat::int8>;
    case KvFormat::int4: return append<T, KvFormat::int4>;
    case KvFormat::int4_kivi_sym: return append<T, KvFormat::int4_kivi_sym>;
    case KvFormat::int4_kivi: return append<T, KvFormat::int4_kivi>;
    default: return append<T, std::is_same_v<T, tile::bf16> ? KvFormat::bf16 : KvFormat::fp16>;
  }
}

}  // namespace

KernelName kv_append(const char* op, const Context& ctx, const AppendArgs& a) {
  const KvCacheView& c = *a.cache;
  ROOFTILE_CHECK_KIND(not_supported, c.head_dim <= max_head_dim, op, ": the cache has head_dim ", c.head_dim,
                      "; on a GPU 1 to ", max_head_dim, " can be appended");
  const std::int64_t batch = a.k.shape[0], tokens = a.k.shape[1], q_heads = a.cos.given() ? a.q.shape[2] : 0;
  const std::int64_t groups = (tokens + 2 * (kv_group - 1)) / kv_group;   // that the tokens of a row may touch
  const std::int64_t tasks = c.kv_heads * (is_kivi(c.format) ? groups * group_tasks : tokens * 2) + tokens * q_heads;
  constexpr std::int64_t most = std::numeric_limits<int>::max() / 4;      // sums of task numbers stay 32 bits
  ROOFTILE_CHECK_KIND(not_supported, tasks <= most && batch <= most, op, ": k has ", tokens, " tokens for each of ", batch,
                      " rows; on a GPU tokens times heads of one row are at most ", most, " a call");
  KernelName name;
  std::snprintf(name.text, sizeof name.text, "cuda_%s_%s_%s", op, rooftile::name(c.dtype), rooftile::name(c.format));
  if (batch == 0 || tokens == 0) return name;

  const DeviceScope scope(op, ctx);
  // Enough blocks to fill the device, but few enough that judging an entry is little beside its work.
  const std::int64_t all = (tasks + warps - 1) / warps, fill = (std::int64_t{scope.sms()} * 16 + batch - 1) / batch;
  AppendParams p{.c = c,
                 .k = strided(a.k),
                 .v = strided(a.v),
                 .q = strided(a.q),
                 .q_out = strided(a.q_out),
                 .rope = rope_of(a),
                 .rows = a.rows,
                 .counts = a.counts,
                 .batch = static_cast<int>(batch),
                 .tokens = static_cast<int>(tokens),
                 .q_heads = static_cast<int>(q_heads),
                 .entry_blocks = static_cast<int>(all < fill ? all : fill),
                 .wide_pool = wide_pool(c),
                 .wide_ring = c.head_dim % 4 == 0 && eights(c.ring_k) && eights(c.ring_v)};
  scope.launch(c.dtype == DType::bf16 ? kernel_for<tile::bf16>(c.format) : kernel_for<tile::half>(c.format),
               batch * p.entry_blocks, warps * 32, 0, p);
  scope.launch(grow, batch, 256, 0, p);
  return name;
}

void load_append_kernels(const char* op) {
  for (int f = static_cast<int>(KvFormat::fp16); f < kv_format_count; ++f) {
    load_kernel(op, kernel_for<tile::half>(static_cast<KvFormat>(f)));
    load_kernel(op, kernel_for<tile::bf16>(static_cast<KvFormat>(f)));
  }
  load_kernel(op, grow);
}

}  // namespace rooftile::gpu
