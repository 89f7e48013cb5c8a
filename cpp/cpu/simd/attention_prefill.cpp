// SPDX-License-Identifier: Apache-2.0
// Prefill attention: many queries a sequence, tiles of queries against blocks of keys.
//   q, out [token, Hq, D]   k, v [token, Hkv, D]   and, before them, the tokens of a cache row
// A work tile is one (sequence, KV head, tile of queries). Its packed rows, queries times the Hq / Hkv heads, enter two
// small matrix products per block of keys, S = Q K^T and O += P V. K is transposed and K and V are widened to fp32 once
// per block. The online softmax rescales O when a row's maximum logit increases.
// Cost: 4 * S^2 * D * Hq flop (half of it when causal): fused multiply-adds are the roof.
// Blocks start at multiples of 64 tokens of the cache and of k, so a row's bits depend on its own keys alone. Where a
// block holds a NaN or an infinity, each row takes only the tokens it sees.
// With AVX512-BF16 and q, k and v in bf16 both products are of bf16 (bf16_pairs.h): P is rounded to it. Blocks of codes
// stay in fp32.
#include <algorithm>
#include <cmath>
#include <limits>
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
#include "cpu/simd/transpose.h"
#ifdef ROOFTILE_BF16
#include "cpu/simd/bf16_pairs.h"
#endif

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

#ifdef ROOFTILE_BF16
constexpr bool multiplies_bf16 = true;
#else
constexpr bool multiplies_bf16 = false;
#endif
constexpr int key_block = 64;
constexpr int query_rows = 192;  // packed rows of a work tile; more only if one query has more heads

// One thread's scratch arrays.
struct Workspace {
  float* q;    // [rows][width]
  float* acc;  // [rows][width]
  float* s;    // [rows][key_block]
  float* kt;   // [width][key_block]
  float* v;    // [key_block][width]
  // Pairs of bf16, where the CPU multiplies those: of channels, of tokens.
  std::uint32_t *q_pairs, *p_pairs;   // [rows][width / 2], [rows][key_block / 2]
  std::uint32_t *kt_pairs, *v_pairs;  // [width / 2][key_block], [key_block / 2][width]
  float* codes;                       // [tile][width]
  float *channel, *channel_min;
  SoftmaxState* state;         // [rows]
  std::int64_t *first, *last;  // [rows] positions a row sees, both inclusive
  std::int64_t* position;      // [rows]
  float* slope;                // [rows] of ALiBi, or 0
};

// What a block of keys and values holds.
struct Block {
  bool finite;  // all values are
  bool bf16;    // all keys and values are bf16
};

class Prefill {
 public:
  Prefill(const Parallel& parallel, const PrefillArgs& a)
      : parallel_(parallel),
        a_(a),
        dim_(static_cast<int>(a.q.shape[2])),
        width_(a.cache ? tile_width(*a.cache) : (dim_ + lanes - 1) / lanes * lanes),
        kv_heads_(a.k.shape[1]),
        group_(a.q.shape[1] / a.k.shape[1]),
        queries_(group_ >= query_rows ? 1 : query_rows / group_),
        rows_(queries_ * group_),
        in_bf16_(multiplies_bf16 && a.q.dtype == DType::bf16) {}

  void run() {
    const Scratch ends_scratch(static_cast<std::size_t>(a_.batch) * sizeof(std::int64_t));
    auto* ends =
        reinterpret_cast<std::int64_t*>(ends_scratch.data());  // [batch] tiles of the sequences up to and with each
    std::int64_t tiles = 0;
    for (std::int64_t b = 0; b < a_.batch; ++b) ends[b] = tiles += (a_.sequences[b].queries + queries_ - 1) / queries_;
    const Scratch scratch(static_cast<std::size_t>(parallel_.threads()) * workspace_bytes());
    workspaces_ = scratch.data();
    // The last tiles of a causal sequence see the most keys: they go first.
    parallel_.run(tiles * kv_heads_, [&](std::int64_t i, int thread) {
      const std::int64_t b = std::upper_bound(ends, ends + a_.batch, i / kv_heads_) - ends;
      const PrefillSequence& s = a_.sequences[b];
      const std::int64_t first = (ends[b] - 1 - i / kv_heads_) * queries_;
      task(s, i % kv_heads_, first, s.queries - first < queries_ ? s.queries - first : queries_, thread);
    });
  }

 private:
  void task(const PrefillSequence& s, std::int64_t head, std::int64_t first_query, std::int64_t queries,
            int thread) const;
  // Tokens [first, last) of the n of a block from `position` on that a row sees.
  struct Seen {
    int first, last;
  };
  static Seen seen(const Workspace& r, int row, std::int64_t position, int n) {
    const std::int64_t from = r.first[row] - position, to = r.last[row] + 1 - position;
    return {from < 0 ? 0 : from > n ? n : static_cast<int>(from), to < 0 ? 0 : to > n ? n : static_cast<int>(to)};
  }
  void attend_block(Workspace& r, int rows, std::int64_t position, int n, Block keys) const;
  void multiply_values(Workspace& r, int rows, std::int64_t position, int n, Block values) const;
  Block load_new(const PrefillSequence& s, std::int64_t head, std::int64_t first, int n, Workspace& r) const;
  Block load_cached(const PrefillSequence& s, std::int64_t head, std::int64_t first, int n, Workspace& r) const;
  void transpose(float* k, int tokens, bool paired, float* kt) const;

  std::size_t workspace_bytes() const {
    const std::size_t rows = static_cast<std::size_t>(rows_), width = static_cast<std::size_t>(width_);
    constexpr std::size_t arrays = 20;  // upper bound; alignment costs each array up to one cache line
    const std::size_t pairs = in_bf16_ ? (rows * (width + key_block) + 2 * width * key_block) / 2 : 0;
    return aligned(sizeof(float) * (2 * rows * width + rows * key_block + 2 * width * key_block + tile * width +
                                    2 * width + pairs) +
                   rows * (sizeof(SoftmaxState) + 3 * sizeof(std::int64_t) + sizeof(float)) + arrays * 64);
  }
  Workspace workspace(int thread) const {
    BumpAllocator take{workspaces_ + static_cast<std::size_t>(thread) * workspace_bytes()};
    Workspace r;
    take(r.q, rows_ * width_);
    take(r.acc, rows_ * width_);
    take(r.s, rows_ * key_block);
    take(r.kt, width_ * key_block);
    take(r.v, width_ * key_block);
    if (in_bf16_) {
      take(r.q_pairs, rows_ * width_ / 2);
      take(r.p_pairs, rows_ * key_block / 2);
      take(r.kt_pairs, width_ * key_block / 2);
      take(r.v_pairs, width_ * key_block / 2);
    }
    take(r.codes, tile * width_);
    take(r.channel, width_);
    take(r.channel_min, width_);
    take(r.state, rows_);
    take(r.first, rows_);
    take(r.last, rows_);
    take(r.position, rows_);
    take(r.slope, rows_);
    return r;
  }

  const Parallel& parallel_;
  const PrefillArgs& a_;
  const int dim_, width_;
  const std::int64_t kv_heads_, group_, queries_, rows_;  // rows of a tile: its queries times the heads of the KV head
  const bool in_bf16_;
  std::byte* workspaces_ = nullptr;
};

// kt [width][key_block] from k [tokens][width], in whole vectors of tokens. Paired channels go back to their places.
void Prefill::transpose(float* k, int tokens, bool paired, float* kt) const {
  for (int t = tokens; t % lanes; ++t)
    for (int d = 0; d < width_; d += lanes) store(k + t * width_ + d, F32{});
  for (int d = 0; d < width_; d += lanes)
    for (int t = 0; t < tokens; t += lanes) {
      if (!paired) {
        transpose16(k + t * width_ + d, width_, kt + d * key_block + t, key_block);
      } else {  // vector 0 of a pair: even channels, 1: odd ones
        const int base = d / 32 * 32 + d / 16 % 2;
        transpose16(k + t * width_ + d, width_, kt + base * key_block + t, 2 * key_block);
      }
    }
}

// Keys and values first .. first + n - 1 of k and v.
Block Prefill::load_new(const PrefillSequence& s, std::int64_t head, std::int64_t first, int n, Workspace& r) const {
  F32 probe{};
  for (int base = 0; base < n; base += tile) {
    const int count = n - base < tile ? n - base : tile;
    for (int t = 0; t < count; ++t) {
      const std::int64_t j = first + base + t;
      gather_row(a_.k, s.k + j * a_.k.stride[0] + head * a_.k.stride[1], a_.k.stride[2], dim_, width_,
                 r.codes + t * width_);
      float* v = r.v + (base + t) * width_;
      gather_row(a_.v, s.v + j * a_.v.stride[0] + head * a_.v.stride[1], a_.v.stride[2], dim_, width_, v);
      for (int d = 0; d < width_; d += lanes) probe = fma(load(v + d), F32{}, probe);
    }
    transpose(r.codes, count, false, r.kt + base);
  }
  return {sum(probe) == 0, in_bf16_};
}

// The same from the cache: closed groups as codes, the open group of a kivi format from the ring.
Block Prefill::load_cached(const PrefillSequence& s, std::int64_t head_index, std::int64_t first, int n,
                           Workspace& r) const {
  const KvCacheView& c = *a_.cache;
  const CachedHead head{&c, s.row, head_index};
  const std::int64_t code_end = is_element_format(c.format) ? 0
                                : is_kivi(c.format)         ? kivi_code_end(s.cached)
                                                            : s.cached;
  F32 probe{};
  for (int base = 0; base < n; base += tile) {
    const std::int64_t token = first + base;
    const int count = n - base < tile ? n - base : tile;
    float* v = r.v + base * width_;
    if (token >= code_end) {
      TokenRows rows;
      const bool ring = is_kivi(c.format);
      find_elements(head, c.k, ring ? c.ring_k : nullptr, token, count, rows);
      widen(rows, count, dim_, width_, r.codes);
      find_elements(head, c.v, ring ? c.ring_v : nullptr, token, count, rows);
      widen(rows, count, dim_, width_, v);
      transpose(r.codes, count, false, r.kt + base);
    } else {
      TileScales scales;
      scales.channel = r.channel;
      scales.channel_min = r.channel_min;
      unpack_k(head, token, count, r.codes, scales);
      for (int t = 0; t < count; ++t)  // rounded as the format says: code * scale is exact, then + min
        for (int d = 0; d < width_; d += lanes) {
          float* at = r.codes + t * width_ + d;
          const F32 scale = is_kivi(c.format) ? load(scales.channel + d) : splat(scales.token[t]);
          store(at, has_min(c.format) ? fma(load(at) + affine_zero_point, scale, load(scales.channel_min + d))
                                      : load(at) * scale);
        }
      transpose(r.codes, count, is_paired(c.format), r.kt + base);
      unpack_v(head, token, count, r.codes, scales);  // may write the whole interleaved tile
      for (int t = 0; t < count; ++t) {
        const F32 scale = splat(scales.token[t]);
        for (int d = 0; d < width_; d += lanes) {
          const F32 x = load(r.codes + t * width_ + d);
          store(v + t * width_ + d,
                has_min(c.format) ? fma(x + affine_zero_point, scale, splat(scales.token_min[t])) : x * scale);
        }
      }
    }
    for (int t = 0; t < count; ++t)
      for (int d = 0; d < width_; d += lanes) probe = fma(load(v + t * width_ + d), F32{}, probe);
  }
  return {sum(probe) == 0, in_bf16_ && first >= code_end};
}

// All rows against the n keys of the block that starts at `position`.
void Prefill::attend_block(Workspace& r, int rows, std::int64_t position, int n, Block keys) const {
  const int whole = (n + lanes - 1) / lanes * lanes;
#ifdef ROOFTILE_BF16
  if (keys.bf16) {
    for (int c = 0; c < width_; c += 2)
      for (int t = 0; t < whole; t += lanes)
        store_raw(r.kt_pairs + c / 2 * key_block + t,
                  to_pairs(load(r.kt + c * key_block + t), load(r.kt + (c + 1) * key_block + t)));
    multiply_pairs(r.q_pairs, width_ / 2, r.kt_pairs, key_block, width_ / 2, r.s, key_block, rows, whole, false);
  }
#endif
  if (!keys.bf16) gemm(r.q, width_, r.kt, key_block, r.s, key_block, rows, whole, width_, false);
  for (int i = 0; i < rows; ++i) {
    float* s = r.s + i * key_block;
    const auto [first, last] = seen(r, i, position, n);
    for (int t = 0; t < whole; t += lanes)
      if (first >= last || t + lanes <= first || t >= last) store(s + t, F32{});
    if (first >= last) continue;
    for (int t = first / lanes * lanes; t < last; t += lanes) {
      F32 x = load(s + t) * a_.logits.scale;
      if (a_.logits.softcap > 0) x = soft_cap(x, a_.logits.softcap);
      if (a_.logits.alibi_slopes)
        x = fma(lane_index() + static_cast<float>(position + t - r.position[i]), splat(r.slope[i]), x);
      store(s + t, x);
    }
    SoftmaxState& state = r.state[i];
    const SoftmaxState block = exponentiate(s, first, last, state.top);
    if (block.top > state.top) {
      const float kept = ::expf(state.top - block.top);
      for (int d = 0; d < width_; d += lanes) store(r.acc + i * width_ + d, load(r.acc + i * width_ + d) * kept);
      state.sum *= kept;
    }
    state.top = block.top;
    state.sum += block.sum;
  }
  multiply_values(r, rows, position, n, keys);
}

// acc += P V of a block.
void Prefill::multiply_values(Workspace& r, int rows, std::int64_t position, int n, Block values) const {
#ifdef ROOFTILE_BF16
  if (values.bf16) {
    constexpr int p_row = key_block / 2;
    const int pairs = (n + 1) / 2;
    for (int i = 0; i < rows; ++i)
      neighbours_to_pairs(r.s + i * key_block, (n + lanes - 1) / lanes * lanes, r.p_pairs + i * p_row);
    for (int t = 0; t < n; t += 2)
      for (int d = 0; d < width_; d += lanes) {
        const float* const v = r.v + t * width_ + d;
        store_raw(r.v_pairs + t / 2 * width_ + d, to_pairs(load(v), t + 1 < n ? load(v + width_) : F32{}));
      }
    if (values.finite)
      return multiply_pairs(r.p_pairs, p_row, r.v_pairs, width_, pairs, r.acc, width_, rows, width_, true);
    for (int i = 0; i < rows; ++i) {
      const auto [first, last] = seen(r, i, position, n);
      if (first >= last) continue;
      // A pair with one token that the row does not see has a value that must not count.
      const auto half_pair = [&](int token, std::uint32_t half) {
        std::uint32_t *const pair = r.v_pairs + token / 2 * width_, *const kept = r.kt_pairs + token % 2 * width_;
        for (int d = 0; d < width_; d += lanes) {
          const U32 both = load_raw<U32>(pair + d);
          store_raw(kept + d, both);  // K was multiplied
          store_raw(pair + d, both & half);
        }
      };
      const auto whole_pair = [&](int token) {
        std::memcpy(r.v_pairs + token / 2 * width_, r.kt_pairs + token % 2 * width_, width_ * sizeof(std::uint32_t));
      };
      if (first % 2) half_pair(first, 0xffff0000);    // an odd token without the even one before it
      if (last % 2) half_pair(last - 1, 0x0000ffff);  // an even token without the odd one behind it
      const int begin = first / 2, end = (last + 1) / 2;
      multiply_pairs(r.p_pairs + i * p_row + begin, p_row, r.v_pairs + begin * width_, width_, end - begin,
                     r.acc + i * width_, width_, 1, width_, true);
      if (last % 2) whole_pair(last - 1);
      if (first % 2) whole_pair(first);
    }
    return;
  }
#endif
  if (values.finite) return gemm(r.s, key_block, r.v, width_, r.acc, width_, rows, width_, n, true);
  for (int i = 0; i < rows; ++i) {
    const auto [first, last] = seen(r, i, position, n);
    if (first < last)
      gemm(r.s + i * key_block + first, key_block, r.v + first * width_, width_, r.acc + i * width_, width_, 1, width_,
           last - first, true);
  }
}

void Prefill::task(const PrefillSequence& s, std::int64_t head, std::int64_t first_query, std::int64_t queries,
                   int thread) const {
  Workspace r = workspace(thread);
  const int rows = static_cast<int>(queries * group_);
  const std::int64_t window = a_.logits.window, keys = s.cached + s.keys;
  std::int64_t first_seen = keys, last_seen = -1;
  for (int i = 0; i < rows; ++i) {
    const std::int64_t query = first_query + i / group_, position = s.position(query);
    const std::int64_t h = head * group_ + i % group_;
    gather_row(a_.q, s.q + query * a_.q.stride[0] + h * a_.q.stride[1], a_.q.stride[2], dim_, width_, r.q + i * width_);
#ifdef ROOFTILE_BF16
    if (in_bf16_) neighbours_to_pairs(r.q + i * width_, width_, r.q_pairs + i * width_ / 2);
#endif
    for (int d = 0; d < width_; d += lanes) store(r.acc + i * width_ + d, F32{});
    r.position[i] = position;
    r.slope[i] = a_.logits.alibi_slopes ? read(*a_.logits.alibi_slopes, h * a_.logits.alibi_slopes->stride[0]) : 0.0f;
    r.state[i] = {};
    r.first[i] = window > 0 && position - window + 1 > 0 ? position - window + 1 : 0;
    r.last[i] = a_.causal && position < keys - 1 ? position : keys - 1;
    if (!a_.causal && window > 0 && position + window - 1 < r.last[i]) r.last[i] = position + window - 1;
    if (query >= s.real) r.last[i] = -1;
    if (r.first[i] > r.last[i]) continue;
    first_seen = r.first[i] < first_seen ? r.first[i] : first_seen;
    last_seen = r.last[i] > last_seen ? r.last[i] : last_seen;
  }
  const auto blocks = [&](std::int64_t begin, std::int64_t end, const auto& load_block) {  // positions [begin, end)
    const std::int64_t from = first_seen > begin ? (first_seen - begin) / key_block * key_block : 0;
    for (std::int64_t j = from; begin + j < end && begin + j <= last_seen; j += key_block) {
      const std::int64_t left = (end - 1 < last_seen ? end - 1 : last_seen) + 1 - begin - j;
      const int n = left < key_block ? static_cast<int>(left) : key_block;
      attend_block(r, rows, begin + j, n, load_block(j, n));
    }
  };
  blocks(0, s.cached, [&](std::int64_t j, int n) { return load_cached(s, head, j, n, r); });
  blocks(s.cached, keys, [&](std::int64_t j, int n) { return load_new(s, head, j, n, r); });

  for (int i = 0; i < rows; ++i) {
    const std::int64_t query = first_query + i / group_, h = head * group_ + i % group_;
    row_epilogue(a_.logits, query < s.real, h, r.state[i], r.acc + i * width_, dim_, width_, a_.out,
                 s.out + query * a_.out.stride[0] + h * a_.out.stride[1], a_.lse,
                 s.lse + query * a_.lse.stride[0] + h * a_.lse.stride[1]);
  }
}

}  // namespace

void prefill_attention(const Parallel& parallel, const PrefillArgs& a) { Prefill(parallel, a).run(); }

}  // namespace rooftile::cpu::ROOFTILE_ISA
