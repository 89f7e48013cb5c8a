// SPDX-License-Identifier: Apache-2.0
// Append: tokens of k, v [B, T, Hkv, D] -> pages, rings and codes; with cos given, k and q are turned on the way.
//
// Blocks walk the work of one batch entry, one warp a task:
//   element formats, int8, fp8, int4   (token, side, head): D elements of one token
//   kivi formats                  (group, side, head): up to 32 tokens. A task encodes its group if that closes in this
//                                 call and then writes the raw tokens into the ring.
//   q                             (token, head)
// Every block judges its entry before it writes: what the host cannot see (rows, counts, lengths, table entries,
// positions) is checked here, and an entry that cannot be is left alone. A length may grow when all blocks of its entry
// have read it. Where they are few (the tokens of decode steps) they are one block or one cluster, which knows: its first
// block reports and writes the length. Where they are many, `grow`, a second launch, judges again and does both.
//
// Bytes per token and head: 4 D read, the stored codes written, so memory is the roof of a prompt. T = 1 is latency:
// rows -> length -> table -> data; k and v, whose place depends on none of them, are read before. Both launches start
// while the kernel before them ends, and read nothing before it has ended.
//
// The bytes are those of the CPU: each value is the same fp32 operation, rounded once, and nothing here may be
// contracted (the _rn intrinsics). A turned value is the exact sum of two exact products in fp64, rounded to fp32 and
// then to the dtype, as on the CPU.
#include <algorithm>
#include <bit>
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
#include "tile/grid.cuh"

namespace rooftile::gpu {
namespace {

using tile::to_float;

constexpr int warps = 4;                             // of a block
constexpr int head_rows = max_head_dim / (4 * 32);   // a row is four values a lane; a token's head is so many at most
constexpr int staged_rows(KvFormat f) { return is_kivi(f) ? kv_group : head_rows; }

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
  int batch, tokens, q_heads, page_bits;
  int entry_bits;                           // 2^entry_bits blocks share one batch entry
  bool together;                            // those are one cluster: no second launch
  bool wide_pool, wide_ring;                // as Strided::wide
};

// ---- may this entry be written? ----

struct Entry {
  int row, tokens;                  // as named; judged: 0 tokens where nothing is to be stored
  int length = 0;                   // tokens stored before this call
  KvFault fault = KvFault::none;    // what this thread found; the rest is known to all threads of the block
};

__device__ std::int64_t position_of(const Rope& r, int b, int token) {
  const std::int64_t at = b * r.position_batch + token * r.position_token;
  return r.wide_positions ? static_cast<const std::int64_t*>(r.positions)[at] : static_cast<const std::int32_t*>(r.positions)[at];
}

__device__ Entry entry_of(const AppendParams& p, int b) {
  return {.row = p.rows ? p.rows[b] : b, .tokens = p.counts ? p.counts[b] : p.tokens};
}

__device__ void judge(const AppendParams& p, int b, Entry& e) {
  const KvCacheView& c = p.c;
  const int tokens = e.tokens;
  e.tokens = 0;
  if (e.row < 0 || e.row >= c.max_rows) {
    e.fault = KvFault::row;
    return;
  }
  if (tokens < 0 || tokens > p.tokens) {
    e.fault = KvFault::count;
    return;
  }
  const int length = tokens == 0 ? 0 : c.lengths[e.row];   // on its way while other things are looked at
  if (p.rope.cos)
    for (int i = threadIdx.x; i < p.tokens; i += blockDim.x) {
      const std::int64_t position = position_of(p.rope, b, i);
      if (position < 0 || position >= p.rope.max_position) e.fault = KvFault::position;
    }
  if (tokens == 0) return;   // a padding row; it may name a row that another entry writes
  bool twice = false;
  if (p.rows)
    for (int i = threadIdx.x; i < p.batch; i += blockDim.x)
      twice = twice || (i != b && p.rows[i] == e.row && (!p.counts || p.counts[i] != 0));
  e.tokens = tokens;
  e.length = length;
  const int capacity = c.max_pages << p.page_bits;   // of 32 bits, as ops have checked
  if (length < 0 || length > capacity) {
    e.fault = KvFault::length;
    return;
  }
  if (tokens > capacity - length) {
    e.fault = KvFault::capacity;
    return;
  }
  if (c.block_table)
    for (int i = (length >> p.page_bits) + threadIdx.x; i <= (length + tokens - 1) >> p.page_bits; i += blockDim.x) {
      const int page = c.block_table[e.row * c.table_stride + i];
      if (page < 0 || page >= c.pages) e.fault = KvFault::page;
    }
  if (twice) e.fault = KvFault::twice;
}

// For every thread of one block of the entry. A row that is none has no number.
__device__ void report(const AppendParams& p, const Entry& e, int b) {
  if (e.fault != KvFault::none && p.c.fault)
    *p.c.fault = static_cast<std::int32_t>(e.fault) + 16 * static_cast<std::int32_t>(e.fault == KvFault::row ? b : e.row);
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

// Scale and minimum as a reader sees them, and the codes they give.
template <class T, KvFormat f>
struct Grid {
  static constexpr bool bf16 = std::is_same_v<T, tile::bf16>;
  static constexpr float smallest = bf16 ? 0x1p-133f : 0x1p-24f;   // subnormal
  static constexpr float largest_scale = rooftile::largest_scale(bf16 ? DType::bf16 : DType::f16, has_min(f));
  static constexpr float top = has_min(f) ? 15.0f : static_cast<float>(qmax(f)), bottom = has_min(f) ? 0.0f : -top;

  T stored_scale, stored_minimum;
  float minimum;

  explicit __device__ Grid(const Range<f>& r) {
    const float nan = __int_as_float(0x7fc00000);   // rounds to the CPU's NaN
    const float width = has_min(f) ? __fsub_rn(r.greatest(), r.least()) : r.greatest();
    const float step = width > 0.0f ? fminf(fmaxf(__fdiv_rn(width, top), smallest), largest_scale) : 0.0f;
    stored_scale = round(r.broken() ? nan : step);
    minimum = 0.0f;
    if constexpr (has_min(f)) {
      constexpr float largest_minimum = bf16 ? 0x1.fep+127f : 65504.0f;
      // + 0: a group of zeros of both signs has minimum +0
      const float least = fminf(fmaxf(__fadd_rn(r.least(), 0.0f), -largest_minimum), largest_minimum);
      stored_minimum = round(r.broken() ? nan : least);
      minimum = to_float(stored_minimum);
    }
    const float scale = to_float(stored_scale);
    good_ = scale > 0.0f;
    factor_ = !bf16 ? 1.0f : scale < 0x1p-64f ? 0x1p+80f : scale > 0x1p+64f ? 0x1p-80f : 1.0f;
    scale_ = __fmul_rn(scale, factor_);
    inverse_ = __frcp_rn(scale_);
  }

  // 0 where the scale is 0 or NaN. The quotient is the correctly rounded one: behind the first correction it errs by
  // less than a unit of its last place, and then the second is exact (Markstein). That holds where nothing under- or
  // overflows; factor_ and the bound keep it from that, except for quotients so small that their code is 0 anyhow.
  __device__ int code(float x) const {
    float a = has_min(f) ? __fsub_rn(x, minimum) : x;
    if constexpr (bf16) a = __fmul_rn(fminf(a, std::numeric_limits<float>::max()), factor_);
    float ratio = __fmul_rn(a, inverse_);
    ratio = __fmaf_rn(__fmaf_rn(-scale_, ratio, a), inverse_, ratio);
    ratio = __fmaf_rn(__fmaf_rn(-scale_, ratio, a), inverse_, ratio);
    if constexpr (f == KvFormat::fp8) return good_ ? e4m3(fminf(fabsf(ratio), top)) | (__float_as_int(x) >> 24 & 0x80) : 0;
    return good_ ? __float2int_rn(fminf(fmaxf(ratio, bottom), top)) : 0;
  }

 private:
  // The E4M3 number nearest to 0 <= x <= 448, ties to the even one: below 2^-6 in steps of 2^-9, else three bits of mantissa.
  static __device__ int e4m3(float x) {
    if (x < 0x1p-6f) return __float2int_rn(x * 0x1p+9f);
    const int bits = __float_as_int(x);
    return ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  }
  static __device__ T round(float x) {
    if (x != x) {
      const std::uint16_t bits = bf16 ? 0x7fc0 : 0x7e00;
      return reinterpret_cast<const T&>(bits);
    }
    return tile::from_float<T>(x);
  }
  float scale_, inverse_, factor_;   // scale_: the stored one times factor_, a power of two
  bool good_;
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
  const int page_size = is_kivi(f) ? kv_group : c.page_size;   // only whether it is 16 matters
  const std::int64_t index = is_v ? v_code_index(f, page_size, c.head_dim, slot, d) : k_code_index(c.head_dim, slot, d);
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
  Quad<T> (*staged)[32];   // [rows][lane]: a lane sees its own column alone
  int b, lane;

  __device__ std::byte* section(const KvCacheView::Plane& plane, std::byte* base, std::int64_t page, int head) const {
    return base + page * plane.page_stride + head * plane.head_stride;
  }
  __device__ std::int64_t page_of(int position) const {   // kv_page
    const int index = position >> p.page_bits;
    return p.c.block_table ? p.c.block_table[e.row * p.c.table_stride + index] : std::int64_t{e.row} * p.c.max_pages + index;
  }
  __device__ int slot_of(int position) const { return position & (p.c.page_size - 1); }
  __device__ Token<T> ring(bool is_v, int position, int head) const {
    const std::int64_t slot = (std::int64_t{e.row} * p.c.kv_heads + head) * kv_ring + position % kv_ring;
    return {reinterpret_cast<T*>(is_v ? p.c.ring_v : p.c.ring_k) + slot * p.c.head_dim, 1, p.wide_ring};
  }

  __device__ bool turns(bool is_v) const { return p.rope.cos && !is_v; }
  __device__ Token<T> given(int token, int head, bool is_v) const { return token_of<T>(is_v ? p.v : p.k, b, token, head); }
  // Quad q of a new token, in the order in which it is stored; V is encoded by eights. Without what a rotation does.
  __device__ Quad<T> given_quad(const Token<T>& from, bool is_v, int q) const {
    if constexpr (!is_element_format(f) && !is_kivi(f))
      if (is_v) return load<ByEight>(from, q, p.c.head_dim);
    return load<InOrder>(from, q, p.c.head_dim);
  }
  __device__ Quad<T> new_quad(int token, int head, bool is_v, int q) const {
    const Token<T> from = given(token, head, is_v);
    return turns(is_v) ? turned(p.rope, position_of(p.rope, b, token), from, q, p.c.head_dim) : given_quad(from, is_v, q);
  }

  // Four values of a new token that were on their way before the entry was judged: the lane's first.
  struct Early {
    Quad<T> quad;
    bool there;
  };
  __device__ void copy_new(const Token<T>& to, int token, int head, bool is_v, const Early& early) const {
    for (int q = lane; 4 * q < p.c.head_dim; q += 32)
      store(to, q, p.c.head_dim, early.there && q == lane ? early.quad : new_quad(token, head, is_v, q));
  }

  // One token as one group; its values are staged from `row` on.
  template <class Order>
  __device__ void encode_token(const KvCacheView::Plane& plane, int position, int head, int row) const {
    const KvCacheView& c = p.c;
    const std::int64_t page = page_of(position);
    const int slot = slot_of(position), padded = padded_head_dim(c.head_dim);
    Range<f> range;
    for (int q = lane; 4 * q < padded; q += 32) {
      const Quad<T> x = staged[row + q / 32][lane];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (Order::dim(q, j) < c.head_dim) range.add(to_float(x.x[j]));
    }
    range.join();
    const Grid<T, f> grid(range);
    if (lane == 0) {
      reinterpret_cast<T*>(section(plane, plane.scale, page, head))[slot] = grid.stored_scale;
      if constexpr (has_min(f)) reinterpret_cast<T*>(section(plane, plane.min, page, head))[slot] = grid.stored_minimum;
    }
    for (int q = lane; 4 * q < padded; q += 32) {
      const Quad<T> x = staged[row + q / 32][lane];
      int codes[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[j] = Order::dim(q, j) < c.head_dim ? grid.code(to_float(x.x[j])) : 0;
      store_codes<f, Order>(c, section(plane, plane.codes, page, head), slot, q, packed<f>(codes));
    }
  }

  // Formats whose groups are one token's.
  __device__ void store_new(int token, int head, bool is_v, const Early& early) const {
    const int position = e.length + token;
    const KvCacheView::Plane& plane = is_v ? p.c.v : p.c.k;
    if constexpr (is_element_format(f)) {
      std::byte* at = section(plane, plane.codes, page_of(position), head) + slot_of(position) * plane.token_stride;
      copy_new({reinterpret_cast<T*>(at), 1, p.wide_pool}, token, head, is_v, early);
    } else {
      for (int q = lane; 4 * q < padded_head_dim(p.c.head_dim); q += 32)
        staged[q / 32][lane] = early.there && q == lane ? early.quad : new_quad(token, head, is_v, q);
      if (is_v)
        encode_token<ByEight>(plane, position, head, 0);
      else
        encode_token<InOrder>(plane, position, head, 0);
    }
  }

  // K of the 32 tokens from `first` on, one group a channel: those that are older than the call lie in the ring.
  __device__ void close_k(int first, int head) const {
    const KvCacheView& c = p.c;
    const std::int64_t page = page_of(first);
    const int slot = slot_of(first), padded = padded_head_dim(c.head_dim);
    for (int q = lane; 4 * q < padded; q += 32) {
      Range<f> range[4];
      const auto stage = [&](int t, const Quad<T>& x) {
        staged[t][lane] = x;
#pragma unroll
        for (int j = 0; j < 4; ++j) range[j].add(to_float(x.x[j]));
      };
      const int old = max(e.length - first, 0), token = first - e.length;
#pragma unroll 8
      for (int t = 0; t < old; ++t) stage(t, load<InOrder>(ring(false, first + t, head), q, c.head_dim));
      if (p.rope.cos) {
#pragma unroll 1
        for (int t = old; t < kv_group; ++t) stage(t, new_quad(token + t, head, false, q));
      } else {
#pragma unroll 4
        for (int t = old; t < kv_group; ++t) stage(t, load<InOrder>(given(token + t, head, false), q, c.head_dim));
      }
      const Grid<T, f> grid[4] = {Grid<T, f>(range[0]), Grid<T, f>(range[1]), Grid<T, f>(range[2]), Grid<T, f>(range[3])};
      const std::int64_t index = std::int64_t{slot / kv_group} * padded + 4 * q;
      T* scales = reinterpret_cast<T*>(section(c.k, c.k.scale, page, head)) + index;
#pragma unroll
      for (int j = 0; j < 4; ++j) scales[j] = grid[j].stored_scale;
      if constexpr (has_min(f)) {
        T* minima = reinterpret_cast<T*>(section(c.k, c.k.min, page, head)) + index;
#pragma unroll
        for (int j = 0; j < 4; ++j) minima[j] = grid[j].stored_minimum;
      }
      std::byte* codes_at = section(c.k, c.k.codes, page, head);
#pragma unroll 4
      for (int t = 0; t < kv_group; ++t) {
        const Quad<T> x = staged[t][lane];
        int codes[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) codes[j] = grid[j].code(to_float(x.x[j]));
        store_codes<f, InOrder>(c, codes_at, slot + t, q, packed<f>(codes));
      }
    }
  }

  // V of the same tokens, a token a group. All of them are staged at once, or as many as there are rows for.
  __device__ void close_v(int first, int head) const {
    const int padded = padded_head_dim(p.c.head_dim), rows = (padded + 4 * 32 - 1) / (4 * 32);
    const int part = rows == 1 ? kv_group : kv_group / head_rows;
    for (int begin = first; begin < first + kv_group; begin += part) {
      for (int q = lane; 4 * q < padded; q += 32)
#pragma unroll 8
        for (int t = 0; t < part; ++t) {
          const int position = begin + t;
          const Token<T> from = position < e.length ? ring(true, position, head) : given(position - e.length, head, true);
          staged[t * rows + q / 32][lane] = load<ByEight>(from, q, p.c.head_dim);
        }
#pragma unroll 2
      for (int t = 0; t < part; ++t) encode_token<ByEight>(p.c.v, begin + t, head, t * rows);
    }
  }

  // Raw tokens into the ring slots of the group from `first` on, one of the call's first two: each slot gets the newest
  // token that belongs there, if it is new. So what a closing group reads from a slot and what overwrites it later are one
  // warp's, in this order. early: of the call's first token.
  __device__ void fill_ring(int first, int head, bool is_v, const Early& early) const {
    const int end = e.length + e.tokens, stop = min(end - first, kv_group);
    for (int i = end - first > kv_ring ? 0 : max(e.length - first, 0); i < stop; ++i) {
      const int position = first + i + (end - 1 - first - i) / kv_ring * kv_ring, token = position - e.length;
      if (token >= 0) copy_new(ring(is_v, position, head), token, head, is_v, {early.quad, early.there && token == 0});
    }
  }

  __device__ void do_group(int index, int head, bool is_v, const Early& early) const {
    const int first = (e.length / kv_group + index) * kv_group;
    if (first + kv_group <= e.length + e.tokens) {
      if (is_v)
        close_v(first, head);
      else
        close_k(first, head);
    }
    __syncwarp();   // the lanes that read a slot of the ring -> the lanes that write it
    if (index < 2) fill_ring(first, head, is_v, early);
  }

  // q_out may be q: a lane reads what another writes.
  __device__ void turn_q(int token, int head) const {
    const Token<T> from = token_of<T>(p.q, b, token, head), to = token_of<T>(p.q_out, b, token, head);
    const std::int64_t position = position_of(p.rope, b, token);
    for (int q = lane; 4 * q < p.c.head_dim; q += 32) staged[q / 32][lane] = turned(p.rope, position, from, q, p.c.head_dim);
    __syncwarp();   // all of the head is read -> it may be overwritten
    for (int q = lane; 4 * q < p.c.head_dim; q += 32) store(to, q, p.c.head_dim, staged[q / 32][lane]);
  }
};

template <class T, KvFormat f>
__global__ __launch_bounds__(warps * 32, is_kivi(f) ? 4 : 6) void append(const __grid_constant__ AppendParams p) {
  __shared__ Quad<T> staged[warps][staged_rows(f)][32];
  const int b = static_cast<int>(blockIdx.x >> p.entry_bits), block = static_cast<int>(blockIdx.x) - (b << p.entry_bits);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, heads = p.c.kv_heads;
  const int first = block * warps + warp, step = warps << p.entry_bits;
  Entry e{};
  const Warp<T, f> w{p, e, staged[warp], b, lane};
  struct Task {
    int head, index;   // index: of the token, or of the group
    bool is_v;
  };
  const auto task_of = [heads](int task) {
    const unsigned of_head = static_cast<unsigned>(task) / static_cast<unsigned>(heads);
    return Task{task - static_cast<int>(of_head) * heads, static_cast<int>(of_head / 2), of_head % 2 != 0};
  };

  // A first token of which nothing has to be known (what turns needs a position).
  const Task early_task = task_of(first);
  const Token<T> early_from = w.given(is_kivi(f) ? 0 : early_task.index, early_task.head, early_task.is_v);
  typename Warp<T, f>::Early early{{}, early_task.index < (is_kivi(f) ? 1 : p.tokens) && !w.turns(early_task.is_v)};
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();
  e = entry_of(p, b);
  if (early.there) early.quad = w.given_quad(early_from, early_task.is_v, lane);
  judge(p, b, e);
  if (__syncthreads_or(e.fault != KvFault::none)) {
    if (p.together && block == 0) report(p, e, b);
    return;
  }
  tile::arrive_at_cluster();

  int stored = e.tokens * 2 * heads;
  if constexpr (is_kivi(f))
    if (e.tokens > 0) stored = ((e.length + e.tokens - 1) / kv_group - e.length / kv_group + 1) * 2 * heads;
  const int tasks = stored + (p.rope.cos ? p.tokens * p.q_heads : 0);
  for (int task = first; task < tasks; task += step) {
    if (task < stored) {
      const Task t = task_of(task);
      if constexpr (is_kivi(f))
        w.do_group(t.index, t.head, t.is_v, early);
      else
        w.store_new(t.index, t.head, t.is_v, early);
      early.there = false;   // it was of the first task
    } else {
      w.turn_q((task - stored) / p.q_heads, (task - stored) % p.q_heads);
    }
  }
  tile::wait_for_cluster();   // all blocks of the entry have read its length -> it may grow
  if (p.together && block == 0 && threadIdx.x == 0 && e.tokens > 0) p.c.lengths[e.row] = e.length + e.tokens;
}

// One block an entry, of those that have several blocks which know nothing of each other.
__global__ __launch_bounds__(256) void grow(const __grid_constant__ AppendParams p) {
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();
  const int b = static_cast<int>(blockIdx.x);
  Entry e = entry_of(p, b);
  judge(p, b, e);
  report(p, e, b);
  if (!__syncthreads_or(e.fault != KvFault::none) && threadIdx.x == 0 && e.tokens > 0) p.c.lengths[e.row] = e.length + e.tokens;
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
    case KvFormat::fp8: return append<T, KvFormat::fp8>;
    case KvFormat::int4: return append<T, KvFormat::int4>;
    case KvFormat::int4_kivi_sym: return append<T, KvFormat::int4_kivi_sym>;
    case KvFormat::int4_kivi: return append<T, KvFormat::int4_kivi>;
    default: return append<T, std::is_same_v<T, tile::bf16> ? KvFormat::bf16 : KvFormat::fp16>;
  }
}

}  // namespace

KernelName kv_append(const char* op, const Context& ctx, const AppendArgs& a) {
  const KvCacheView& c = *a.cache;
  const std::int64_t batch = a.k.shape[0], tokens = a.k.shape[1], q_heads = a.cos.given() ? a.q.shape[2] : 0;
  const std::int64_t groups = (tokens + 2 * (kv_group - 1)) / kv_group;   // that the tokens of a row may touch
  const std::int64_t tasks = c.kv_heads * 2 * (is_kivi(c.format) ? groups : tokens) + tokens * q_heads;
  constexpr std::int64_t most = std::numeric_limits<int>::max() / 4;      // sums of task numbers stay 32 bits
  ROOFTILE_CHECK_KIND(not_supported, tasks <= most && batch <= most, op, ": k has ", tokens, " tokens for each of ", batch,
                      " rows; on a GPU tokens times heads of one row are at most ", most, " a call");
  KernelName name;
  std::snprintf(name.text, sizeof name.text, "cuda_%s_%s_%s", op, rooftile::name(c.dtype), rooftile::name(c.format));
  if (batch == 0 || tokens == 0) return name;

  const DeviceScope scope(op, ctx);
  // Enough blocks to fill the device, but few enough that judging an entry is little beside its work. Where a cluster does
  // it in four rounds of tasks, as many as that takes.
  const std::int64_t cluster = scope.largest_cluster();
  const std::int64_t all = (tasks + warps - 1) / warps, fill = (std::int64_t{scope.sms()} * 16 + batch - 1) / batch;
  const auto blocks = static_cast<std::uint64_t>(std::min({all, fill, all <= 4 * cluster ? cluster : fill}));
  const int entry_bits = std::bit_width(blocks <= static_cast<std::uint64_t>(cluster) ? blocks - 1 : blocks / 2);   // up, or down
  const bool together = 1 << entry_bits <= cluster;
  const AppendParams p{.c = c,
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
                       .page_bits = std::countr_zero(static_cast<unsigned>(c.page_size)),
                       .entry_bits = entry_bits,
                       .together = together,
                       .wide_pool = wide_pool(c),
                       .wide_ring = c.head_dim % 4 == 0 && eights(c.ring_k) && eights(c.ring_v)};
  scope.launch(c.dtype == DType::bf16 ? kernel_for<tile::bf16>(c.format) : kernel_for<tile::half>(c.format), batch << entry_bits,
               warps * 32, 0, p, Overlap::with_previous, together ? 1 << entry_bits : 1);
  if (!together) scope.launch(grow, batch, 256, 0, p, Overlap::with_previous);
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
