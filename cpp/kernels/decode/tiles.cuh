// SPDX-License-Identifier: Apache-2.0
// One warp's work on one tile of tokens, for every kind of cache: scores, softmax, values.
//   S^T [tokens, 8 columns] = K [tokens, D] Q^T      K is operand A, tokens are its rows
//   O^T [W, 8 columns]     += V^T [W, tokens] P^T    V^T is operand A, head_dim its rows; P^T is S^T transposed in registers
// W: channels of the warp's own: D, or half of it where two warps have the same tiles; `part` is which half. Both then find
// the same scores.
// Lane (g, t) owns columns 2t and 2t + 1 of both: their maximum, sum and rescaling never leave the lane's quad column.
#pragma once

#include "kernels/decode/queries.cuh"
#include "tile/copy.cuh"
#include "tile/dequant.cuh"
#include "tile/mma.cuh"
#include "tile/softmax.cuh"

namespace rooftile::gpu {

// What a format's codes are as operands: fp16 in units of code_unit; 4-bit codes come in pairs of which the odd ones count 16
// times as much. Codes of a middle are unsigned as operands, so much too large: the middle is taken off the sums.
template <KvFormat F>
struct CodeKind {
  static constexpr bool codes = !is_element_format(F), pairs = code_bits(F) == 4, middle = codes && F != KvFormat::fp8;
  static constexpr float unit = F == KvFormat::fp8 ? tile::e4m3_unit : tile::code_unit, odd_unit = pairs ? tile::odd_code_unit : unit;
  static constexpr float excess = pairs ? 8 : 128;                                            // of every code
  static constexpr std::uint32_t excess_pair = pairs ? tile::pair_of_8 : tile::pair_of_128;   // in code units
  static constexpr std::uint32_t flip = pairs && !has_min(F) ? 0x88888888u : 0;               // two's complement -> unsigned

  // A word of codes of eight bits -> two pairs, of four bits -> four.
  __device__ __forceinline__ static void decode(std::uint32_t word, std::uint32_t& low, std::uint32_t& high) {
    if constexpr (F == KvFormat::fp8) tile::decode_e4m3(word, low, high);
    else tile::decode_int8_plus_128(word, low, high);
  }
  __device__ __forceinline__ static void decode(std::uint32_t word, std::uint32_t (&pair)[4]) { tile::decode_uint4(word ^ flip, pair); }
};

// A warp's running state over its tokens of one leaf.
template <int W, KvFormat F>
struct WarpState {
  static constexpr bool middle = CodeKind<F>::middle;
  float m[2], l[2];          // l: this lane's share. m: what the weights count from, at most `slack` below the largest logit
  float shift[2];            // the part of every output of the column that does not depend on d; this lane's share
  float o[W / 16 + middle][4];   // (own d 16 i + g, columns 2t, 2t + 1), (d 16 i + 8 + g, ...); then how much they have too much
  float unit;                // o counts in this unit, a power of two; 0: nothing added yet

  __device__ __forceinline__ void reset() {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      m[j] = -INFINITY;
      l[j] = shift[j] = 0.0f;
    }
#pragma unroll
    for (auto& tile : o)
      for (float& x : tile) x = 0.0f;
    unit = 0.0f;
  }
  __device__ __forceinline__ void scale_values(float first, float second) {
    if (unit == 0.0f) return;   // all zeros
#pragma unroll
    for (auto& tile : o) {
      tile[0] *= first;
      tile[1] *= second;
      tile[2] *= first;
      tile[3] *= second;
    }
  }
  // The values of o, finished and times a weight a column. Codes: whether codes were added, or elements. What the columns of
  // a bf16 cache's codes count in can be so large that it must not be multiplied with the codes' unit.
  template <class T, bool Codes>
  struct Values {
    float factor[2], excess[2], shift[2], unit;
    static constexpr float upper = CodeKind<F>::unit / CodeKind<F>::odd_unit;   // rows 8 + g: the decoder's odd pairs
    static constexpr bool apart = std::is_same_v<T, tile::bf16>;

    __device__ __forceinline__ Values(const WarpState& state, const float (&weight)[2]) {
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if constexpr (Codes) {
          factor[j] = weight[j] * (1.0f / CodeKind<F>::unit) * (apart ? 1.0f : state.unit);
          if constexpr (middle) excess[j] = -state.o[W / 16][j] * factor[j];
          else excess[j] = 0.0f;
          shift[j] = state.shift[j] * weight[j];
        } else {
          factor[j] = weight[j];
        }
      }
      unit = state.unit;
    }
    __device__ __forceinline__ float operator()(float o, int e) const {
      const int j = e % 2;
      if constexpr (!Codes) return o * factor[j];
      const float sum = __fmaf_rn(o, e / 2 == 1 ? factor[j] * upper : factor[j], apart ? excess[j] : excess[j] + shift[j]);
      return apart ? __fmaf_rn(sum, unit, shift[j]) : sum;
    }
  };

  // Sums of codes become sums of elements, and elements may follow.
  template <class T>
  __device__ __forceinline__ void become_elements() {
    if constexpr (has_min(F)) {
#pragma unroll
      for (float& x : shift)
#pragma unroll
        for (int step = 4; step < 32; step *= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
    }
    const float one[2] = {1.0f, 1.0f};
    const Values<T, true> values(*this, one);
#pragma unroll
    for (int i = 0; i < W / 16; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e) o[i][e] = values(o[i][e], e);
    shift[0] = shift[1] = 0.0f;
    unit = 1.0f;
  }
};

// Multiples of a soft cap -> logits in units of log2, in place; without one, what comes are logits. tanh x is
// 1 - 2 / (1 + e^2x): off by 2^-23 at most, not in proportion to small x, but logits are compared by differences.
template <int M>
__device__ __forceinline__ void soft_cap(float (&s)[M][4], float softcap) {
  if (softcap == 0.0f) return;
  const float top = softcap * tile::log2_e;
#pragma unroll
  for (auto& tile : s)
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[i] = top - 2.0f * top * tile::fast_reciprocal(1.0f + tile::fast_exp2(2.0f * tile::log2_e * tile[i]));
}

// Whether all columns see all of `tokens` tokens from `token` on.
__device__ __forceinline__ bool all_seen(const Visible& v, int token, int tokens) {
  return token >= v.inner_begin && token + tokens <= v.inner_end;
}
// token: of row 0 of the tile. M row blocks of 16.
template <int M>
__device__ __forceinline__ void mask(float (&s)[M][4], const Visible& v, int token, int lane) {
  if (all_seen(v, token, 16 * M)) return;
#pragma unroll
  for (int mt = 0; mt < M; ++mt)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = token + 16 * mt + 8 * (i / 2) + lane / 4;
      if (at < v.begin[i & 1] || at >= v.end[i & 1]) s[mt][i] = -INFINITY;
    }
}

// Logits -> weights 2^(x - m), in place. m and what was summed before follow the maximum only when it is more than `slack`
// above m: weights of up to 2^slack are no loss to fp16 or to the sums, and most tiles get by without a shuffle.
inline constexpr float slack = 8.0f;
template <int M, int W, KvFormat F>
__device__ __forceinline__ void online_softmax(float (&s)[M][4], WarpState<W, F>& state) {
  float top[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    top[j] = fmaxf(s[0][j], s[0][j + 2]);
#pragma unroll
    for (int mt = 1; mt < M; ++mt) top[j] = fmaxf(top[j], fmaxf(s[mt][j], s[mt][j + 2]));
  }
  if (__any_sync(0xffffffffu, top[0] > state.m[0] + slack || top[1] > state.m[1] + slack)) {
    float scale[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
#pragma unroll
      for (int step = 4; step < 32; step *= 2) top[j] = fmaxf(top[j], __shfl_xor_sync(0xffffffffu, top[j], step));
      const bool follows = top[j] > state.m[j] + slack;
      scale[j] = follows ? tile::fast_exp2(state.m[j] - top[j]) : 1.0f;
      if (follows) state.m[j] = top[j];
      state.l[j] *= scale[j];
      state.shift[j] *= scale[j];
    }
    state.scale_values(scale[0], scale[1]);
  }
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    const float base = state.m[j] == -INFINITY ? 0.0f : state.m[j];
#pragma unroll
    for (int mt = 0; mt < M; ++mt)
#pragma unroll
      for (int i = j; i < 4; i += 2) {
        s[mt][i] = tile::fast_exp2(s[mt][i] - base);
        state.l[j] += s[mt][i];
      }
  }
}

// Weights of 16 tokens as operand B of the product with V.
template <class T>
__device__ __forceinline__ tile::FragmentB weights_fragment(const float (&s)[4]) {
  return {{tile::transpose_8x8(tile::pack<T>(s[0], s[1])), tile::transpose_8x8(tile::pack<T>(s[2], s[3]))}};
}

// ---- 16-bit keys and values, 16 tokens, from shared memory ----

// Copies 16 rows, `stride` bytes apart, into a tile, by Lanes threads; a row that `wanted` denies becomes 0 and is not read.
template <class T, int D, int Lanes, class Wanted>
__device__ __forceinline__ void copy_rows_async(T* to, int lane, const std::byte* from, std::int64_t stride, const Wanted& wanted) {
  constexpr int pieces = D / 8, rows = Lanes / pieces;   // of a row; that are copied at once
  const int first = lane / pieces, d = lane % pieces * 8;
  if (first >= rows) return;
  const std::byte* at = from + first * stride + d * sizeof(T);
#pragma unroll
  for (int row = 0; row < 16; row += rows, at += rows * stride) {
    const bool take = wanted(row + first);
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(*reinterpret_cast<const cute::uint128_t*>(take ? at : from),
                                                                 *reinterpret_cast<cute::uint128_t*>(to + swizzled<D>(row + first, d)), take);
  }
}

// Two sums, of even and of odd steps, so that no product waits for the one before it.
template <class T, int D>
__device__ __forceinline__ void scores16(float (&s)[1][4], const T* k, const tile::FragmentB (&q)[D / 16], int lane) {
  float sum[2][4] = {};
#pragma unroll
  for (int ks = 0; ks < D / 16; ++ks)
    tile::mma<T>(sum[ks % 2], tile::load_8x8x4(k + swizzled<D>(lane % 16, 16 * ks + lane / 16 * 8)), q[ks]);
#pragma unroll
  for (int i = 0; i < 4; ++i) s[0][i] = sum[0][i] + sum[1][i];
}

// V^T of 16 tokens x channels 16 i .. 16 i + 15 as operand A.
template <class T, int D>
__device__ __forceinline__ tile::FragmentA values_fragment(const T* v, int i, int lane) {
  return tile::load_8x8x4_transposed(v + swizzled<D>(lane % 8 + lane / 16 * 8, 16 * i + lane / 8 % 2 * 8));
}
template <class T, int D, int W, KvFormat F>
__device__ __forceinline__ void values16(WarpState<W, F>& state, const float (&s)[1][4], const T* v, int lane, int part) {
  const tile::FragmentB weights = weights_fragment<T>(s[0]);
  state.unit = 1.0f;
#pragma unroll
  for (int i = 0; i < W / 16; ++i) tile::mma<T>(state.o[i], values_fragment<T, D>(v, part * (W / 16) + i, lane), weights);
}

// The same where some columns do not see all of the tokens. A weight of 0 does not keep out a NaN or an infinity, so every
// new token takes a product of its own, over the values that it sees, and its own columns of it.
template <class T, int D, int W, KvFormat F>
__device__ __forceinline__ void values16_apart(WarpState<W, F>& state, const float (&s)[1][4], const T* v, const Visible& see, int token, int lane, int part) {
  const tile::FragmentB weights = weights_fragment<T>(s[0]);
  state.unit = 1.0f;
  int last = max(see.query[0], see.query[1]);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) last = max(last, __shfl_xor_sync(0xffffffffu, last, step));
  for (int query = __shfl_sync(0xffffffffu, see.query[0], 0); query <= last; ++query) {
    // what it sees, from a lane that has a column of it; the lane's four tokens are 2t, 2t + 1, 2t + 8, 2t + 9
    const bool own[2] = {see.query[0] == query, see.query[1] == query};
    const int from = first_bit(__ballot_sync(0xffffffffu, own[0] || own[1]));
    const int begin = __shfl_sync(0xffffffffu, own[0] ? see.begin[0] : see.begin[1], from) - token;
    const int end = __shfl_sync(0xffffffffu, own[0] ? see.end[0] : see.end[1], from) - token;
    std::uint32_t seen[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = lane % 4 * 2 + 8 * half;
      seen[half] = (at >= begin && at < end ? 0xffffu : 0u) | (at + 1 >= begin && at + 1 < end ? 0xffff0000u : 0u);
    }
#pragma unroll
    for (int i = 0; i < W / 16; ++i) {
      tile::FragmentA a = values_fragment<T, D>(v, part * (W / 16) + i, lane);
#pragma unroll
      for (int r = 0; r < 4; ++r) a.r[r] &= seen[r / 2];
      float sum[4] = {state.o[i][0], state.o[i][1], state.o[i][2], state.o[i][3]};
      tile::mma<T>(sum, a, weights);
#pragma unroll
      for (int e = 0; e < 4; ++e) state.o[i][e] = own[e % 2] ? sum[e] : state.o[i][e];
    }
  }
}

// ---- codes, 32 tokens, from shared memory into operands ----

// Where a lane's 16-byte pieces of a KV head's blocks lie: of K's codes in page 0 and slot 0, and the others' from there
// (one block's parts, core/kv_layout.h).
template <KvFormat F, int D>
struct CodeSource {
  static constexpr int group_pieces = is_kivi(F) ? D / 8 : 0;   // of scales of K's channels, and as many of minima
  static constexpr int token_pieces = has_min(F) || !is_kivi(F) ? 8 : 4;   // lanes that copy scales of tokens
  const std::byte* k;
  int v, k_scale, k_min, token_scales;
  int page_size;

  __device__ __forceinline__ CodeSource(const KvCacheView& c, int kv_head, int lane)
      : k(c.k.codes + kv_head * c.k.head_stride + lane * 16), v(static_cast<int>(c.v.codes - c.k.codes)), page_size(c.page_size) {
    k_scale = static_cast<int>(c.k.scale - c.k.codes);
    k_min = static_cast<int>(c.k.min - c.k.codes);
    token_scales = static_cast<int>((lane < 4 ? c.v.scale : is_kivi(F) ? c.v.min : c.k.scale) - c.k.codes) + (lane % 4 - lane) * 16;
  }
};

// One tile as it lies in its page: codes of K and of V, each one run of bytes, then the scales.
template <KvFormat F, int D>
struct CodeStage {
  static constexpr int row_bytes = D * code_bits(F) / 8, tile_bytes = 32 * row_bytes;
  static constexpr int row_pieces = row_bytes / 16;                         // of 16 bytes
  // Two neighbouring rows would share all banks: pieces of odd ones change places with those that the other lanes read.
  static constexpr int exchange = row_bytes % 128 != 0 ? 0 : code_bits(F) == 8 ? 4 : 1;

  alignas(16) unsigned char k[tile_bytes], v[tile_bytes];
  // Scales and minima in the order in which the lanes copy them: of K's channels, then of the tokens.
  alignas(16) std::uint16_t k_scale[is_kivi(F) ? D : 8], k_min[has_min(F) ? D : 8];
  alignas(16) std::uint16_t token_scales[64];
  __device__ __forceinline__ const std::uint16_t* v_scale() const { return token_scales; }
  __device__ __forceinline__ const std::uint16_t* second_scale() const { return token_scales + 32; }   // V's minima, or int8 K's scales

  // Where 16 bytes of a row of K lie.
  __device__ __forceinline__ static int k_piece(int token, int piece) {
    return token * row_bytes + (piece ^ (token & 1) * exchange) * 16;
  }

  // Starts the copy of a tile, by Lanes threads. first, second: offsets of the pages of its tokens 0 and 16; slot of token 0.
  template <int Lanes>
  __device__ __forceinline__ void copy_async(const CodeSource<F, D>& from, std::int64_t first, std::int64_t second, int slot, int lane) {
    constexpr int run = Lanes * 16;   // bytes copied at once
    static_assert(tile_bytes % run == 0);
    const bool two_pages = !is_kivi(F) && from.page_size == 16;   // kivi pages hold whole groups
    const std::byte* const pages[2] = {from.k + first, from.k + second};
    const std::byte* const rows[2] = {pages[0] + slot * row_bytes, two_pages ? pages[1] : pages[0] + (slot + 16) * row_bytes};
#pragma unroll
    for (int i = 0; i < tile_bytes / run; ++i) {
      const int at = i * Lanes + lane;
      const bool second = at >= 16 * row_pieces;
      tile::cp_async_16(k + k_piece(at / row_pieces, at % row_pieces), (second ? rows[1] - 16 * row_bytes : rows[0]) + i * run);
    }
    if (CodeKind<F>::pairs && two_pages) {   // V blocks of 16 tokens: half of every lane's piece in each page
#pragma unroll
      for (int i = 0; i < D / Lanes; ++i)
#pragma unroll
        for (int half = 0; half < 2; ++half) tile::cp_async_8(v + (i * Lanes + lane) * 16 + half * 8, pages[half] + (from.v + i * (Lanes * 8) - lane * 8));
    } else {
#pragma unroll
      for (int i = 0; i < tile_bytes / run; ++i) {
        const int half = i * run / (16 * row_bytes);   // 8-bit codes: a multiple of the lanes' pieces lies in either
        tile::cp_async_16(v + (i * Lanes + lane) * 16, rows[CodeKind<F>::pairs ? 0 : half] + (from.v + i * run - (CodeKind<F>::pairs ? 0 : half * 16 * row_bytes)));
      }
    }
    if constexpr (is_kivi(F)) {
      const int group = slot / kv_group * (D * 2);
#pragma unroll
      for (int i = 0; i < from.group_pieces; i += Lanes)
        if (i + lane < from.group_pieces) {
          tile::cp_async_16(k_scale + (i + lane) * 8, pages[0] + (from.k_scale + group + i * 16));
          if constexpr (has_min(F)) tile::cp_async_16(k_min + (i + lane) * 8, pages[0] + (from.k_min + group + i * 16));
        }
    }
    if (lane < from.token_pieces) {
      const std::byte* scales = lane % 4 < 2 || !two_pages ? pages[0] + slot * 2 : pages[1] - 32;
      tile::cp_async_16(token_scales + lane * 8, scales + from.token_scales);
    }
  }
};

__device__ __forceinline__ std::uint32_t word(const uint4& x, int i) { return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w; }

template <class T>
__device__ __forceinline__ float stored_scale(std::uint32_t bits) {
  return tile::to_float(__builtin_bit_cast(T, static_cast<unsigned short>(bits)));
}
// What the K scales and minima of a group are divided by before they become fp16: 1 for an fp16 cache, for a bf16 cache
// whose range is wider a power of two within a factor of two of the largest. A warp's work.
template <class T, KvFormat F, int D>
struct GroupUnit {
  float unit = 1.0f;
  std::uint32_t inverse = 0;   // bf16, twice

  __device__ __forceinline__ explicit GroupUnit(const CodeStage<F, D>& x, int lane) {
    if constexpr (std::is_same_v<T, tile::bf16>) {
      std::uint32_t top = 0;   // of the magnitudes' bits
      const auto add = [&](const std::uint16_t* from) {
#pragma unroll
        for (int i = 0; i < D / 2; i += 32)
          if (i + lane < D / 2) {
            const std::uint32_t w = *reinterpret_cast<const std::uint32_t*>(from + (i + lane) * 2);
            top = max(top, max(w & 0x7fff, w >> 16 & 0x7fff));
          }
      };
      add(x.k_scale);
      if constexpr (has_min(F)) add(x.k_min);
      const std::uint32_t exponent = __reduce_max_sync(0xffffffffu, top) >> 7;
      const std::uint32_t of = exponent > 0 && exponent < 254 ? exponent : 127;   // all zeros, or not finite: as they are
      unit = __uint_as_float(of << 23);
      inverse = (254 - of) * 0x00800080u;
    }
  }
  // Two stored scales or minima.
  __device__ __forceinline__ std::uint32_t f16(std::uint32_t pair) const {
    if constexpr (std::is_same_v<T, tile::half>) return pair;
    const __nv_bfloat162 x = __hmul2(reinterpret_cast<const __nv_bfloat162&>(pair), reinterpret_cast<const __nv_bfloat162&>(inverse));
    return tile::pack<tile::half>(__low2float(x), __high2float(x));
  }
};

// The query columns as operands B in the order of the codes, divided by a power of two that keeps them below 1.
template <KvFormat F, int D>
struct CodeQueries {
  tile::FragmentB q[D / 16];
  float unit[2];     // that power, of columns 2t and 2t + 1
  float excess[2];   // scales per token: what their scores have too much, in code units

  // columns_at: the columns as copy_queries_async left them.
  template <class T>
  __device__ __forceinline__ void load(const T* columns_at, int lane) {
    constexpr int quarter = D / 4;
    // The head_dim of the lane's codes: four bits: neighbours of its quarter of the row; eight: 16-byte pieces of every 64, and
    // of 8 bytes of the last 32.
    float x[quarter], top = 0.0f;
#pragma unroll
    for (int i = 0; i < quarter / 8; ++i) {
      const int d = code_bits(F) == 4 ? lane % 4 * quarter + 8 * i
                    : i / 2 < D / 64  ? i / 2 * 64 + lane % 4 * 16 + i % 2 * 8
                                      : D / 64 * 64 + lane % 4 * 8;
      const uint4 part = *reinterpret_cast<const uint4*>(columns_at + swizzled<D>(lane / 4, d));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 pair = tile::unpack<T>(word(part, j));
        x[8 * i + 2 * j] = pair.x;
        x[8 * i + 2 * j + 1] = pair.y;
        top = fmaxf(top, fmaxf(fabsf(pair.x), fabsf(pair.y)));
      }
    }
#pragma unroll
    for (int step = 1; step < 4; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    // the power of two above the largest; 1 for a column of zeros or of infinities
    const std::uint32_t exponent = __float_as_uint(top) >> 23;
    const bool ordinary = exponent > 0 && exponent < 253;
    const float own = ordinary ? __uint_as_float((exponent + 1) << 23) : 1.0f, inverse = ordinary ? __uint_as_float((253 - exponent) << 23) : 1.0f;
#pragma unroll
    for (int ks = 0; ks < D / 16; ++ks)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        // four bits: word ks / 2 holds pairs (r, r + 4), a product takes two even or two odd ones; eight: word ks holds neighbours
        const int low = code_bits(F) == 4 ? ks / 2 * 8 + ks % 2 + 2 * half : ks * 4 + 2 * half;
        const int high = code_bits(F) == 4 ? low + 4 : low + 1;
        q[ks].r[half] = tile::pack<tile::half>(x[low] * inverse, x[high] * inverse);
      }
#pragma unroll
    for (int j = 0; j < 2; ++j) unit[j] = __shfl_sync(0xffffffffu, own, (lane % 4 * 2 + j) * 4);
    if constexpr (CodeKind<F>::middle && !is_kivi(F)) {
      float sum = 0.0f;   // of what the tensor cores see
#pragma unroll
      for (const tile::FragmentB& fragment : q)
#pragma unroll
        for (const std::uint32_t pair : fragment.r) {
          const float2 two = tile::unpack<tile::half>(pair);
          sum += two.x + two.y;
        }
#pragma unroll
      for (int step = 1; step < 4; step *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
#pragma unroll
      for (int j = 0; j < 2; ++j) excess[j] = __shfl_sync(0xffffffffu, sum, (lane % 4 * 2 + j) * 4) * (CodeKind<F>::excess * tile::code_unit);
    }
  }
};

// Words of codes at shared memory, as many as lie there together.
template <int N>
__device__ __forceinline__ void load_words(std::uint32_t (&to)[N], const unsigned char* from) {
  static_assert(N == 1 || N == 2 || N == 4);
  if constexpr (N == 4) {
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    to[0] = x.x, to[1] = x.y, to[2] = x.z, to[3] = x.w;
  } else if constexpr (N == 2) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    to[0] = x.x, to[1] = x.y;
  } else {
    to[0] = *reinterpret_cast<const std::uint32_t*>(from);
  }
}

// Scores of 32 tokens whose codes have eight bits, in code units: W words of every token and lane, from `from` on; q: fragments
// that meet them.
template <KvFormat F, int W>
__device__ __forceinline__ void byte_scores(float (&s)[2][4], const unsigned char* const (&from)[4], const tile::FragmentB* q) {
  std::uint32_t row[4][W];
#pragma unroll
  for (int i = 0; i < 4; ++i) load_words(row[i], from[i]);
#pragma unroll
  for (int w = 0; w < W; ++w)
#pragma unroll
    for (int mt = 0; mt < 2; ++mt) {
      tile::FragmentA a;
      CodeKind<F>::decode(row[2 * mt][w], a.r[0], a.r[2]);
      CodeKind<F>::decode(row[2 * mt + 1][w], a.r[1], a.r[3]);
      tile::mma<tile::half>(s[mt], a, q[w]);
    }
}

// Scores of 32 tokens. factor: per column, what a score in the queries' units is multiplied with.
template <class T, KvFormat F, int D>
__device__ __forceinline__ void code_scores(float (&s)[2][4], const CodeStage<F, D>& x, const CodeQueries<F, D>& q,
                                            const float (&factor)[2], int lane) {
  using Kind = CodeKind<F>;
  const int g = lane / 4, t = lane % 4;
  // Of codes of four bits, even and odd pairs count in different units, so each have their sums; of eight `even` has all.
  float even[2][4] = {}, odd[2][4] = {};
  if constexpr (Kind::middle && !is_kivi(F)) {
#pragma unroll
    for (auto& tile : even)
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[i] = -q.excess[i & 1];
  }
  if constexpr (!Kind::pairs) {
#pragma unroll
    for (int part = 0; part < D / 64; ++part)   // 64 channels: 16 bytes a lane and row
      byte_scores<F, 4>(even, {x.k + x.k_piece(g, 4 * part + t), x.k + x.k_piece(g + 8, 4 * part + t), x.k + x.k_piece(g + 16, 4 * part + t),
                               x.k + x.k_piece(g + 24, 4 * part + t)}, q.q + 4 * part);
    if constexpr (D % 64 != 0) {   // the last 32
      const unsigned char* from = x.k + g * x.row_bytes + D / 64 * 64 + t * 8;
      byte_scores<F, 2>(even, {from, from + 8 * x.row_bytes, from + 16 * x.row_bytes, from + 24 * x.row_bytes}, q.q + D / 64 * 4);
    }
  } else {
    // Scales per channel: k = (u - 8) * scale + (min + 8 * scale): the scales go into the queries, the second part is one row for
    // all tokens. What has been rounded is what is taken off again: eights times the scaled queries, as the codes met them.
    float eights[4] = {}, centre[4] = {};
    const GroupUnit<T, F, D> group(x, lane);
    constexpr int W = D % 128 == 0 ? 4 : D % 64 == 0 ? 2 : 1;   // a lane's quarter of a row is D / 32 words of 8 codes, W together
#pragma unroll
    for (int part = 0; part < D / 32; part += W) {
      std::uint32_t row[4][W];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (W == 4) load_words(row[i], x.k + x.k_piece(g + 8 * i, (t * (D / 32) + part) / 4));
        else load_words(row[i], x.k + (g + 8 * i) * x.row_bytes + (t * (D / 32) + part) * 4);
      }
#pragma unroll
      for (int v = 0; v < W; ++v) {
        const int w = part + v, channel = t * (D / 4) + 8 * w;
        std::uint32_t scale[4] = {}, middle[4] = {};   // of pairs (r, r + 4)
        if constexpr (is_kivi(F)) {
          const uint4 scales = *reinterpret_cast<const uint4*>(x.k_scale + channel);
          uint4 minima = {};
          if constexpr (has_min(F)) minima = *reinterpret_cast<const uint4*>(x.k_min + channel);
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const std::uint32_t selector = r % 2 ? 0x7632 : 0x5410;
            scale[r] = group.f16(__byte_perm(word(scales, r / 2), word(scales, 2 + r / 2), selector));
            if constexpr (has_min(F))
              middle[r] = tile::fma_f16x2(scale[r], 0x48004800u, group.f16(__byte_perm(word(minima, r / 2), word(minima, 2 + r / 2), selector)));
          }
        }
        std::uint32_t code[4][4];   // row block, pair
#pragma unroll
        for (int i = 0; i < 4; ++i) Kind::decode(row[i][v], code[i]);
#pragma unroll
        for (int h = 0; h < 2; ++h) {   // pairs h and h + 2
          tile::FragmentB with = q.q[2 * w + h];
          if constexpr (has_min(F)) tile::mma<tile::half>(centre, {{middle[h], middle[h], middle[h + 2], middle[h + 2]}}, with);
          if constexpr (is_kivi(F)) {
            with = {{tile::mul_f16x2(with.r[0], scale[h]), tile::mul_f16x2(with.r[1], scale[h + 2])}};
            constexpr std::uint32_t minus_8 = 0xc800c800u;
            tile::mma<tile::half>(eights, {{minus_8, minus_8, minus_8, minus_8}}, with);
          }
#pragma unroll
          for (int mt = 0; mt < 2; ++mt)
            tile::mma<tile::half>(h == 0 ? even[mt] : odd[mt], {{code[2 * mt][h], code[2 * mt + 1][h], code[2 * mt][h + 2], code[2 * mt + 1][h + 2]}}, with);
        }
      }
    }
    if constexpr (is_kivi(F)) {
      float of_even[2], of_odd[2], base[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float of_one = factor[j] * group.unit;
        of_even[j] = of_one * (1.0f / Kind::unit);
        of_odd[j] = of_one * (1.0f / Kind::odd_unit);
        base[j] = (eights[j] + centre[j]) * of_one;
      }
#pragma unroll
      for (int mt = 0; mt < 2; ++mt)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[mt][i] = __fmaf_rn(even[mt][i], of_even[i & 1], __fmaf_rn(odd[mt][i], of_odd[i & 1], base[i & 1]));
    }
  }
  if constexpr (!is_kivi(F)) {
#pragma unroll
    for (int mt = 0; mt < 2; ++mt)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float scale = stored_scale<T>(x.second_scale()[16 * mt + 8 * (i / 2) + g]) * (1.0f / Kind::unit);
        const float sum = Kind::pairs ? __fmaf_rn(odd[mt][i], Kind::unit / Kind::odd_unit, even[mt][i]) : even[mt][i];
        s[mt][i] = sum * (scale * factor[i & 1]);
      }
  }
}

// What the values of 32 tokens are weighed with besides the probabilities, of the lane's rows of the scores: the scale in the
// state's unit, and what the minima make of the middle of the codes. Found before the scores, so that nothing waits for it.
template <KvFormat F>
struct TokenScales {
  float scale[4], middle[has_min(F) ? 4 : 1];

  // Also brings the state to the unit that these tokens need. A token that no column sees has 0, whatever the memory holds.
  template <class T, int W, int D>
  __device__ __forceinline__ void load(WarpState<W, F>& state, const CodeStage<F, D>& x, const Visible& see, int token, int lane) {
    const bool wanted = token + lane >= see.outer_begin && token + lane < see.outer_end;
    const float own = wanted ? stored_scale<T>(x.v_scale()[lane]) : 0.0f;
    // Weights times scales become fp16 in units of a power of two above the largest finite scale so far, or above twice of it.
    const std::uint32_t magnitude = __float_as_uint(own) & 0x7fffffffu;
    const std::uint32_t top = __reduce_max_sync(0xffffffffu, magnitude < 0x7f800000u ? magnitude : 0u);
    if (top > __float_as_uint(state.unit) || state.unit == 0.0f) {
      const std::uint32_t bits = min(top & 0x7f800000u, 0x7d800000u) + 0x01000000u;
      const float change = state.unit * __uint_as_float(0x7f000000u - bits);
      state.scale_values(change, change);
      state.unit = __uint_as_float(bits);
    }
    const float scaled = own * __uint_as_float(0x7f000000u - __float_as_uint(state.unit));
    float centre = 0.0f;
    if constexpr (has_min(F)) centre = wanted ? stored_scale<T>(x.second_scale()[lane]) + 8.0f * own : 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scale[i] = __shfl_sync(0xffffffffu, scaled, 8 * i + lane / 4);
      if constexpr (has_min(F)) middle[i] = __shfl_sync(0xffffffffu, centre, 8 * i + lane / 4);
    }
  }
};

// Weights of 32 tokens times their scales as operands B; what the minima add goes into the shift. All: every column sees all
// of them, else what one does not see counts as 0 in it.
template <bool All, int W, KvFormat F>
__device__ __forceinline__ void weigh_tokens(tile::FragmentB (&weights)[2], WarpState<W, F>& state, const float (&s)[2][4],
                                             const TokenScales<F>& scales, const Visible& see, int token, int lane) {
#pragma unroll
  for (int mt = 0; mt < 2; ++mt) {
    float p[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = token + 16 * mt + 8 * half + lane / 4;
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const bool seen = All || (at >= see.begin[j] && at < see.end[j]);
        const float weight = s[mt][2 * half + j];
        if constexpr (has_min(F)) state.shift[j] = seen ? __fmaf_rn(weight, scales.middle[2 * mt + half], state.shift[j]) : state.shift[j];
        p[2 * half + j] = seen ? weight * scales.scale[2 * mt + half] : 0.0f;
      }
    }
    weights[mt] = weights_fragment<tile::half>(p);
  }
}

// Adds the values of 32 tokens, `token` and the next. The tokens' scales go into the weights, minima into the column's shift.
template <class T, KvFormat F, int D, int W>
__device__ __forceinline__ void code_values(WarpState<W, F>& state, const float (&s)[2][4], const CodeStage<F, D>& x,
                                            const TokenScales<F>& scales, const Visible& see, int token, int lane, int part) {
  tile::FragmentB weights[2];
  if (all_seen(see, token, 32)) weigh_tokens<true>(weights, state, s, scales, see, token, lane);
  else weigh_tokens<false>(weights, state, s, scales, see, token, lane);
  using Kind = CodeKind<F>;
  if constexpr (Kind::middle) {
    constexpr std::uint32_t excess = Kind::excess_pair;
#pragma unroll
    for (const tile::FragmentB& w : weights) tile::mma<tile::half>(state.o[W / 16], {{excess, excess, excess, excess}}, w);
  }
  // Blocks of 512 bytes: codes of eight bits 16 tokens x 32 channels, of four 32 x 32; a lane's 16 bytes lie in lane order.
  const auto* blocks = reinterpret_cast<const uint4*>(x.v) + part * W + lane;
  if constexpr (!Kind::pairs) {
#pragma unroll
    for (int mt = 0; mt < 2; ++mt)
#pragma unroll
      for (int dt = 0; dt < W / 32; ++dt) {
        const uint4 piece = blocks[(mt * (D / 32) + dt) * 32];
#pragma unroll
        for (int j = 0; j < 4; j += 2) {   // word j: d 8 j + g; bytes: tokens 2t, 2t + 1, 2t + 8, 2t + 9
          tile::FragmentA a;
          Kind::decode(word(piece, j), a.r[0], a.r[2]);
          Kind::decode(word(piece, j + 1), a.r[1], a.r[3]);
          tile::mma<tile::half>(state.o[2 * dt + j / 2], a, weights[mt]);
        }
      }
  } else {
#pragma unroll
    for (int dt = 0; dt < W / 32; ++dt) {
      const uint4 piece = blocks[dt * 32];
#pragma unroll
      for (int mt = 0; mt < 2; ++mt) {   // word w: tokens 8 w + 2t and the next; pair r: d 8 r + g
        std::uint32_t even[4], odd[4];
        Kind::decode(word(piece, 2 * mt), even);
        Kind::decode(word(piece, 2 * mt + 1), odd);
#pragma unroll
        for (int r = 0; r < 4; r += 2)
          tile::mma<tile::half>(state.o[2 * dt + r / 2], {{even[r], even[r + 1], odd[r], odd[r + 1]}}, weights[mt]);
      }
    }
  }
}

}  // namespace rooftile::gpu
