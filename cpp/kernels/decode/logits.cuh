// SPDX-License-Identifier: Apache-2.0
// Scores S^T of a KV tile become logits: scale, soft cap, mask. A lane (g, t) holds tokens g, g + 8 of every m-tile of
// 16 tokens, and packed rows 2t, 2t + 1.
#pragma once

#include "kernels/decode/queries.cuh"
#include "tile/softmax.cuh"

namespace rooftile::gpu {

// Factor from scores to base-2 logits (logit * log2 e) or, with a soft cap, to multiples of the cap. q_scale: what the
// queries were divided by.
__device__ __forceinline__ float logit_factor(const DecodeParams& p, float q_scale) {
  return q_scale * (p.softcap != 0.0f ? p.scale / p.softcap : p.scale * tile::log2_e);
}

// Converts multiples of a soft cap to base-2 logits, in place. Without a soft cap s already holds logits.
// tanh x is 1 - 2 / (1 + e^2x): the absolute error is at most 2^-23. It is not proportional to a small x, but logits
// only matter by their differences.
template <int M>
__device__ __forceinline__ void soft_cap(float (&s)[M][4], float softcap) {
  if (softcap == 0.0f) return;
  const float top = softcap * tile::log2_e;
#pragma unroll
  for (auto& tile : s)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      tile[i] = top - 2.0f * top * tile::fast_reciprocal(1.0f + tile::fast_exp2(2.0f * tile::log2_e * tile[i]));
}

// Whether every packed row sees all of `tokens` tokens from `token` on.
__device__ __forceinline__ bool all_seen(const Visible& v, int token, int tokens) {
  return token >= v.inner_begin && token + tokens <= v.inner_end;
}
// The parts of a kivi row: closed groups in codes, and the raw tokens behind them. Other formats have the first alone.
enum class TokenPart { stored, raw };

// The tokens that the packed rows of a work tile see.
template <class Traits>
struct VisibleRows {
  static constexpr int N = Traits::N;
  Visible rows[N];             // (n-tile)
  int outer_begin, outer_end;  // bounds of the tokens that any packed row sees
  __device__ __forceinline__ VisibleRows(const DecodeParams& p, const WorkTile& tile, const RowWork& w, int lane,
                                         TokenPart part) {
#pragma unroll
    for (int n = 0; n < N; ++n)
      rows[n] =
          visible<Traits::kivi>(p, {tile.b, tile.kv_head, tile.first_n_tile + n}, w, lane, part == TokenPart::raw);
    outer_begin = rows[0].outer_begin;
    outer_end = rows[0].outer_end;
#pragma unroll
    for (int n = 1; n < N; ++n) {
      outer_begin = min(outer_begin, rows[n].outer_begin);
      outer_end = max(outer_end, rows[n].outer_end);
    }
  }
  // Whether any n-tile's rows see the token, and whether every packed row sees all of `tokens` tokens from there on.
  __device__ __forceinline__ bool any(int token) const {
    bool any = false;
#pragma unroll
    for (int n = 0; n < N; ++n) any |= token >= rows[n].outer_begin && token < rows[n].outer_end;
    return any;
  }
  __device__ __forceinline__ bool all(int token, int tokens) const {
    bool all = true;
#pragma unroll
    for (int n = 0; n < N; ++n) all &= all_seen(rows[n], token, tokens);
    return all;
  }
};

// Masks logits of tokens that a packed row does not see. token: row 0 of the tile. M: m-tiles of 16 tokens.
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

// The largest of this lane's logits of packed row 2t + j.
template <int M>
__device__ __forceinline__ float lane_max(const float (&s)[M][4], int j) {
  float top = fmaxf(s[0][j], s[0][j + 2]);
#pragma unroll
  for (int mt = 1; mt < M; ++mt) top = fmaxf(top, fmaxf(s[mt][j], s[mt][j + 2]));
  return top;
}

}  // namespace rooftile::gpu
