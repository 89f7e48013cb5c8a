// SPDX-License-Identifier: Apache-2.0
// One warp's work on one tile of tokens, for every kind of cache: scores, softmax, values.
//   S^T [tokens, 8 columns] = K [tokens, D] Q^T      K is operand A, tokens are its rows
//   O^T [D, 8 columns]     += V^T [D, tokens] P^T    V^T is operand A, head_dim its rows; P^T is S^T transposed in registers
// Lane (g, t) owns columns 2t and 2t + 1 of both: their maximum, sum and rescaling never leave the lane's quad column.
#pragma once

#include "kernels/decode/queries.cuh"
#include "tile/dequant.cuh"
#include "tile/mma.cuh"
#include "tile/softmax.cuh"
#include "tile/stream.cuh"

namespace rooftile::gpu {

// A warp's running state over its tokens of one leaf.
template <int D>
struct WarpState {
  float m[2], l[2];          // l: this lane's share
  float shift[2];            // the part of every output of the column that does not depend on d; this lane's share
  float o[D / 16][4];        // (d 16 i + g, columns 2t, 2t + 1), (d 16 i + 8 + g, ...)
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
#pragma unroll
    for (auto& tile : o) {
      tile[0] *= first;
      tile[1] *= second;
      tile[2] *= first;
      tile[3] *= second;
    }
  }
};

// Scores -> logits in units of log2, in place. factor: per column, what a score is multiplied with (to log2, or, under a
// soft cap, to multiples of the cap).
template <int M>
__device__ __forceinline__ void scores_to_logits(float (&s)[M][4], const float (&factor)[2], float softcap) {
#pragma unroll
  for (auto& tile : s)
#pragma unroll
    for (int i = 0; i < 4; ++i) tile[i] *= factor[i & 1];
  if (softcap != 0.0f)
#pragma unroll
    for (auto& tile : s)
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[i] = softcap * tile::log2_e * tanhf(tile[i]);
}

// token: of row 0 of the tile. M row blocks of 16.
template <int M>
__device__ __forceinline__ void mask(float (&s)[M][4], const Visible& v, int token, int lane) {
  if (token >= v.inner_begin && token + 16 * M <= v.inner_end) return;
#pragma unroll
  for (int mt = 0; mt < M; ++mt)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int at = token + 16 * mt + 8 * (i / 2) + lane / 4;
      if (at < v.begin[i & 1] || at >= v.end[i & 1]) s[mt][i] = -INFINITY;
    }
}

// Logits -> weights 2^(x - m), in place; m, l and what was summed before follow the maximum.
template <int M, int D>
__device__ __forceinline__ void online_softmax(float (&s)[M][4], WarpState<D>& state) {
  float scale[2];
#pragma unroll
  for (int j = 0; j < 2; ++j) {
    float top = fmaxf(s[0][j], s[0][j + 2]);
#pragma unroll
    for (int mt = 1; mt < M; ++mt) top = fmaxf(top, fmaxf(s[mt][j], s[mt][j + 2]));
#pragma unroll
    for (int step = 4; step < 32; step *= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    top = fmaxf(top, state.m[j]);
    const float base = top == -INFINITY ? 0.0f : top;
    scale[j] = tile::fast_exp2(state.m[j] - base);
    state.m[j] = top;
    float sum = 0.0f;
#pragma unroll
    for (int mt = 0; mt < M; ++mt)
#pragma unroll
      for (int i = j; i < 4; i += 2) {
        s[mt][i] = tile::fast_exp2(s[mt][i] - base);
        sum += s[mt][i];
      }
    state.l[j] = state.l[j] * scale[j] + sum;
    state.shift[j] *= scale[j];
  }
  if (__any_sync(0xffffffffu, scale[0] != 1.0f || scale[1] != 1.0f)) state.scale_values(scale[0], scale[1]);
}

// Weights of 16 tokens as operand B of the product with V.
template <class T>
__device__ __forceinline__ tile::FragmentB weights_fragment(const float (&s)[4]) {
  return {{tile::transpose_8x8(tile::pack<T>(s[0], s[1])), tile::transpose_8x8(tile::pack<T>(s[2], s[3]))}};
}

// ---- 16-bit keys and values, 16 tokens, from shared memory ----

// [16 tokens][D] in shared memory, 16-byte pieces of a row exchanged by the token's low bits: no bank conflicts.
template <int D>
__device__ __forceinline__ int swizzled(int token, int d) {
  return token * D + ((d / 8) ^ (token & 7)) * 8 + d % 8;
}

// Copies rows first .. first + 15 of a tile; a row that `wanted` denies becomes 0 and is not read.
template <class T, int D, class Row, class Wanted>
__device__ __forceinline__ void copy_rows_async(T* to, int lane, const Row& row, const Wanted& wanted) {
  constexpr int pieces = D / 8;
#pragma unroll
  for (int i = 0; i < 16 * pieces / 32; ++i) {
    const int piece = i * 32 + lane, token = piece / pieces, d = piece % pieces * 8;
    const bool take = wanted(token);
    cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
        *reinterpret_cast<const cute::uint128_t*>(row(take ? token : 0) + d * sizeof(T)),
        *reinterpret_cast<cute::uint128_t*>(to + swizzled<D>(token, d)), take);
  }
}

template <class T, int D>
__device__ __forceinline__ void scores16(float (&s)[1][4], const T* k, const tile::FragmentB (&q)[D / 16], int lane) {
#pragma unroll
  for (int i = 0; i < 4; ++i) s[0][i] = 0.0f;
#pragma unroll
  for (int ks = 0; ks < D / 16; ++ks)
    tile::mma<T>(s[0], tile::load_8x8x4(k + swizzled<D>(lane % 16, 16 * ks + lane / 16 * 8)), q[ks]);
}

template <class T, int D>
__device__ __forceinline__ void values16(WarpState<D>& state, const float (&s)[1][4], const T* v, int lane) {
  const tile::FragmentB weights = weights_fragment<T>(s[0]);
  state.unit = 1.0f;
#pragma unroll
  for (int i = 0; i < D / 16; ++i)
    tile::mma<T>(state.o[i], tile::load_8x8x4_transposed(v + swizzled<D>(lane % 8 + lane / 16 * 8, 16 * i + lane / 8 % 2 * 8)), weights);
}

// ---- codes, 32 tokens, straight from global memory into operands ----

// The lane's part of a tile's codes and scales. K: rows g, g + 8, g + 16, g + 24, of each the lane's quarter.
template <KvFormat F, int D>
struct CodeTile {
  static constexpr bool four_bits = code_bits(F) == 4;
  static constexpr int k_words = D * code_bits(F) / 8 / 4 / 4;              // of a row, a lane
  static constexpr int piece = k_words < 4 ? k_words : 4;                   // words a load
  static constexpr int v_loads = 32 * D * code_bits(F) / 8 / 512;           // of 16 bytes a lane
  static constexpr int scale_words = is_kivi(F) ? D / 4 / 2 : 1;            // K: channels of the lane's quarter, or one token

  std::uint32_t k[4][k_words];
  std::uint32_t k_scale[scale_words], k_min[has_min(F) ? scale_words : 1];
  tile::Words32<4> v[v_loads];
  std::uint32_t v_scale, v_min;   // of token `lane` of the tile, 16 bits

  // at(token): the page's bytes and the slot in it, of the token that many behind the tile's first.
  template <class Where>
  __device__ __forceinline__ void load_k(const KvCacheView& c, const Where& where, int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const auto at = where(g + 8 * i);
      const std::byte* row = c.k.codes + at.offset + at.slot * (D * code_bits(F) / 8);
#pragma unroll
      for (int w = 0; w < k_words; w += piece) {
        const auto x = tile::load_stream<piece>(row + w * 16 + t * piece * 4);
#pragma unroll
        for (int j = 0; j < piece; ++j) k[i][w + j] = x.w[j];
      }
    }
    if constexpr (is_kivi(F)) {
      const auto at = where(0);
      const std::int64_t from = at.offset + (at.slot / kv_group) * (D * 2) + t * (scale_words * 4);
#pragma unroll
      for (int w = 0; w < scale_words; w += 4) {
        const uint4 s = __ldg(reinterpret_cast<const uint4*>(c.k.scale + from + w * 4));
        k_scale[w] = s.x, k_scale[w + 1] = s.y, k_scale[w + 2] = s.z, k_scale[w + 3] = s.w;
        if constexpr (has_min(F)) {
          const uint4 m = __ldg(reinterpret_cast<const uint4*>(c.k.min + from + w * 4));
          k_min[w] = m.x, k_min[w + 1] = m.y, k_min[w + 2] = m.z, k_min[w + 3] = m.w;
        }
      }
    } else {
      const auto at = where(lane);
      k_scale[0] = __ldg(reinterpret_cast<const unsigned short*>(c.k.scale + at.offset) + at.slot);
    }
  }
  // wanted: whether token `lane` is there and seen; if not its values count as 0, whatever the memory holds.
  template <class Where>
  __device__ __forceinline__ void load_v(const KvCacheView& c, const Where& where, int lane, bool wanted) {
    constexpr int tile_tokens = four_bits ? 32 : 16, tile_loads = v_loads / (32 / tile_tokens);
#pragma unroll
    for (int i = 0; i < v_loads; ++i) {
      const auto at = where(i / tile_loads * tile_tokens);
      v[i] = tile::load_stream<4>(c.v.codes + at.offset + at.slot * (D * code_bits(F) / 8) + i % tile_loads * 512 + lane * 16);
    }
    const auto at = where(wanted ? lane : 0);
    v_scale = wanted ? __ldg(reinterpret_cast<const unsigned short*>(c.v.scale + at.offset) + at.slot) : 0;
    if constexpr (has_min(F)) v_min = wanted ? __ldg(reinterpret_cast<const unsigned short*>(c.v.min + at.offset) + at.slot) : 0;
  }
};

template <class T>
__device__ __forceinline__ float stored_scale(std::uint32_t bits) {
  return tile::to_float(__builtin_bit_cast(T, static_cast<unsigned short>(bits)));
}
// Two stored scales as fp16; what a bf16 cache stores fits unless it passes 65504.
template <class T>
__device__ __forceinline__ std::uint32_t scales_f16(std::uint32_t pair) {
  if constexpr (std::is_same_v<T, tile::half>) return pair;
  const float2 x = tile::unpack<T>(pair);
  return tile::pack<tile::half>(x.x, x.y);
}

// The query columns as operands B in the order of the codes, divided by a power of two that keeps them below 1.
template <KvFormat F, int D>
struct CodeQueries {
  tile::FragmentB q[D / 16];
  float unit[2];   // that power, of columns 2t and 2t + 1

  template <class T>
  __device__ __forceinline__ void load(const DecodeParams& p, const Task& task, const RowWork& w, int lane) {
    const Column c = column_of(p, task, w, lane / 4);
    constexpr int quarter = D / 4;
    // The head_dim of the lane's codes: int4 neighbours of its quarter of the row; int8 16-byte pieces of every 64.
    float x[quarter], top = 0.0f;
#pragma unroll
    for (int i = 0; i < quarter / 16; ++i) {
      T part[16];
      load_query<T>(p, task, c, code_bits(F) == 4 ? lane % 4 * quarter + 16 * i : 64 * i + lane % 4 * 16, part);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        x[16 * i + j] = tile::to_float(part[j]);
        top = fmaxf(top, fabsf(x[16 * i + j]));
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
        // int4: word ks / 2 holds pairs (r, r + 4); int8: word ks holds neighbours
        const int low = code_bits(F) == 4 ? ks / 2 * 8 + ks % 2 * 2 + half : ks * 4 + 2 * half;
        const int high = code_bits(F) == 4 ? low + 4 : low + 1;
        q[ks].r[half] = tile::pack<tile::half>(x[low] * inverse, x[high] * inverse);
      }
#pragma unroll
    for (int j = 0; j < 2; ++j) unit[j] = __shfl_sync(0xffffffffu, own, (lane % 4 * 2 + j) * 4);
  }
};

// Scores of 32 tokens, in the queries' units; int8: still to be multiplied with the tokens' scales.
template <class T, KvFormat F, int D>
__device__ __forceinline__ void code_scores(float (&s)[2][4], const CodeTile<F, D>& x, const CodeQueries<F, D>& q) {
#pragma unroll
  for (auto& tile : s)
    for (float& e : tile) e = 0.0f;
  if constexpr (F == KvFormat::int8) {
#pragma unroll
    for (int ks = 0; ks < D / 16; ++ks)
#pragma unroll
      for (int mt = 0; mt < 2; ++mt) {
        tile::FragmentA a;
        tile::decode_int8(x.k[2 * mt][ks], a.r[0], a.r[2]);
        tile::decode_int8(x.k[2 * mt + 1][ks], a.r[1], a.r[3]);
        tile::mma<tile::half>(s[mt], a, q.q[ks]);
      }
  } else {
    // k = (u - 8) * scale + (min + 8 * scale): the scales go into the queries, the second part is one row for all tokens
    float centre[4] = {};
#pragma unroll
    for (int w = 0; w < D / 32; ++w) {
      std::uint32_t scale[4], middle[4];   // of pairs (r, r + 4)
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const std::uint32_t selector = r % 2 ? 0x7632 : 0x5410;
        scale[r] = scales_f16<T>(__byte_perm(x.k_scale[4 * w + r / 2], x.k_scale[4 * w + 2 + r / 2], selector));
        middle[r] = tile::fma_f16x2(scale[r], 0x48004800u, scales_f16<T>(__byte_perm(x.k_min[4 * w + r / 2], x.k_min[4 * w + 2 + r / 2], selector)));
      }
      std::uint32_t code[4][4];   // row block, pair
#pragma unroll
      for (int i = 0; i < 4; ++i) tile::decode_uint4_minus_8(x.k[i][w], code[i]);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const tile::FragmentB raw = q.q[2 * w + h];
        const tile::FragmentB scaled = {{tile::mul_f16x2(raw.r[0], scale[2 * h]), tile::mul_f16x2(raw.r[1], scale[2 * h + 1])}};
        tile::mma<tile::half>(centre, {{middle[2 * h], middle[2 * h], middle[2 * h + 1], middle[2 * h + 1]}}, raw);
#pragma unroll
        for (int mt = 0; mt < 2; ++mt)
          tile::mma<tile::half>(s[mt], {{code[2 * mt][2 * h], code[2 * mt + 1][2 * h], code[2 * mt][2 * h + 1], code[2 * mt + 1][2 * h + 1]}}, scaled);
      }
    }
#pragma unroll
    for (auto& tile : s)
#pragma unroll
      for (int i = 0; i < 4; ++i) tile[i] += centre[i & 1];
  }
}

// Adds the values of 32 tokens. The tokens' scales go into the weights, minima into the column's shift.
template <class T, KvFormat F, int D>
__device__ __forceinline__ void code_values(WarpState<D>& state, float (&s)[2][4], const CodeTile<F, D>& x, int lane) {
  // Weights times scales become fp16 in units of a power of two above the largest scale so far.
  const float own = stored_scale<T>(x.v_scale);
  const std::uint32_t top = __reduce_max_sync(0xffffffffu, __float_as_uint(own) & 0x7fffffffu);
  if (top > __float_as_uint(state.unit) || state.unit == 0.0f) {
    const std::uint32_t bits = min(top & 0x7f800000u, 0x7e000000u) + 0x00800000u;
    const float change = state.unit * __uint_as_float(0x7f000000u - bits);
    state.scale_values(change, change);
    state.unit = __uint_as_float(bits);
  }
  const float inverse = __uint_as_float(0x7f000000u - __float_as_uint(state.unit));
  float centre = 0.0f;
  if constexpr (has_min(F)) centre = stored_scale<T>(x.v_min) + 8.0f * own;
  const float scaled = own * inverse;
  tile::FragmentB weights[2];
#pragma unroll
  for (int mt = 0; mt < 2; ++mt) {
    float p[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int from = 16 * mt + 8 * half + lane / 4;
      const float scale = __shfl_sync(0xffffffffu, scaled, from);
      if constexpr (has_min(F)) {
        const float middle = __shfl_sync(0xffffffffu, centre, from);
        state.shift[0] += s[mt][2 * half] * middle;
        state.shift[1] += s[mt][2 * half + 1] * middle;
      }
      p[2 * half] = s[mt][2 * half] * scale;
      p[2 * half + 1] = s[mt][2 * half + 1] * scale;
    }
    weights[mt] = weights_fragment<tile::half>(p);
  }
  if constexpr (F == KvFormat::int8) {
#pragma unroll
    for (int mt = 0; mt < 2; ++mt)
#pragma unroll
      for (int dt = 0; dt < D / 32; ++dt)
#pragma unroll
        for (int j = 0; j < 4; j += 2) {   // word j: d 8 j + g; bytes: tokens 2t, 2t + 1, 2t + 8, 2t + 9
          tile::FragmentA a;
          tile::decode_int8(x.v[mt * (D / 32) + dt].w[j], a.r[0], a.r[2]);
          tile::decode_int8(x.v[mt * (D / 32) + dt].w[j + 1], a.r[1], a.r[3]);
          tile::mma<tile::half>(state.o[2 * dt + j / 2], a, weights[mt]);
        }
  } else {
#pragma unroll
    for (int dt = 0; dt < D / 32; ++dt)
#pragma unroll
      for (int mt = 0; mt < 2; ++mt) {   // word w: tokens 8 w + 2t and the next; pair r: d 8 r + g
        std::uint32_t even[4], odd[4];
        tile::decode_uint4_minus_8(x.v[dt].w[2 * mt], even);
        tile::decode_uint4_minus_8(x.v[dt].w[2 * mt + 1], odd);
#pragma unroll
        for (int r = 0; r < 4; r += 2)
          tile::mma<tile::half>(state.o[2 * dt + r / 2], {{even[r], even[r + 1], odd[r], odd[r + 1]}}, weights[mt]);
      }
  }
}

// int8: the tokens' scales of K, on the scores.
template <class T>
__device__ __forceinline__ void scale_scores(float (&s)[2][4], std::uint32_t k_scale, int lane) {
  const float own = stored_scale<T>(k_scale);
#pragma unroll
  for (int mt = 0; mt < 2; ++mt)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float scale = __shfl_sync(0xffffffffu, own, 16 * mt + 8 * half + lane / 4);
      s[mt][2 * half] *= scale;
      s[mt][2 * half + 1] *= scale;
    }
}

}  // namespace rooftile::gpu
