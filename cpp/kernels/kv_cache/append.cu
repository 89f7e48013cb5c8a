// SPDX-License-Identifier: Apache-2.0
// kv_append and rope_append: store new tokens of k, v [B, T, Hkv, D] in pages, rings and codes. With cos given, k and q
// are rotated (RoPE) first; q goes to q_out.
//
// The CTAs of one batch entry divide its work tiles; a work tile is one warp's:
//   q                                  (token, two heads)
//   element formats, int8, fp8, int4   (token, side, head): D elements of one token; side is K or V
//   kivi formats                       (group, side, head): up to 32 tokens. The warp encodes the group if the group
//                                      closes in this call, and then writes the raw tokens into the ring.
// A kivi call of at most 32 tokens overwrites no ring entry that a closing group reads. There the encoding of a closing
// group is sliced: each slice (K: 32 channels, V: 8 tokens) is a work tile of its own, because a decode step waits for
// the one row that closes a group.
//
// Every CTA validates its batch entry before it writes: row, count, length, block-table entries and positions lie in
// device memory, where the host cannot check them. An invalid entry is left unchanged. An entry's length may be
// advanced only after all CTAs of the entry have read it. For few tokens (decode steps) the CTAs of an entry are one
// CTA or one cluster: after the cluster barrier its first CTA reports a fault or writes the length. For many tokens the
// CTAs of an entry cannot synchronise: a second kernel, `commit_lengths`, validates again and reports or writes the
// length.
//
// Bytes per token and head: 4 D read, the stored codes written; memory bandwidth bounds a prompt. T = 1 is bound by the
// latency of the chain row -> length -> block table -> data; k and v are loaded before the chain, because their
// addresses do not depend on it. Both kernels use PDL: they start while the previous kernel ends and read its results
// only after wait_for_previous_kernel.
//
// The stored bytes equal the CPU's. Every value goes through the same fp32 operations, each rounded once; the _rn
// intrinsics keep the compiler from contracting them. A rotated value is the exact sum of two exact products in fp64,
// rounded to fp32 and then to the dtype, as on the CPU.
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
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {
namespace {

using tile::to_float;

constexpr int warps = 8;                            // of a CTA
constexpr int head_rows = max_head_dim / (4 * 32);  // warp-wide rows of 4 values a lane in one head of a token
constexpr int slice_tokens = 8;                     // of a slice of a closing group: a lane holds 4 values of each
constexpr int staged_rows(KvFormat f) { return is_kivi(f) ? slice_tokens : head_rows; }
// Slices of a closing group of one head and side.
ROOFTILE_HD constexpr int slices_of(bool is_v, int head_dim) {
  return is_v ? kv_group / slice_tokens : padded_head_dim(head_dim) / 32;
}

struct Strided {  // [B, T, H, D] of 16-bit elements
  void* data = nullptr;
  std::int64_t batch = 0, token = 0, head = 0, dim = 0;  // strides in elements
  bool vec4 = false;                                     // four neighbours may move in one 8-byte access
};

struct Rope {  // tables [max_position, pairs], positions [B, T]
  const void *cos = nullptr, *sin = nullptr, *positions = nullptr;
  std::int64_t cos_row = 0, cos_column = 0, sin_row = 0, sin_column = 0, position_batch = 0, position_token = 0;
  std::int64_t max_position = 0;
  int pairs = 0;
  bool fp32 = false,
       int64_positions = false;  // tables are fp32, else the cache's dtype; positions are int64, else int32
  bool vec4 = false;             // four neighbouring pairs are one access, and no Vec4 straddles the two halves
};

struct AppendParams {
  KvCacheView c;
  Strided k, v, q, q_out;
  Rope rope;                          // cos null: no rotation
  const std::int32_t *rows, *counts;  // [B] or null
  int batch, tokens, q_heads, log2_page_size;
  int log2_entry_ctas;        // 2^log2_entry_ctas CTAs share one batch entry
  bool one_cluster;           // the CTAs of an entry are one cluster; commit_lengths is not launched
  bool vec4_pool, vec4_ring;  // as Strided::vec4
};

// ---- validation of a batch entry ----

struct Entry {
  int row, tokens;                // as the caller gave them; after validate: tokens = 0 if nothing is to be stored
  int length = 0;                 // tokens stored before this call
  KvFault fault = KvFault::none;  // found by this thread alone; the other members are equal in all threads of the CTA
};

__device__ std::int64_t position_of(const Rope& r, int b, int token) {
  const std::int64_t at = b * r.position_batch + token * r.position_token;
  return r.int64_positions ? static_cast<const std::int64_t*>(r.positions)[at]
                           : static_cast<const std::int32_t*>(r.positions)[at];
}

__device__ Entry load_entry(const AppendParams& p, int b) {
  return {.row = p.rows ? p.rows[b] : b, .tokens = p.counts ? p.counts[b] : p.tokens};
}

__device__ void validate(const AppendParams& p, int b, Entry& e) {
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
  const int length = tokens == 0 ? 0 : c.lengths[e.row];  // the load overlaps with the checks of positions and rows
  if (p.rope.cos)
    for (int i = threadIdx.x; i < p.tokens; i += blockDim.x) {
      const std::int64_t position = position_of(p.rope, b, i);
      if (position < 0 || position >= p.rope.max_position) e.fault = KvFault::position;
    }
  if (tokens == 0) return;  // a padding entry; its row may be one that another entry writes
  bool twice = false;
  if (p.rows)
    for (int i = threadIdx.x; i < p.batch; i += blockDim.x)
      twice = twice || (i != b && p.rows[i] == e.row && (!p.counts || p.counts[i] != 0));
  e.tokens = tokens;
  e.length = length;
  const int capacity = c.max_pages << p.log2_page_size;  // fits 32 bits: ops have checked this
  if (length < 0 || length > capacity) {
    e.fault = KvFault::length;
    return;
  }
  if (tokens > capacity - length) {
    e.fault = KvFault::capacity;
    return;
  }
  if (c.block_table)
    for (int i = (length >> p.log2_page_size) + threadIdx.x; i <= (length + tokens - 1) >> p.log2_page_size;
         i += blockDim.x) {
      const int page = c.block_table[e.row * c.table_stride + i];
      if (page < 0 || page >= c.pages) e.fault = KvFault::page;
    }
  if (twice) e.fault = KvFault::twice;
}

// Called by all threads of one CTA of the entry. For an invalid row the error word holds the batch entry b in place of
// the row.
__device__ void report_fault(const AppendParams& p, const Entry& e, int b) {
  if (e.fault != KvFault::none && p.c.fault)
    *p.c.fault =
        static_cast<std::int32_t>(e.fault) + 16 * static_cast<std::int32_t>(e.fault == KvFault::row ? b : e.row);
}

// ---- four values of a token ----

template <class T>
struct alignas(8) Vec4 {   // packed in words: four 16-bit members would take a register each
  std::uint32_t words[2];  // (2 x 2 elements of T)

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

// The channels of Vec4 number vi of a token. K codes are stored in order; V codes store d, d + 8, d + 16, d + 24
// together.
struct InOrder {
  static __device__ int dim(int vi, int j) { return 4 * vi + j; }
};
struct InterleavedBy8 {
  static __device__ int dim(int vi, int j) { return vi / 8 * 32 + vi % 8 + 8 * j; }
};

template <class T>
struct TokenHead {  // one head of one token: D elements
  T* at;
  std::int64_t stride;
  bool vec4;
};
template <class T>
__device__ TokenHead<T> token_head(const Strided& s, int b, int token, int head) {
  return {static_cast<T*>(s.data) + (b * s.batch + token * s.token + head * s.head), s.dim, s.vec4};
}

// Loads Vec4 number vi of a token's head; elements past head_dim are 0.
template <class Order, class T>
__device__ Vec4<T> load(const TokenHead<T>& from, int vi, int head_dim) {
  if constexpr (std::is_same_v<Order, InOrder>)
    if (from.vec4 && 4 * vi < head_dim) return *reinterpret_cast<const Vec4<T>*>(from.at + 4 * vi);
  Vec4<T> vec{};
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (const int d = Order::dim(vi, j); d < head_dim) vec.set(j, from.at[d * from.stride]);
  return vec;
}

template <class T>
__device__ void store(const TokenHead<T>& to, int vi, int head_dim, const Vec4<T>& vec) {
  if (to.vec4 && 4 * vi < head_dim) {
    *reinterpret_cast<Vec4<T>*>(to.at + 4 * vi) = vec;
    return;
  }
#pragma unroll
  for (int j = 0; j < 4; ++j)
    if (4 * vi + j < head_dim) to.at[(4 * vi + j) * to.stride] = vec.get(j);
}

// Vec4 number vi of a token to rotate, and the rotation partner of each element; partners past the pairs are 0.
template <class T>
struct RotaryPair {
  Vec4<T> own, partner;
};
struct Angles {
  float cos[4], sin[4];  // (4 elements of a Vec4)
};

template <class T>
__device__ RotaryPair<T> rotary_pair(const Rope& r, const TokenHead<T>& from, int vi, int head_dim) {
  RotaryPair<T> pair{load<InOrder>(from, vi, head_dim), {}};
  const auto partner = [&](int d) { return d < r.pairs ? d + r.pairs : d - r.pairs; };
  if (r.vec4 && from.vec4) {
    if (4 * vi < 2 * r.pairs) pair.partner = *reinterpret_cast<const Vec4<T>*>(from.at + partner(4 * vi));
  } else {
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (4 * vi + j < 2 * r.pairs) pair.partner.set(j, from.at[partner(4 * vi + j) * from.stride]);
  }
  return pair;
}

template <class T>
__device__ Angles load_angles(const Rope& r, std::int64_t position, int vi) {
  const std::int64_t cos = position * r.cos_row, sin = position * r.sin_row;
  Angles a{};
  if (r.vec4) {
    const int i = 4 * vi < r.pairs ? 4 * vi : 4 * vi - r.pairs;
    if (i >= r.pairs) return a;
    const auto read = [&](float (&x)[4], const void* table, std::int64_t at) {
      if (r.fp32) {
        const float4 vec = *reinterpret_cast<const float4*>(static_cast<const float*>(table) + at);
        x[0] = vec.x, x[1] = vec.y, x[2] = vec.z, x[3] = vec.w;
      } else {
        const Vec4<T> vec = *reinterpret_cast<const Vec4<T>*>(static_cast<const T*>(table) + at);
#pragma unroll
        for (int j = 0; j < 4; ++j) x[j] = vec[j];
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
      const int d = 4 * vi + j, i = d < r.pairs ? d : d - r.pairs;
      if (i >= r.pairs) continue;
      a.cos[j] = read(r.cos, cos + i * r.cos_column);
      a.sin[j] = read(r.sin, sin + i * r.sin_column);
    }
  }
  return a;
}

template <class T>
__device__ Vec4<T> rotated(const Rope& r, const RotaryPair<T>& pair, const Angles& a, int vi) {
  Vec4<T> vec = pair.own;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const int d = 4 * vi + j;
    const double own = pair.own[j], partner = pair.partner[j], sin = d < r.pairs ? -a.sin[j] : a.sin[j];
    const float y = static_cast<float>(own * a.cos[j] + partner * sin);
    if (d < 2 * r.pairs) vec.set(j, tile::from_float<T>(y));
  }
  return vec;
}

// ---- groups: range, scale, codes ----

// Least and greatest value of a group, as integers that order like the values; symmetric formats: the greatest
// magnitude.
template <KvFormat f>
struct Range {
  int low = std::numeric_limits<int>::max(), high = has_min(f) ? std::numeric_limits<int>::min() : 0;

  static constexpr int infinity = 0x7f800000;
  static __device__ int flip(int x) {
    return x ^ ((x >> 31) & 0x7fffffff);
  }  // float bits <-> ordered integer; its own inverse

  __device__ void add(float x) {
    if constexpr (has_min(f)) {
      const int key = flip(__float_as_int(x));
      low = min(low, key);
      high = max(high, key);
    } else {
      high = max(high, __float_as_int(x) & 0x7fffffff);
    }
  }
  __device__ void reduce_warp() {  // over the 32 lanes, which hold one group together
    if constexpr (has_min(f)) low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
  }
  __device__ void reduce_xor(int lanes) {  // with lane ^ lanes
    if constexpr (has_min(f)) low = min(low, __shfl_xor_sync(0xffffffffu, low, lanes));
    high = max(high, __shfl_xor_sync(0xffffffffu, high, lanes));
  }
  __device__ void assign_if(const Range& other,
                            bool condition) {  // by masks: ?: would select an address and spill both to memory
    const int mask = -static_cast<int>(condition);
    low = (low & ~mask) | (other.low & mask);
    high = (high & ~mask) | (other.high & mask);
  }
  __device__ bool has_nonfinite() const {  // the group holds a NaN or an infinity: their keys lie past all finite ones
    return high >= infinity || (has_min(f) && low <= flip(infinity | static_cast<int>(0x80000000u)));
  }
  __device__ float least() const { return __int_as_float(flip(low)); }
  __device__ float greatest() const { return __int_as_float(has_min(f) ? flip(high) : high); }
};

// Scale and minimum of a group as a reader of the cache sees them, and the codes they yield.
template <class T, KvFormat f>
struct Quantizer {
  static constexpr bool bf16 = std::is_same_v<T, tile::bf16>;
  static constexpr float smallest = bf16 ? 0x1p-133f : 0x1p-24f;  // subnormal
  static constexpr float largest_scale = rooftile::largest_scale(bf16 ? DType::bf16 : DType::f16, has_min(f));
  static constexpr float max_code = has_min(f) ? 15.0f : static_cast<float>(qmax(f)),
                         min_code = has_min(f) ? 0.0f : -max_code;

  T stored_scale, stored_minimum;
  float minimum;

  explicit __device__ Quantizer(const Range<f>& r) {
    const float nan = __int_as_float(0x7fc00000);  // converts to the same NaN bits as on the CPU
    const float width = has_min(f) ? __fsub_rn(r.greatest(), r.least()) : r.greatest();
    const float step = width > 0.0f ? fminf(fmaxf(__fdiv_rn(width, max_code), smallest), largest_scale) : 0.0f;
    stored_scale = round(r.has_nonfinite() ? nan : step);
    minimum = 0.0f;
    if constexpr (has_min(f)) {
      constexpr float largest_minimum = bf16 ? 0x1.fep+127f : 65504.0f;
      // + 0 makes the minimum +0 in a group that holds zeros of both signs
      const float least = fminf(fmaxf(__fadd_rn(r.least(), 0.0f), -largest_minimum), largest_minimum);
      stored_minimum = round(r.has_nonfinite() ? nan : least);
      minimum = to_float(stored_minimum);
    }
    const float scale = to_float(stored_scale);
    factor_ = !bf16 ? 1.0f : scale < 0x1p-64f ? 0x1p+80f : scale > 0x1p+64f ? 0x1p-80f : 1.0f;
    scale_ = __fmul_rn(scale, factor_);
    inverse_ = __frcp_rn(scale_);
  }

  // The quantizer of lane `lane`, for codes alone: the stored values are this lane's.
  __device__ Quantizer from_lane(int lane) const {
    Quantizer quantizer = *this;
    if constexpr (has_min(f)) quantizer.minimum = __shfl_sync(0xffffffffu, minimum, lane);
    quantizer.scale_ = __shfl_sync(0xffffffffu, scale_, lane);
    quantizer.inverse_ = __shfl_sync(0xffffffffu, inverse_, lane);
    if constexpr (bf16) quantizer.factor_ = __shfl_sync(0xffffffffu, factor_, lane);
    return quantizer;
  }

  // The code of x; 0 if the scale is 0 or NaN. The quotient is correctly rounded: after the first correction it errs by
  // less than one unit in the last place, and the second correction is then exact (Markstein). This holds without
  // under- and overflow; factor_ and the bound prevent both, except for quotients so small that their code is 0 in any
  // case.
  __device__ int code(float x) const {
    float a = has_min(f) ? __fsub_rn(x, minimum) : x;
    if constexpr (bf16) a = __fmul_rn(fminf(a, std::numeric_limits<float>::max()), factor_);
    float ratio = __fmul_rn(a, inverse_);
    ratio = __fmaf_rn(__fmaf_rn(-scale_, ratio, a), inverse_, ratio);
    ratio = __fmaf_rn(__fmaf_rn(-scale_, ratio, a), inverse_, ratio);
    if constexpr (f == KvFormat::fp8)
      return scale_ > 0.0f ? e4m3(fminf(fabsf(ratio), max_code)) | (__float_as_int(x) >> 24 & 0x80) : 0;
    return scale_ > 0.0f ? __float2int_rn(fminf(fmaxf(ratio, min_code), max_code)) : 0;
  }

 private:
  // Rounds 0 <= x <= 448 to the nearest E4M3 number, ties to even. Below 2^-6 (subnormals) the step is 2^-9; above, the
  // mantissa has three bits.
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
  float scale_, inverse_, factor_;  // scale_: the stored scale times factor_, a power of two
};

// Packs four codes into one word, the first in the lowest bits.
template <KvFormat f>
__device__ std::uint32_t packed(const int (&codes)[4]) {
  constexpr std::uint32_t mask = (1u << code_bits(f)) - 1;
  std::uint32_t word = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) word |= (static_cast<std::uint32_t>(codes[j]) & mask) << (j * code_bits(f));
  return word;
}

template <KvFormat f, class Order>
__device__ void store_codes(const KvCacheView& c, std::byte* section, int offset, int vi, std::uint32_t word) {
  constexpr bool is_v = std::is_same_v<Order, InterleavedBy8>;
  const int d = Order::dim(vi, 0);
  const int page_size = is_kivi(f) ? kv_group : c.page_size;  // the layout depends only on whether it is 16
  const std::int64_t index =
      is_v ? v_code_index(f, page_size, c.head_dim, offset, d) : k_code_index(c.head_dim, offset, d);
  if constexpr (code_bits(f) == 4) {
    *reinterpret_cast<std::uint16_t*>(section + index / 2) = static_cast<std::uint16_t>(word);
  } else if constexpr (is_v) {
#pragma unroll
    for (int j = 0; j < 4; ++j) section[index + 4 * j] = static_cast<std::byte>(word >> (8 * j));
  } else {
    *reinterpret_cast<std::uint32_t*>(section + index) = word;
  }
}

// ---- the work tiles of one warp ----

template <class T, KvFormat f, bool rotate>  // rotate: cos is given
struct Warp {
  const AppendParams& p;
  const Entry& e;
  Vec4<T> (*staged)[32];  // shared memory, (staged_rows(f), 32 lanes); a lane accesses only its own column
  int b, lane;

  __device__ std::byte* section(const KvCacheView::Plane& plane, std::byte* base, std::int64_t page, int head) const {
    return base + page * plane.page_stride + head * plane.head_stride;
  }
  __device__ std::int64_t page_of(int position) const {  // as kv_page of core/kv_layout.h
    const int index = position >> p.log2_page_size;
    return p.c.block_table ? p.c.block_table[e.row * p.c.table_stride + index]
                           : std::int64_t{e.row} * p.c.max_pages + index;
  }
  __device__ int page_offset(int position) const { return position & (p.c.page_size - 1); }
  __device__ TokenHead<T> ring(bool is_v, int position, int head) const {
    const std::int64_t offset = (std::int64_t{e.row} * p.c.kv_heads + head) * kv_ring + position % kv_ring;
    return {reinterpret_cast<T*>(is_v ? p.c.ring_v : p.c.ring_k) + offset * p.c.head_dim, 1, p.vec4_ring};
  }

  __device__ bool rotates(bool is_v) const { return rotate && !is_v; }
  __device__ TokenHead<T> input_head(int token, int head, bool is_v) const {
    return token_head<T>(is_v ? p.v : p.k, b, token, head);
  }
  // Loads Vec4 number vi of a new token, unrotated, in the channel order of the stored codes: V interleaved by 8.
  __device__ Vec4<T> load_input(const TokenHead<T>& from, bool is_v, int vi) const {
    if constexpr (!is_element_format(f) && !is_kivi(f))
      if (is_v) return load<InterleavedBy8>(from, vi, p.c.head_dim);
    return load<InOrder>(from, vi, p.c.head_dim);
  }
  __device__ Vec4<T> load_new(int token, int head, bool is_v, int vi) const {
    const TokenHead<T> from = input_head(token, head, is_v);
    if constexpr (rotate)
      if (!is_v)
        return rotated(p.rope, rotary_pair(p.rope, from, vi, p.c.head_dim),
                       load_angles<T>(p.rope, position_of(p.rope, b, token), vi), vi);
    return load_input(from, is_v, vi);
  }

  // Loaded before the entry is validated: this lane's first Vec4 of a new token or of two heads of q, rotated where the
  // call rotates.
  struct Preloaded {
    Vec4<T> vec[2];  // (2 heads of q; or k, v in [0])
    bool valid;
  };
  __device__ void store_raw(const TokenHead<T>& to, int token, int head, bool is_v, const Preloaded& preloaded,
                            bool valid) const {
    for (int vi = lane; 4 * vi < p.c.head_dim; vi += 32)
      store(to, vi, p.c.head_dim, valid && vi == lane ? preloaded.vec[0] : load_new(token, head, is_v, vi));
  }

  // Encodes one head of one token as one group; its values lie in `staged` from row `row` on.
  template <class Order>
  __device__ void encode_token(const KvCacheView::Plane& plane, int position, int head, int row) const {
    const KvCacheView& c = p.c;
    const std::int64_t page = page_of(position);
    const int offset = page_offset(position), padded = padded_head_dim(c.head_dim);
    Range<f> range;
    for (int vi = lane; 4 * vi < padded; vi += 32) {
      const Vec4<T> x = staged[row + vi / 32][lane];
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (Order::dim(vi, j) < c.head_dim) range.add(x[j]);
    }
    range.reduce_warp();
    const Quantizer<T, f> quantizer(range);
    if (lane == 0) {
      reinterpret_cast<T*>(section(plane, plane.scale, page, head))[offset] = quantizer.stored_scale;
      if constexpr (has_min(f))
        reinterpret_cast<T*>(section(plane, plane.min, page, head))[offset] = quantizer.stored_minimum;
    }
    for (int vi = lane; 4 * vi < padded; vi += 32) {
      const Vec4<T> x = staged[row + vi / 32][lane];
      int codes[4];  // (4 channels)
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[j] = Order::dim(vi, j) < c.head_dim ? quantizer.code(x[j]) : 0;
      store_codes<f, Order>(c, section(plane, plane.codes, page, head), offset, vi, packed<f>(codes));
    }
  }

  // Appends one head of one token in a format without token groups.
  __device__ void append_token(int token, int head, bool is_v, const Preloaded& preloaded) const {
    const int position = e.length + token;
    const KvCacheView::Plane& plane = is_v ? p.c.v : p.c.k;
    if constexpr (is_element_format(f)) {
      std::byte* at = section(plane, plane.codes, page_of(position), head) + page_offset(position) * plane.token_stride;
      store_raw({reinterpret_cast<T*>(at), 1, p.vec4_pool}, token, head, is_v, preloaded, preloaded.valid);
    } else {
      for (int vi = lane; 4 * vi < padded_head_dim(p.c.head_dim); vi += 32)
        staged[vi / 32][lane] = preloaded.valid && vi == lane ? preloaded.vec[0] : load_new(token, head, is_v, vi);
      if (is_v) encode_token<InterleavedBy8>(plane, position, head, 0);
      else encode_token<InOrder>(plane, position, head, 0);
    }
  }

  // Loads Vec4 number vi of eight tokens of a closing group: tokens older than the call from the ring, new tokens from
  // the input. All loads are issued before the first value is used.
  template <class Position>
  __device__ void load_tokens(Vec4<T> (&x)[slice_tokens], bool is_v, int head, int vi, Position position) const {
    const KvCacheView& c = p.c;
    const Strided& s = is_v ? p.v : p.k;
    const TokenHead<T> first_new = input_head(0, head, is_v), first_raw = ring(is_v, 0, head);
    const auto is_new = [&](int i) { return position(i) >= e.length; };
    const auto at = [&](int i) {
      return is_new(i) ? first_new.at + (position(i) - e.length) * s.token
                       : first_raw.at + position(i) % kv_ring * c.head_dim;
    };
    const bool vec4 = first_raw.vec4 && first_new.vec4;
    if (vec4 && 4 * vi < c.head_dim) {
#pragma unroll
      for (int i = 0; i < slice_tokens; ++i) x[i] = *reinterpret_cast<const Vec4<T>*>(at(i) + 4 * vi);
    } else {
#pragma unroll
      for (int i = 0; i < slice_tokens; ++i) x[i] = {};
    }
    if (vec4 && !rotates(is_v)) return;
    const auto slow = [&](int i) { return !vec4 || (rotates(is_v) && is_new(i)); };
#pragma unroll 1
    for (int i = 0; i < slice_tokens; ++i)
      if (slow(i))
        staged[i][lane] = is_new(i) && rotates(is_v)
                              ? load_new(position(i) - e.length, head, is_v, vi)
                              : load<InOrder>(TokenHead<T>{at(i), is_new(i) ? s.dim : 1, false}, vi, c.head_dim);
#pragma unroll
    for (int i = 0; i < slice_tokens; ++i)
      if (slow(i)) x[i] = staged[i][lane];
  }

  // Encodes K of 32 channels of the 32 tokens from `first` on, one group a channel. A lane holds four channels of every
  // fourth token.
  __device__ void encode_k_slice(int first, int head, int slice) const {
    const KvCacheView& c = p.c;
    const int vi = 8 * slice + lane % 8, token = lane / 8;
    Vec4<T> x[slice_tokens];  // (8 tokens: token + 4 i; 4 channels)
    load_tokens(x, false, head, vi, [&](int i) { return first + token + 4 * i; });
    Range<f> range[4];  // (4 channels)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
#pragma unroll
      for (int i = 0; i < slice_tokens; ++i) range[j].add(x[i][j]);
      range[j].reduce_xor(8);
      range[j].reduce_xor(16);
    }
    // Four lanes hold the ranges of the same four channels; each lane quantises one of the channels.
    Range<f> mine = range[0];
#pragma unroll
    for (int j = 1; j < 4; ++j) mine.assign_if(range[j], token == j);
    const Quantizer<T, f> quantizer(mine);
    const std::int64_t page = page_of(first);
    const int offset = page_offset(first);
    const std::int64_t index = std::int64_t{offset / kv_group} * padded_head_dim(c.head_dim) + 4 * vi + token;
    reinterpret_cast<T*>(section(c.k, c.k.scale, page, head))[index] = quantizer.stored_scale;
    if constexpr (has_min(f)) reinterpret_cast<T*>(section(c.k, c.k.min, page, head))[index] = quantizer.stored_minimum;
    std::uint32_t words[slice_tokens] = {};  // (8 tokens): codes of 4 channels
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const Quantizer<T, f> channel_quantizer = quantizer.from_lane(8 * j + lane % 8);
#pragma unroll
      for (int i = 0; i < slice_tokens; ++i)
        words[i] |= (static_cast<std::uint32_t>(channel_quantizer.code(x[i][j])) & 15) << (4 * j);
    }
    std::byte* codes_at = section(c.k, c.k.codes, page, head);
#pragma unroll
    for (int i = 0; i < slice_tokens; ++i) store_codes<f, InOrder>(c, codes_at, offset + token + 4 * i, vi, words[i]);
  }

  // Encodes V of eight of the 32 tokens from `first` on, one group a token. The codes of the eight tokens fill whole
  // 16-byte vectors of the layout: slice 0 has tokens 0, 1, 8, 9, 16, 17, 24, 25.
  __device__ void encode_v_slice(int first, int head, int slice) const {
    const KvCacheView& c = p.c;
    const int padded = padded_head_dim(c.head_dim), vecs = (padded + 4 * 32 - 1) / (4 * 32);
    const auto token_in_group = [&](int i) { return 8 * (i / 2) + 2 * slice + i % 2; };
    const auto position = [&](int i) { return first + token_in_group(i); };
    Vec4<T> x[slice_tokens];       // (8 tokens; 4 channels)
    Range<f> range[slice_tokens];  // (8 tokens)
#pragma unroll 1
    for (int vec = 0; vec < vecs; ++vec) {
      const int vi = 32 * vec + lane;
      load_tokens(x, true, head, vi, position);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (4 * vi + j < c.head_dim)
#pragma unroll
          for (int i = 0; i < slice_tokens; ++i) range[i].add(x[i][j]);
    }
#pragma unroll
    for (int i = 0; i < slice_tokens; ++i) range[i].reduce_warp();
    Range<f> mine = range[0];
#pragma unroll
    for (int i = 1; i < slice_tokens; ++i) mine.assign_if(range[i], lane % slice_tokens == i);
    const Quantizer<T, f> quantizer(mine);
    const std::int64_t page = page_of(first);
    const int offset = page_offset(first);
    if (lane < slice_tokens) {
      reinterpret_cast<T*>(section(c.v, c.v.scale, page, head))[offset + token_in_group(lane)] = quantizer.stored_scale;
      if constexpr (has_min(f))
        reinterpret_cast<T*>(section(c.v, c.v.min, page, head))[offset + token_in_group(lane)] =
            quantizer.stored_minimum;
    }
    std::uint32_t* words = reinterpret_cast<std::uint32_t*>(staged);  // (channel): the codes of the eight tokens
#pragma unroll 1
    for (int vec = 0; vec < vecs; ++vec) {
      const int vi = 32 * vec + lane;
      if (vecs > 1) load_tokens(x, true, head, vi, position);  // again: a lane's registers do not hold a whole token
      std::uint32_t channel_codes[4] = {};                     // (4 channels): codes of 8 tokens
#pragma unroll
      for (int i = 0; i < slice_tokens; ++i) {
        const Quantizer<T, f> token_quantizer = quantizer.from_lane(i);
#pragma unroll
        for (int j = 0; j < 4; ++j)
          channel_codes[j] |= (static_cast<std::uint32_t>(token_quantizer.code(x[i][j])) & 15)
                              << (16 * (i % 2) + 4 * (i / 2));
      }
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (4 * vi + j >= c.head_dim) channel_codes[j] = 0;
      __syncwarp();  // all lanes have finished with `staged`, which `words` overwrites
      reinterpret_cast<uint4*>(words)[lane] = {channel_codes[0], channel_codes[1], channel_codes[2], channel_codes[3]};
      __syncwarp();  // all lanes' words are in shared memory
      const int tile = 4 * vec + lane / 8;
      std::uint32_t out[4] = {};  // the 16-byte vector of this lane
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint32_t word = words[lane / 8 * 32 + lane % 8 + 8 * j];
#pragma unroll
        for (int i = 0; i < 4; ++i) out[i] |= (word >> (4 * i) & 0x000f000fu) << (4 * j);
      }
      __syncwarp();  // all lanes have read `words`
      if (32 * tile >= padded) continue;
      const std::int64_t index = v_code_index(f, kv_group, c.head_dim, offset + 2 * slice, 32 * tile + lane % 8);
      *reinterpret_cast<uint4*>(section(c.v, c.v.codes, page, head) + index / 2) = {out[0], out[1], out[2], out[3]};
    }
  }

  // Writes the raw tokens of the group from `first` on, one of the call's first two groups, into the ring. Each ring
  // entry gets the newest token that maps to it, if that token is new. So the same warp reads a ring entry for a
  // closing group and then overwrites the entry. preloaded: of the call's first token.
  __device__ void fill_ring(int first, int head, bool is_v, const Preloaded& preloaded) const {
    const int end = e.length + e.tokens, stop = min(end - first, kv_group);
    for (int i = end - first > kv_ring ? 0 : max(e.length - first, 0); i < stop; ++i) {
      const int position = first + i + (end - 1 - first - i) / kv_ring * kv_ring, token = position - e.length;
      if (token >= 0)
        store_raw(ring(is_v, position, head), token, head, is_v, preloaded, preloaded.valid && token == 0);
    }
  }

  // Encodes slices [begin, end) of a closing group, then fills the ring.
  __device__ void append_group(int index, int head, bool is_v, int begin, int end, bool fill,
                               const Preloaded& preloaded) const {
    const int first = (e.length / kv_group + index) * kv_group;
#pragma unroll 1
    for (int slice = begin; slice < end; ++slice)
      if (is_v) encode_v_slice(first, head, slice);
      else encode_k_slice(first, head, slice);
    __syncwarp();  // lanes that read a ring entry -> lanes that overwrite the entry
    if (fill && index < 2) fill_ring(first, head, is_v, preloaded);
  }

  // Rotates heads 2 * pair and 2 * pair + 1 of q. q_out may be q: a lane reads elements that another lane writes.
  __device__ void rotate_q(int token, int pair, const Preloaded& preloaded) const {
    const std::int64_t position = position_of(p.rope, b, token);
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
      const int head = 2 * pair + i;
      if (head == p.q_heads) break;
      const TokenHead<T> from = token_head<T>(p.q, b, token, head), to = token_head<T>(p.q_out, b, token, head);
      for (int vi = lane; 4 * vi < p.c.head_dim; vi += 32)
        staged[vi / 32][lane] = preloaded.valid && vi == lane
                                    ? (i == 0 ? preloaded.vec[0] : preloaded.vec[1])
                                    : rotated(p.rope, rotary_pair(p.rope, from, vi, p.c.head_dim),
                                              load_angles<T>(p.rope, position, vi), vi);
      __syncwarp();  // all lanes have read the head -> any lane may overwrite it
      for (int vi = lane; 4 * vi < p.c.head_dim; vi += 32) store(to, vi, p.c.head_dim, staged[vi / 32][lane]);
    }
  }
};

template <class T, KvFormat f, bool rotate>
__global__ __launch_bounds__(warps * 32, 4 - (rotate ? 1 : 0) -
                                             (is_kivi(f) ? 1 : 0)) void append(const __grid_constant__ AppendParams p) {
  __shared__ __align__(16) Vec4<T> staged[warps][staged_rows(f)][32];  // (warps, staged_rows, lanes)
  const int b = static_cast<int>(blockIdx.x >> p.log2_entry_ctas),
            cta = static_cast<int>(blockIdx.x) - (b << p.log2_entry_ctas);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, heads = p.c.kv_heads;
  const int first = cta * warps + warp, step = warps << p.log2_entry_ctas;
  const int q_pairs = rotate ? (p.q_heads + 1) / 2 : 1, q_tiles = rotate ? p.tokens * q_pairs : 0;
  Entry e{};
  const Warp<T, f, rotate> w{p, e, staged[warp], b, lane};
  struct WorkTile {
    int head, index;  // index of the token or, in kivi formats, of the group
    bool is_v;
  };
  const auto work_tile_of = [heads](int index) {
    const unsigned of_head = static_cast<unsigned>(index) / static_cast<unsigned>(heads);
    return WorkTile{index - static_cast<int>(of_head) * heads, static_cast<int>(of_head / 2), of_head % 2 != 0};
  };

  // Loads the values of the first work tile, whose addresses do not depend on the entry, and their angles if the
  // position is valid.
  const bool preload_q = first < q_tiles;
  const WorkTile first_tile =
      preload_q ? WorkTile{2 * (first % q_pairs), first / q_pairs, false} : work_tile_of(first - q_tiles);
  const int token = is_kivi(f) && !preload_q ? 0 : first_tile.index;
  const TokenHead<T> from =
      preload_q ? token_head<T>(p.q, b, token, first_tile.head) : w.input_head(token, first_tile.head, first_tile.is_v);
  typename Warp<T, f, rotate>::Preloaded preloaded{{}, first_tile.index < (is_kivi(f) && !preload_q ? 1 : p.tokens)};
  const bool preload_rotates = preloaded.valid && w.rotates(first_tile.is_v),
             second = preload_q && first_tile.head + 1 < p.q_heads;
  RotaryPair<T> pair[2] = {};  // (2 heads of q; or k in [0])
  Angles angles{};
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();
  e = load_entry(p, b);
  if (preload_rotates) {
    const std::int64_t position = position_of(p.rope, b, token);
    pair[0] = rotary_pair(p.rope, from, lane, p.c.head_dim);
    if (second)
      pair[1] = rotary_pair(p.rope, TokenHead<T>{from.at + p.q.head, from.stride, from.vec4}, lane, p.c.head_dim);
    if (position >= 0 && position < p.rope.max_position) angles = load_angles<T>(p.rope, position, lane);
  } else if (preloaded.valid) {
    preloaded.vec[0] = w.load_input(from, first_tile.is_v, lane);
  }
  validate(p, b, e);
  if (__syncthreads_or(e.fault != KvFault::none)) {
    if (p.one_cluster && cta == 0) report_fault(p, e, b);
    return;
  }
  tile::arrive_at_cluster();
  if (preload_rotates)
#pragma unroll
    for (int i = 0; i < 2; ++i) preloaded.vec[i] = rotated(p.rope, pair[i], angles, lane);

  int stored = e.tokens * 2 * heads,
      closing = 0;  // work tiles; closing: slices of the one group that closes, if sliced
  const bool sliced = is_kivi(f) && p.tokens <= kv_group;
  if constexpr (is_kivi(f))
    if (e.tokens > 0) {
      const int groups = (e.length + e.tokens) / kv_group - e.length / kv_group;  // groups that close
      stored = ((e.length + e.tokens - 1) / kv_group - e.length / kv_group + 1) * 2 * heads;
      if (sliced && groups > 0) closing = heads * (slices_of(false, p.c.head_dim) + slices_of(true, p.c.head_dim));
    }
  for (int index = first; index < q_tiles + stored + closing; index += step) {
    const int stored_tile = index - q_tiles;
    if (rotate && stored_tile < 0) {
      w.rotate_q(index / q_pairs, index % q_pairs, preloaded);
    } else if constexpr (is_kivi(f)) {
      WorkTile t = work_tile_of(stored_tile);
      int begin = 0, end = 0;
      if (stored_tile >= stored) {
        const int slices_v = slices_of(true, p.c.head_dim), slice = (stored_tile - stored) / heads;
        t = {(stored_tile - stored) % heads, 0, slice < slices_v};
        begin = t.is_v ? slice : slice - slices_v;
        end = begin + 1;
      } else if (!sliced && (e.length / kv_group + t.index + 1) * kv_group <= e.length + e.tokens) {
        end = slices_of(t.is_v, p.c.head_dim);
      }
      w.append_group(t.index, t.head, t.is_v, begin, end, stored_tile < stored, preloaded);
    } else {
      const WorkTile t = work_tile_of(stored_tile);
      w.append_token(t.index, t.head, t.is_v, preloaded);
    }
    preloaded.valid = false;  // preloaded holds the first work tile alone
  }
  tile::wait_for_cluster();  // all CTAs of the entry have read its length -> CTA 0 may advance it
  if (p.one_cluster && cta == 0 && threadIdx.x == 0 && e.tokens > 0) p.c.lengths[e.row] = e.length + e.tokens;
}

// One CTA an entry. Launched after `append` where the CTAs of an entry are no cluster; writes faults and lengths.
__global__ __launch_bounds__(256) void commit_lengths(const __grid_constant__ AppendParams p) {
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();
  const int b = static_cast<int>(blockIdx.x);
  Entry e = load_entry(p, b);
  validate(p, b, e);
  report_fault(p, e, b);
  if (!__syncthreads_or(e.fault != KvFault::none) && threadIdx.x == 0 && e.tokens > 0)
    p.c.lengths[e.row] = e.length + e.tokens;
}

// ---- host ----

bool aligned_to_8(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 8 == 0; }

Strided strided(const TensorView& t) {
  if (!t.given()) return {};
  bool vec4 = aligned_to_8(t.data) && t.shape[3] % 4 == 0 && t.stride[3] == 1;
  for (int i = 0; i < 3; ++i) vec4 = vec4 && (t.shape[i] <= 1 || t.stride[i] % 4 == 0);
  return {t.data, t.stride[0], t.stride[1], t.stride[2], t.stride[3], vec4};
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
         .int64_positions = a.positions.dtype == DType::i64};
  const std::uintptr_t vec = r.fp32 ? 16 : 8;  // bytes
  r.vec4 = r.pairs % 4 == 0 && r.cos_column == 1 && r.sin_column == 1 &&
           reinterpret_cast<std::uintptr_t>(r.cos) % vec == 0 && reinterpret_cast<std::uintptr_t>(r.sin) % vec == 0 &&
           (r.max_position <= 1 || (r.cos_row % 4 == 0 && r.sin_row % 4 == 0));
  return r;
}

bool vec4_pool(const KvCacheView& c) {
  if (!is_element_format(c.format)) return false;
  bool vec4 = c.head_dim % 4 == 0;
  for (const KvCacheView::Plane* plane : {&c.k, &c.v})
    vec4 = vec4 && aligned_to_8(plane->codes) && plane->page_stride % 8 == 0 && plane->head_stride % 8 == 0 &&
           plane->token_stride % 8 == 0;
  return vec4;
}

using Kernel = void (*)(AppendParams);

template <class T, bool rotate>
Kernel kernel_for(KvFormat f) {
  switch (f) {
    case KvFormat::int8:
      return append<T, KvFormat::int8, rotate>;
    case KvFormat::fp8:
      return append<T, KvFormat::fp8, rotate>;
    case KvFormat::int4:
      return append<T, KvFormat::int4, rotate>;
    case KvFormat::int4_kivi_sym:
      return append<T, KvFormat::int4_kivi_sym, rotate>;
    case KvFormat::int4_kivi:
      return append<T, KvFormat::int4_kivi, rotate>;
    default:
      return append < T, std::is_same_v<T, tile::bf16> ? KvFormat::bf16 : KvFormat::fp16, rotate > ;
  }
}

template <class T>
Kernel kernel_for(KvFormat f, bool rotate) {
  return rotate ? kernel_for<T, true>(f) : kernel_for<T, false>(f);
}

}  // namespace

KernelName kv_append(const char* op, const Context& ctx, const AppendArgs& a) {
  const KvCacheView& c = *a.cache;
  const std::int64_t batch = a.k.shape[0], tokens = a.k.shape[1], q_heads = a.cos.given() ? a.q.shape[2] : 0;
  const std::int64_t groups = (tokens + 2 * (kv_group - 1)) / kv_group;  // that the tokens of a row can touch
  const std::int64_t work_tiles = c.kv_heads * 2 * (is_kivi(c.format) ? groups : tokens) + tokens * ((q_heads + 1) / 2);
  constexpr std::int64_t most = std::numeric_limits<int>::max() / 4;  // sums of work-tile indices fit 32 bits
  ROOFTILE_CHECK_KIND(not_supported, work_tiles <= most && batch <= most, op, ": k has ", tokens,
                      " tokens for each of ", batch, " rows; on a GPU tokens times heads of one row are at most ", most,
                      " a call");
  const KernelName ran = kernel_name("cuda_", op, "_", name(c.dtype), "_", name(c.format));
  if (batch == 0 || tokens == 0) return ran;

  const DeviceScope scope(op, ctx);
  // CTAs of an entry: enough to fill the device, but few enough that validation costs little beside the work. If a full
  // cluster does the work in two rounds of work tiles, the cluster's size. A sliced group gets warps for two rounds of
  // its slices, provided that all CTAs run at once and leave room for the next kernel's.
  const std::int64_t cluster = scope.largest_cluster(), sms = scope.sms();
  const bool sliced = is_kivi(c.format) && tokens <= kv_group;
  const std::int64_t slices = sliced ? c.kv_heads * (slices_of(false, c.head_dim) + slices_of(true, c.head_dim)) : 0;
  const auto ctas_for = [](std::int64_t n) { return (n + warps - 1) / warps; };
  const std::int64_t all =
      std::max(ctas_for(work_tiles), std::min({ctas_for((slices + 1) / 2), sms * 4 / batch, cluster}));
  const std::int64_t fill = (sms * 8 + batch - 1) / batch;
  const auto ctas = static_cast<std::uint64_t>(std::min({all, fill, all <= 2 * cluster ? cluster : fill}));
  const int log2_entry_ctas = std::bit_width(
      ctas <= static_cast<std::uint64_t>(cluster) ? ctas - 1 : ctas / 2);  // rounded up within a cluster, else down
  const bool one_cluster = 1 << log2_entry_ctas <= cluster;
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
                       .log2_page_size = std::countr_zero(static_cast<unsigned>(c.page_size)),
                       .log2_entry_ctas = log2_entry_ctas,
                       .one_cluster = one_cluster,
                       .vec4_pool = vec4_pool(c),
                       .vec4_ring = c.head_dim % 4 == 0 && aligned_to_8(c.ring_k) && aligned_to_8(c.ring_v)};
  const Kernel kernel =
      (c.dtype == DType::bf16 ? kernel_for<tile::bf16> : kernel_for<tile::half>)(c.format, p.rope.cos != nullptr);
  scope.launch(kernel, batch << log2_entry_ctas, warps * 32, 0, p, Overlap::with_previous,
               one_cluster ? 1 << log2_entry_ctas : 1);
  if (!one_cluster) scope.launch(commit_lengths, batch, 256, 0, p, Overlap::with_previous);
  return ran;
}

void load_append_kernels(const char* op) {
  for (int f = static_cast<int>(KvFormat::fp16); f < kv_format_count; ++f)
    for (const bool rotate : {false, true}) {
      load_kernel(op, kernel_for<tile::half>(static_cast<KvFormat>(f), rotate));
      load_kernel(op, kernel_for<tile::bf16>(static_cast<KvFormat>(f), rotate));
    }
  load_kernel(op, commit_lengths);
}

}  // namespace rooftile::gpu
