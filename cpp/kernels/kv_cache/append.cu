// SPDX-License-Identifier: Apache-2.0
// Append: tokens of k, v [B, T, Hkv, D] -> pages, rings and codes; with cos given, k and q are turned on the way.
//
// Blocks walk the work of one batch entry, one warp a task:
//   q                             (token, two heads)
//   element formats, int8, fp8, int4   (token, side, head): D elements of one token
//   kivi formats                  (group, side, head): up to 32 tokens. A task encodes its group if that closes in this
//                                 call and then writes the raw tokens into the ring. Where a call has so few tokens
//                                 that they overwrite none that a closing group reads, each part of a group (K: 32
//                                 channels, V: 8 tokens) is a task of its own: a decode step waits for the one row that
//                                 closes its group.
// Every block judges its entry before it writes: what the host cannot see (rows, counts, lengths, table entries,
// positions) is checked here, and an entry that cannot be is left alone. A length may grow when all blocks of its entry
// have read it. Where they are few (the tokens of decode steps) they are one block or one cluster, which knows: its
// first block reports and writes the length. Where they are many, `grow`, a second launch, judges again and does both.
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
#include <limits>
#include <type_traits>

#include "core/half.h"
#include "core/hd.h"
#include "core/kernel_name.h"
#include "core/kv_layout.h"
#include "kernels/backend.h"
#include "kernels/launch.h"
#include "kernels/warmup.h"
#include "tile/element.cuh"
#include "tile/grid.cuh"

namespace rooftile::gpu {
namespace {

using tile::to_float;

constexpr int warps = 8;                            // of a block
constexpr int head_rows = max_head_dim / (4 * 32);  // a row is four values a lane; a token's head is so many at most
constexpr int part_tokens = 8;                      // of a closing group: a lane holds a quad of so many tokens
constexpr int staged_rows(KvFormat f) { return is_kivi(f) ? part_tokens : head_rows; }
// Parts of a closing group of one head and side.
ROOFTILE_HD constexpr int parts_of(bool is_v, int head_dim) {
  return is_v ? kv_group / part_tokens : padded_head_dim(head_dim) / 32;
}

struct Strided {  // [B, T, H, D] of 16-bit elements
  void* data = nullptr;
  std::int64_t batch = 0, token = 0, head = 0, dim = 0;  // strides in elements
  bool wide = false;                                     // four neighbours are one 8-byte access
};

struct Rope {  // tables [max_position, pairs], positions [B, T]
  const void *cos = nullptr, *sin = nullptr, *positions = nullptr;
  std::int64_t cos_row = 0, cos_column = 0, sin_row = 0, sin_column = 0, position_batch = 0, position_token = 0;
  std::int64_t max_position = 0;
  int pairs = 0;
  bool fp32 = false, wide_positions = false;  // tables are fp32, else the cache's dtype; positions are int64
  bool wide = false;  // four pairs in a row are one access, and no quad holds parts of two halves
};

struct AppendParams {
  KvCacheView c;
  Strided k, v, q, q_out;
  Rope rope;                          // cos null: nothing turns
  const std::int32_t *rows, *counts;  // [B] or null
  int batch, tokens, q_heads, page_bits;
  int entry_bits;             // 2^entry_bits blocks share one batch entry
  bool together;              // those are one cluster: no second launch
  bool wide_pool, wide_ring;  // as Strided::wide
};

// ---- may this entry be written? ----

struct Entry {
  int row, tokens;                // as named; judged: 0 tokens where nothing is to be stored
  int length = 0;                 // tokens stored before this call
  KvFault fault = KvFault::none;  // what this thread found; the rest is known to all threads of the block
};

__device__ std::int64_t position_of(const Rope& r, int b, int token) {
  const std::int64_t at = b * r.position_batch + token * r.position_token;
  return r.wide_positions ? static_cast<const std::int64_t*>(r.positions)[at]
                          : static_cast<const std::int32_t*>(r.positions)[at];
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
  const int length = tokens == 0 ? 0 : c.lengths[e.row];  // on its way while other things are looked at
  if (p.rope.cos)
    for (int i = threadIdx.x; i < p.tokens; i += blockDim.x) {
      const std::int64_t position = position_of(p.rope, b, i);
      if (position < 0 || position >= p.rope.max_position) e.fault = KvFault::position;
    }
  if (tokens == 0) return;  // a padding row; it may name a row that another entry writes
  bool twice = false;
  if (p.rows)
    for (int i = threadIdx.x; i < p.batch; i += blockDim.x)
      twice = twice || (i != b && p.rows[i] == e.row && (!p.counts || p.counts[i] != 0));
  e.tokens = tokens;
  e.length = length;
  const int capacity = c.max_pages << p.page_bits;  // of 32 bits, as ops have checked
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
    *p.c.fault =
        static_cast<std::int32_t>(e.fault) + 16 * static_cast<std::int32_t>(e.fault == KvFault::row ? b : e.row);
}

// ---- four values of a token ----

template <class T>
struct alignas(8) Quad {  // in words: 16-bit values would lie in a register each
  std::uint32_t words[2];

  __device__ float operator[](int j) const {
    const float2 pair = tile::unpack<T>(words[j / 2]);
    return j % 2 == 0 ? pair.x : pair.y;
  }
  __device__ void set(int j, T x) {
    const std::uint32_t bits = reinterpret_cast<const std::uint16_t&>(x);
    words[j / 2] = j % 2 == 0 ? (words[j / 2] & 0xffff0000u) | bits : (words[j / 2] & 0xffffu) | bits << 16;
  }
  __device__ T get(int j) const {
    const auto bits = static_cast<std::uint16_t>(words[j / 2] >> (16 * (j % 2)));
    return reinterpret_cast<const T&>(bits);
  }
};

// Which dims are quad q of a token. K codes are stored in order; the V codes of d, d + 8, d + 16, d + 24 lie together.
struct InOrder {
  static __device__ int dim(int q, int j) { return 4 * q + j; }
};
struct ByEight {
  static __device__ int dim(int q, int j) { return q / 8 * 32 + q % 8 + 8 * j; }
};

template <class T>
struct Token {  // one head of one token
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
  Quad<T> quad{};
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (const int d = Order::dim(q, j); d < head_dim) quad.set(j, from.at[d * from.stride]);
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
    if (4 * q + j < head_dim) to.at[(4 * q + j) * to.stride] = quad.get(j);
}

// Quad q, in order, of a token that turns, and what each of its values turns with. Past the pairs there is none.
template <class T>
struct Pair {
  Quad<T> own, partner;
};
struct Angles {
  float cos[4], sin[4];
};

template <class T>
__device__ Pair<T> pair_of(const Rope& r, const Token<T>& from, int q, int head_dim) {
  Pair<T> pair{load<InOrder>(from, q, head_dim), {}};
  const auto partner = [&](int d) { return d < r.pairs ? d + r.pairs : d - r.pairs; };
  if (r.wide && from.wide) {
    if (4 * q < 2 * r.pairs) pair.partner = *reinterpret_cast<const Quad<T>*>(from.at + partner(4 * q));
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (4 * q + j < 2 * r.pairs) pair.partner.set(j, from.at[partner(4 * q + j) * from.stride]);
  }
  return pair;
}

template <class T>
__device__ Angles angles_of(const Rope& r, std::int64_t position, int q) {
  const std::int64_t cos = position * r.cos_row, sin = position * r.sin_row;
  Angles a{};
  if (r.wide) {
    const int i = 4 * q < r.pairs ? 4 * q : 4 * q - r.pairs;
    if (i >= r.pairs) return a;
    const auto read = [&](float (&x)[4], const void* table, std::int64_t at) {
      if (r.fp32) {
        const float4 quad = *reinterpret_cast<const float4*>(static_cast<const float*>(table) + at);
        x[0] = quad.x, x[1] = quad.y, x[2] = quad.z, x[3] = quad.w;
      } else {
        const Quad<T> quad = *reinterpret_cast<const Quad<T>*>(static_cast<const T*>(table) + at);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = quad[j];
      }
    };
    read(a.cos, r.cos, cos + i);
    read(a.sin, r.sin, sin + i);
  } else {
    const auto read = [&](const void* table, std::int64_t at) {
      return r.fp32 ? static_cast<const float*>(table)[at] : to_float(static_cast<const T*>(table)[at]);
    };
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int d = 4 * q + j, i = d < r.pairs ? d : d - r.pairs;
      if (i >= r.pairs) continue;
      a.cos[j] = read(r.cos, cos + i * r.cos_column);
      a.sin[j] = read(r.sin, sin + i * r.sin_column);
    }
  }
  return a;
}

template <class T>
__device__ Quad<T> turned(const Rope& r, const Pair<T>& pair, const Angles& a, int q) {
  Quad<T> quad = pair.own;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int d = 4 * q + j;
    const double own = pair.own[j], partner = pair.partner[j], sin = d < r.pairs ? -a.sin[j] : a.sin[j];
    const float y = static_cast<float>(own * a.cos[j] + partner * sin);
    if (d < 2 * r.pairs) quad.set(j, tile::from_float<T>(y));
  }
  return quad;
}

// ---- groups: range, scale, codes ----

// Least and greatest value of a group, as integers in the values' order; symmetric formats: the greatest magnitude.
template <KvFormat f>
struct Range {
  int low = std::numeric_limits<int>::max(), high = has_min(f) ? std::numeric_limits<int>::min() : 0;

  static constexpr int infinity = 0x7f800000;
  static __device__ int flip(int x) { return x ^ ((x >> 31) & 0x7fffffff); }  // its own inverse

  __device__ void add(float x) {
    if constexpr (has_min(f)) {
      const int key = flip(__float_as_int(x));
      low = min(low, key);
      high = max(high, key);
    } else {
      high = max(high, __float_as_int(x) & 0x7fffffff);
    }
  }
  __device__ void join() {  // all lanes hold parts of one group
    if constexpr (has_min(f)) low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
  }
  __device__ void join_with(int lanes) {  // that many lanes on, in turn, another part
    if constexpr (has_min(f)) low = min(low, __shfl_xor_sync(0xffffffffu, low, lanes));
    high = max(high, __shfl_xor_sync(0xffffffffu, high, lanes));
  }
  __device__ void become(const Range& other, bool so) {  // by bits: a choice would be one of addresses, in memory
    const int mask = -static_cast<int>(so);
    low = (low & ~mask) | (other.low & mask);
    high = (high & ~mask) | (other.high & mask);
  }
  __device__ bool broken() const {  // holds a NaN or an infinity: they lie past all numbers
    return high >= infinity || (has_min(f) && low <= flip(infinity | static_cast<int>(0x80000000u)));
  }
  __device__ float least() const { return __int_as_float(flip(low)); }
  __device__ float greatest() const { return __int_as_float(has_min(f) ? flip(high) : high); }
};

// Scale and minimum as a reader sees them, and the codes they give.
template <class T, KvFormat f>
struct Grid {
  static constexpr bool bf16 = std::is_same_v<T, tile::bf16>;
  static constexpr float smallest = bf16 ? 0x1p-133f : 0x1p-24f;  // subnormal
  static constexpr float largest_scale = rooftile::largest_scale(bf16 ? DType::bf16 : DType::f16, has_min(f));
  static constexpr float top = has_min(f) ? 15.0f : static_cast<float>(qmax(f)), bottom = has_min(f) ? 0.0f : -top;

  T stored_scale, stored_minimum;
  float minimum;

  explicit __device__ Grid(const Range<f>& r) {
    const float nan = __int_as_float(0x7fc00000);  // rounds to the CPU's NaN
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
    factor_ = !bf16 ? 1.0f : scale < 0x1p-64f ? 0x1p+80f : scale > 0x1p+64f ? 0x1p-80f : 1.0f;
    scale_ = __fmul_rn(scale, factor_);
    inverse_ = __frcp_rn(scale_);
  }

  // That of a lane, for codes.
  __device__ Grid of(int lane) const {
    Grid grid = *this;
    if constexpr (has_min(f)) grid.minimum = __shfl_sync(0xffffffffu, minimum, lane);
    grid.scale_ = __shfl_sync(0xffffffffu, scale_, lane);
    grid.inverse_ = __shfl_sync(0xffffffffu, inverse_, lane);
    if constexpr (bf16) grid.factor_ = __shfl_sync(0xffffffffu, factor_, lane);
    return grid;
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
    if constexpr (f == KvFormat::fp8)
      return scale_ > 0.0f ? e4m3(fminf(fabsf(ratio), top)) | (__float_as_int(x) >> 24 & 0x80) : 0;
    return scale_ > 0.0f ? __float2int_rn(fminf(fmaxf(ratio, bottom), top)) : 0;
  }

 private:
  // The E4M3 number nearest to 0 <= x <= 448, ties to the even one: below 2^-6 in steps of 2^-9, else three bits of
  // mantissa.
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
  float scale_, inverse_, factor_;  // scale_: the stored one times factor_, a power of two
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
  const int page_size = is_kivi(f) ? kv_group : c.page_size;  // only whether it is 16 matters
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

template <class T, KvFormat f, bool turning>  // turning: cos is given
struct Warp {
  const AppendParams& p;
  const Entry& e;
  Quad<T> (*staged)[32];  // [rows][lane]: a lane sees its own column alone
  int b, lane;

  __device__ std::byte* section(const KvCacheView::Plane& plane, std::byte* base, std::int64_t page, int head) const {
    return base + page * plane.page_stride + head * plane.head_stride;
  }
  __device__ std::int64_t page_of(int position) const {  // kv_page
    const int index = position >> p.page_bits;
    return p.c.block_table ? p.c.block_table[e.row * p.c.table_stride + index]
                           : std::int64_t{e.row} * p.c.max_pages + index;
  }
  __device__ int slot_of(int position) const { return position & (p.c.page_size - 1); }
  __device__ Token<T> ring(bool is_v, int position, int head) const {
    const std::int64_t slot = (std::int64_t{e.row} * p.c.kv_heads + head) * kv_ring + position % kv_ring;
    return {reinterpret_cast<T*>(is_v ? p.c.ring_v : p.c.ring_k) + slot * p.c.head_dim, 1, p.wide_ring};
  }

  __device__ bool turns(bool is_v) const { return turning && !is_v; }
  __device__ Token<T> given(int token, int head, bool is_v) const {
    return token_of<T>(is_v ? p.v : p.k, b, token, head);
  }
  // Quad q of a new token, in the order in which it is stored; V is encoded by eights. Without what a rotation does.
  __device__ Quad<T> given_quad(const Token<T>& from, bool is_v, int q) const {
    if constexpr (!is_element_format(f) && !is_kivi(f))
      if (is_v) return load<ByEight>(from, q, p.c.head_dim);
    return load<InOrder>(from, q, p.c.head_dim);
  }
  __device__ Quad<T> new_quad(int token, int head, bool is_v, int q) const {
    const Token<T> from = given(token, head, is_v);
    if constexpr (turning)
      if (!is_v)
        return turned(p.rope, pair_of(p.rope, from, q, p.c.head_dim),
                      angles_of<T>(p.rope, position_of(p.rope, b, token), q), q);
    return given_quad(from, is_v, q);
  }

  // What was on its way before the entry was judged: the lane's first quad of a new token, or of two heads of q,
  // turned.
  struct Early {
    Quad<T> quad[2];
    bool there;
  };
  __device__ void copy_new(const Token<T>& to, int token, int head, bool is_v, const Early& early, bool there) const {
    for (int q = lane; 4 * q < p.c.head_dim; q += 32)
      store(to, q, p.c.head_dim, there && q == lane ? early.quad[0] : new_quad(token, head, is_v, q));
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
        if (Order::dim(q, j) < c.head_dim) range.add(x[j]);
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
      for (int j = 0; j < 4; ++j) codes[j] = Order::dim(q, j) < c.head_dim ? grid.code(x[j]) : 0;
      store_codes<f, Order>(c, section(plane, plane.codes, page, head), slot, q, packed<f>(codes));
    }
  }

  // Formats whose groups are one token's.
  __device__ void store_new(int token, int head, bool is_v, const Early& early) const {
    const int position = e.length + token;
    const KvCacheView::Plane& plane = is_v ? p.c.v : p.c.k;
    if constexpr (is_element_format(f)) {
      std::byte* at = section(plane, plane.codes, page_of(position), head) + slot_of(position) * plane.token_stride;
      copy_new({reinterpret_cast<T*>(at), 1, p.wide_pool}, token, head, is_v, early, early.there);
    } else {
      for (int q = lane; 4 * q < padded_head_dim(p.c.head_dim); q += 32)
        staged[q / 32][lane] = early.there && q == lane ? early.quad[0] : new_quad(token, head, is_v, q);
      if (is_v) encode_token<ByEight>(plane, position, head, 0);
      else encode_token<InOrder>(plane, position, head, 0);
    }
  }

  // Quad q of eight tokens of a closing group, those that are older than the call from the ring: all on their way at
  // once.
  template <class Position>
  __device__ void fetch(Quad<T> (&x)[part_tokens], bool is_v, int head, int q, Position position) const {
    const KvCacheView& c = p.c;
    const Strided& s = is_v ? p.v : p.k;
    const Token<T> first_new = given(0, head, is_v), first_slot = ring(is_v, 0, head);
    const auto is_new = [&](int i) { return position(i) >= e.length; };
    const auto at = [&](int i) {
      return is_new(i) ? first_new.at + (position(i) - e.length) * s.token
                       : first_slot.at + position(i) % kv_ring * c.head_dim;
    };
    const bool wide = first_slot.wide && first_new.wide;
    if (wide && 4 * q < c.head_dim) {
#pragma unroll
      for (int i = 0; i < part_tokens; ++i) x[i] = *reinterpret_cast<const Quad<T>*>(at(i) + 4 * q);
    } else {
#pragma unroll
      for (int i = 0; i < part_tokens; ++i) x[i] = {};
    }
    if (wide && !turns(is_v)) return;
    const auto slow = [&](int i) { return !wide || (turns(is_v) && is_new(i)); };
#pragma unroll 1
    for (int i = 0; i < part_tokens; ++i)
      if (slow(i))
        staged[i][lane] = is_new(i) && turns(is_v)
                              ? new_quad(position(i) - e.length, head, is_v, q)
                              : load<InOrder>(Token<T>{at(i), is_new(i) ? s.dim : 1, false}, q, c.head_dim);
#pragma unroll
    for (int i = 0; i < part_tokens; ++i)
      if (slow(i)) x[i] = staged[i][lane];
  }

  // K of 32 channels of the 32 tokens from `first` on, one group a channel: a lane has four channels of every fourth
  // token.
  __device__ void close_k(int first, int head, int part) const {
    const KvCacheView& c = p.c;
    const int q = 8 * part + lane % 8, token = lane / 8;
    Quad<T> x[part_tokens];
    fetch(x, false, head, q, [&](int i) { return first + token + 4 * i; });
    Range<f> range[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < part_tokens; ++i) range[j].add(x[i][j]);
      range[j].join_with(8);
      range[j].join_with(16);
    }
    // The four lanes of four channels take one each.
    Range<f> mine = range[0];
#pragma unroll
    for (int j = 1; j < 4; ++j) mine.become(range[j], token == j);
    const Grid<T, f> grid(mine);
    const std::int64_t page = page_of(first);
    const int slot = slot_of(first);
    const std::int64_t index = std::int64_t{slot / kv_group} * padded_head_dim(c.head_dim) + 4 * q + token;
    reinterpret_cast<T*>(section(c.k, c.k.scale, page, head))[index] = grid.stored_scale;
    if constexpr (has_min(f)) reinterpret_cast<T*>(section(c.k, c.k.min, page, head))[index] = grid.stored_minimum;
    std::uint32_t words[part_tokens] = {};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Grid<T, f> of_channel = grid.of(8 * j + lane % 8);
#pragma unroll
      for (int i = 0; i < part_tokens; ++i)
        words[i] |= (static_cast<std::uint32_t>(of_channel.code(x[i][j])) & 15) << (4 * j);
    }
    std::byte* codes_at = section(c.k, c.k.codes, page, head);
#pragma unroll
    for (int i = 0; i < part_tokens; ++i) store_codes<f, InOrder>(c, codes_at, slot + token + 4 * i, q, words[i]);
  }

  // V of eight of those tokens, a token a group: the eight whose codes are whole 16-byte pieces, 0 1 8 9 16 17 24 25
  // and so on.
  __device__ void close_v(int first, int head, int part) const {
    const KvCacheView& c = p.c;
    const int padded = padded_head_dim(c.head_dim), pieces = (padded + 4 * 32 - 1) / (4 * 32);
    const auto slot_in_group = [&](int i) { return 8 * (i / 2) + 2 * part + i % 2; };
    const auto position = [&](int i) { return first + slot_in_group(i); };
    Quad<T> x[part_tokens];
    Range<f> range[part_tokens];
#pragma unroll 1
    for (int piece = 0; piece < pieces; ++piece) {
      const int q = 32 * piece + lane;
      fetch(x, true, head, q, position);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (4 * q + j < c.head_dim)
#pragma unroll
          for (int i = 0; i < part_tokens; ++i) range[i].add(x[i][j]);
    }
#pragma unroll
    for (int i = 0; i < part_tokens; ++i) range[i].join();
    Range<f> mine = range[0];
#pragma unroll
    for (int i = 1; i < part_tokens; ++i) mine.become(range[i], lane % part_tokens == i);
    const Grid<T, f> grid(mine);
    const std::int64_t page = page_of(first);
    const int slot = slot_of(first);
    if (lane < part_tokens) {
      reinterpret_cast<T*>(section(c.v, c.v.scale, page, head))[slot + slot_in_group(lane)] = grid.stored_scale;
      if constexpr (has_min(f))
        reinterpret_cast<T*>(section(c.v, c.v.min, page, head))[slot + slot_in_group(lane)] = grid.stored_minimum;
    }
    std::uint32_t* words = reinterpret_cast<std::uint32_t*>(staged);  // of a dim, the codes of the eight tokens
#pragma unroll 1
    for (int piece = 0; piece < pieces; ++piece) {
      const int q = 32 * piece + lane;
      if (pieces > 1) fetch(x, true, head, q, position);  // again: all of a token is more than a lane can hold
      std::uint32_t of_dim[4] = {};
#pragma unroll
      for (int i = 0; i < part_tokens; ++i) {
        const Grid<T, f> of_token = grid.of(i);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          of_dim[j] |= (static_cast<std::uint32_t>(of_token.code(x[i][j])) & 15) << (16 * (i % 2) + 4 * (i / 2));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (4 * q + j >= c.head_dim) of_dim[j] = 0;
      __syncwarp();  // what was staged or read from there is done with
      reinterpret_cast<uint4*>(words)[lane] = {of_dim[0], of_dim[1], of_dim[2], of_dim[3]};
      __syncwarp();
      const int tile = 4 * piece + lane / 8;
      std::uint32_t out[4] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint32_t word = words[lane / 8 * 32 + lane % 8 + 8 * j];
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] |= (word >> (4 * i) & 0x000f000fu) << (4 * j);
      }
      __syncwarp();
      if (32 * tile >= padded) continue;
      const std::int64_t index = v_code_index(f, kv_group, c.head_dim, slot + 2 * part, 32 * tile + lane % 8);
      *reinterpret_cast<uint4*>(section(c.v, c.v.codes, page, head) + index / 2) = {out[0], out[1], out[2], out[3]};
    }
  }

  // Raw tokens into the ring slots of the group from `first` on, one of the call's first two: each slot gets the newest
  // token that belongs there, if it is new. So what a closing group reads from a slot and what overwrites it later are
  // one warp's, in this order. early: of the call's first token.
  __device__ void fill_ring(int first, int head, bool is_v, const Early& early) const {
    const int end = e.length + e.tokens, stop = min(end - first, kv_group);
    for (int i = end - first > kv_ring ? 0 : max(e.length - first, 0); i < stop; ++i) {
      const int position = first + i + (end - 1 - first - i) / kv_ring * kv_ring, token = position - e.length;
      if (token >= 0) copy_new(ring(is_v, position, head), token, head, is_v, early, early.there && token == 0);
    }
  }

  // Parts [begin, end) of a closing group, then the ring.
  __device__ void do_group(int index, int head, bool is_v, int begin, int end, bool fill, const Early& early) const {
    const int first = (e.length / kv_group + index) * kv_group;
#pragma unroll 1
    for (int part = begin; part < end; ++part)
      if (is_v) close_v(first, head, part);
      else close_k(first, head, part);
    __syncwarp();  // the lanes that read a slot of the ring -> the lanes that write it
    if (fill && index < 2) fill_ring(first, head, is_v, early);
  }

  // Heads 2 * pair and the next. q_out may be q: a lane reads what another writes.
  __device__ void turn_q(int token, int pair, const Early& early) const {
    const std::int64_t position = position_of(p.rope, b, token);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int head = 2 * pair + i;
      if (head == p.q_heads) break;
      const Token<T> from = token_of<T>(p.q, b, token, head), to = token_of<T>(p.q_out, b, token, head);
      for (int q = lane; 4 * q < p.c.head_dim; q += 32)
        staged[q / 32][lane] = early.there && q == lane ? (i == 0 ? early.quad[0] : early.quad[1])
                                                        : turned(p.rope, pair_of(p.rope, from, q, p.c.head_dim),
                                                                 angles_of<T>(p.rope, position, q), q);
      __syncwarp();  // all of the head is read -> it may be overwritten
      for (int q = lane; 4 * q < p.c.head_dim; q += 32) store(to, q, p.c.head_dim, staged[q / 32][lane]);
    }
  }
};

template <class T, KvFormat f, bool turning>
__global__ __launch_bounds__(warps * 32, 4 - (turning ? 1 : 0) -
                                             (is_kivi(f) ? 1 : 0)) void append(const __grid_constant__ AppendParams p) {
  __shared__ __align__(16) Quad<T> staged[warps][staged_rows(f)][32];
  const int b = static_cast<int>(blockIdx.x >> p.entry_bits),
            block = static_cast<int>(blockIdx.x) - (b << p.entry_bits);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, heads = p.c.kv_heads;
  const int first = block * warps + warp, step = warps << p.entry_bits;
  const int q_pairs = turning ? (p.q_heads + 1) / 2 : 1, turns = turning ? p.tokens * q_pairs : 0;
  Entry e{};
  const Warp<T, f, turning> w{p, e, staged[warp], b, lane};
  struct Task {
    int head, index;  // index: of the token, or of the group
    bool is_v;
  };
  const auto task_of = [heads](int task) {
    const unsigned of_head = static_cast<unsigned>(task) / static_cast<unsigned>(heads);
    return Task{task - static_cast<int>(of_head) * heads, static_cast<int>(of_head / 2), of_head % 2 != 0};
  };

  // Values of the first task, of which nothing has to be known; and what turns them, where the position may be used.
  const bool early_q = first < turns;
  const Task early_task = early_q ? Task{2 * (first % q_pairs), first / q_pairs, false} : task_of(first - turns);
  const int token = is_kivi(f) && !early_q ? 0 : early_task.index;
  const Token<T> from =
      early_q ? token_of<T>(p.q, b, token, early_task.head) : w.given(token, early_task.head, early_task.is_v);
  typename Warp<T, f, turning>::Early early{{}, early_task.index < (is_kivi(f) && !early_q ? 1 : p.tokens)};
  const bool early_turns = early.there && w.turns(early_task.is_v), second = early_q && early_task.head + 1 < p.q_heads;
  Pair<T> pair[2] = {};
  Angles angles{};
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();
  e = entry_of(p, b);
  if (early_turns) {
    const std::int64_t position = position_of(p.rope, b, token);
    pair[0] = pair_of(p.rope, from, lane, p.c.head_dim);
    if (second) pair[1] = pair_of(p.rope, Token<T>{from.at + p.q.head, from.stride, from.wide}, lane, p.c.head_dim);
    if (position >= 0 && position < p.rope.max_position) angles = angles_of<T>(p.rope, position, lane);
  } else if (early.there) {
    early.quad[0] = w.given_quad(from, early_task.is_v, lane);
  }
  judge(p, b, e);
  if (__syncthreads_or(e.fault != KvFault::none)) {
    if (p.together && block == 0) report(p, e, b);
    return;
  }
  tile::arrive_at_cluster();
  if (early_turns)
#pragma unroll
    for (int i = 0; i < 2; ++i) early.quad[i] = turned(p.rope, pair[i], angles, lane);

  int stored = e.tokens * 2 * heads,
      closing = 0;  // tasks; closing: parts of the one group that closes, where they are tasks
  const bool in_parts = is_kivi(f) && p.tokens <= kv_group;
  if constexpr (is_kivi(f))
    if (e.tokens > 0) {
      const int groups = (e.length + e.tokens) / kv_group - e.length / kv_group;  // that close
      stored = ((e.length + e.tokens - 1) / kv_group - e.length / kv_group + 1) * 2 * heads;
      if (in_parts && groups > 0) closing = heads * (parts_of(false, p.c.head_dim) + parts_of(true, p.c.head_dim));
    }
  for (int task = first; task < turns + stored + closing; task += step) {
    const int of_stored = task - turns;
    if (turning && of_stored < 0) {
      w.turn_q(task / q_pairs, task % q_pairs, early);
    } else if constexpr (is_kivi(f)) {
      Task t = task_of(of_stored);
      int begin = 0, end = 0;
      if (of_stored >= stored) {
        const int parts_v = parts_of(true, p.c.head_dim), part = (of_stored - stored) / heads;
        t = {(of_stored - stored) % heads, 0, part < parts_v};
        begin = t.is_v ? part : part - parts_v;
        end = begin + 1;
      } else if (!in_parts && (e.length / kv_group + t.index + 1) * kv_group <= e.length + e.tokens) {
        end = parts_of(t.is_v, p.c.head_dim);
      }
      w.do_group(t.index, t.head, t.is_v, begin, end, of_stored < stored, early);
    } else {
      const Task t = task_of(of_stored);
      w.store_new(t.index, t.head, t.is_v, early);
    }
    early.there = false;  // it was of the first task
  }
  tile::wait_for_cluster();  // all blocks of the entry have read its length -> it may grow
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
  if (!__syncthreads_or(e.fault != KvFault::none) && threadIdx.x == 0 && e.tokens > 0)
    p.c.lengths[e.row] = e.length + e.tokens;
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
  Rope r{.cos = a.cos.data,
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
  const std::uintptr_t quad = r.fp32 ? 16 : 8;  // bytes
  r.wide = r.pairs % 4 == 0 && r.cos_column == 1 && r.sin_column == 1 &&
           reinterpret_cast<std::uintptr_t>(r.cos) % quad == 0 && reinterpret_cast<std::uintptr_t>(r.sin) % quad == 0 &&
           (r.max_position <= 1 || (r.cos_row % 4 == 0 && r.sin_row % 4 == 0));
  return r;
}

bool wide_pool(const KvCacheView& c) {
  if (!is_element_format(c.format)) return false;
  bool wide = c.head_dim % 4 == 0;
  for (const KvCacheView::Plane* plane : {&c.k, &c.v})
    wide = wide && eights(plane->codes) && plane->page_stride % 8 == 0 && plane->head_stride % 8 == 0 &&
           plane->token_stride % 8 == 0;
  return wide;
}

using Kernel = void (*)(AppendParams);

template <class T, bool turning>
Kernel kernel_for(KvFormat f) {
  switch (f) {
    case KvFormat::int8:
      return append<T, KvFormat::int8, turning>;
    case KvFormat::fp8:
      return append<T, KvFormat::fp8, turning>;
    case KvFormat::int4:
      return append<T, KvFormat::int4, turning>;
    case KvFormat::int4_kivi_sym:
      return append<T, KvFormat::int4_kivi_sym, turning>;
    case KvFormat::int4_kivi:
      return append<T, KvFormat::int4_kivi, turning>;
    default:
      return append < T, std::is_same_v<T, tile::bf16> ? KvFormat::bf16 : KvFormat::fp16, turning > ;
  }
}

template <class T>
Kernel kernel_for(KvFormat f, bool turning) {
  return turning ? kernel_for<T, true>(f) : kernel_for<T, false>(f);
}

}  // namespace

KernelName kv_append(const char* op, const Context& ctx, const AppendArgs& a) {
  const KvCacheView& c = *a.cache;
  const std::int64_t batch = a.k.shape[0], tokens = a.k.shape[1], q_heads = a.cos.given() ? a.q.shape[2] : 0;
  const std::int64_t groups = (tokens + 2 * (kv_group - 1)) / kv_group;  // that the tokens of a row may touch
  const std::int64_t tasks = c.kv_heads * 2 * (is_kivi(c.format) ? groups : tokens) + tokens * ((q_heads + 1) / 2);
  constexpr std::int64_t most = std::numeric_limits<int>::max() / 4;  // sums of task numbers stay 32 bits
  ROOFTILE_CHECK_KIND(not_supported, tasks <= most && batch <= most, op, ": k has ", tokens, " tokens for each of ",
                      batch, " rows; on a GPU tokens times heads of one row are at most ", most, " a call");
  const KernelName ran = kernel_name("cuda_", op, "_", name(c.dtype), "_", name(c.format));
  if (batch == 0 || tokens == 0) return ran;

  const DeviceScope scope(op, ctx);
  // Enough blocks to fill the device, but few enough that judging an entry is little beside its work. Where a cluster
  // does it in two rounds of tasks, as many as that takes. A group that closes in parts has warps for two rounds, where
  // they all run at once and leave room for the launch behind.
  const std::int64_t cluster = scope.largest_cluster(), sms = scope.sms();
  const bool in_parts = is_kivi(c.format) && tokens <= kv_group;
  const std::int64_t parts = in_parts ? c.kv_heads * (parts_of(false, c.head_dim) + parts_of(true, c.head_dim)) : 0;
  const auto blocks_of = [](std::int64_t n) { return (n + warps - 1) / warps; };
  const std::int64_t all = std::max(blocks_of(tasks), std::min({blocks_of((parts + 1) / 2), sms * 4 / batch, cluster}));
  const std::int64_t fill = (sms * 8 + batch - 1) / batch;
  const auto blocks = static_cast<std::uint64_t>(std::min({all, fill, all <= 2 * cluster ? cluster : fill}));
  const int entry_bits =
      std::bit_width(blocks <= static_cast<std::uint64_t>(cluster) ? blocks - 1 : blocks / 2);  // up, or down
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
  const Kernel kernel =
      (c.dtype == DType::bf16 ? kernel_for<tile::bf16> : kernel_for<tile::half>)(c.format, p.rope.cos != nullptr);
  scope.launch(kernel, batch << entry_bits, warps * 32, 0, p, Overlap::with_previous, together ? 1 << entry_bits : 1);
  if (!together) scope.launch(grow, batch, 256, 0, p, Overlap::with_previous);
  return ran;
}

void load_append_kernels(const char* op) {
  for (int f = static_cast<int>(KvFormat::fp16); f < kv_format_count; ++f)
    for (const bool turning : {false, true}) {
      load_kernel(op, kernel_for<tile::half>(static_cast<KvFormat>(f), turning));
      load_kernel(op, kernel_for<tile::bf16>(static_cast<KvFormat>(f), turning));
    }
  load_kernel(op, grow);
}

}  // namespace rooftile::gpu
