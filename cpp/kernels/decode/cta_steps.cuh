// SPDX-License-Identifier: Apache-2.0
// One step of step_kv: each warp computes the weights of its own KV tile, then multiplies all weights of the step with
// its own channels of V.
#pragma once

#include "kernels/decode/cta_softmax.cuh"

namespace rooftile::gpu {

template <class Config>
class CtaSteps {
  using T = typename Config::T;
  using Traits = StepTraits<Config>;
  static constexpr int D = Traits::D, N = Traits::N, C = Traits::C, warps = Traits::warps;
  static constexpr KvFormat format = Config::format;
  using Bits16 = Bits16Traits<T, D>;

 protected:
  __device__ CtaSteps(const DecodeParams& p, CtaMainloopStorage<Config>& smem)
      : p(p), smem(smem), warp(threadIdx.x / 32), lane(threadIdx.x % 32) {}

  __device__ void find_visible(const WorkTile& tile, const RowWork& w, bool raw, Visible (&see)[N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) see[n] = visible(p, {tile.b, tile.kv_head, tile.m_block + n}, w, lane, raw);
  }
  // seen: whether any packed row sees the token. all_see: whether every packed row sees all of `tokens` tokens from
  // there on.
  __device__ static bool seen(const Visible (&see)[N], int token) {
    bool any = false;
#pragma unroll
    for (int n = 0; n < N; ++n) any |= token >= see[n].outer_begin && token < see[n].outer_end;
    return any;
  }
  __device__ static bool all_see(const Visible (&see)[N], int token, int tokens) {
    bool all = true;
#pragma unroll
    for (int n = 0; n < N; ++n) all &= all_seen(see[n], token, tokens);
    return all;
  }

  // A step in 16 bits: `tiles` KV tiles of 16 tokens from `token` on. keys(i), values(i): K and V of tile i, (16
  // tokens, D); rows that no packed row sees are zeros. rQ (MMA, N, D / 16).
  template <class Keys, class Values, class Tiles, class Queries, class WaitV, class RefillK, class Rescale>
  __device__ void element_step(const Keys& keys, const Values& values, Tiles tiles, const Queries& rQ,
                               const Visible (&see)[N], int token, float (&o)[N * C][4], const WaitV& wait_v,
                               const RefillK& refill_k, const Rescale& rescale) {
    using namespace cute;
    const int own = token + 16 * warp;
    Tensor sP = smem.template weights<Bits16>();  // (8 packed rows, tokens of a step, N)
    float s[N][1][4];                             // (n-tile, m-tile of 16 tokens, 4)
    if (tiles == warps || warp < tiles) {
      qk16<Bits16>(s, keys(warp), rQ, lane);
      const float factor = logit_factor(p, 1.0f);
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][0][i] *= factor;
        soft_cap(s[n], p.softcap);
        mask(s[n], see[n], own, lane);
      }
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][0][i] = -INFINITY;
    }
    compute_weights(
        state, smem, s, 0, false,
        [&](float (&sum)[N][2], float (&)[N][2]) {
#pragma unroll
          for (int n = 0; n < N; ++n) {
            float weight[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              weight[i] = weight_of(s[n][0][i], state.m[n][i & 1]);
              sum[n][i & 1] += weight[i];
            }
            store_weights<T, Bits16>(weight, local_tile(sP(_, _, n), Shape<Int<mma_n>, _16>{}, make_coord(0, warp)),
                                     lane);
          }
        },
        wait_v, rescale, warp, lane);
    refill_k();
    auto rO = accumulators<C, N>(o);  // (MMA, C, N)
#pragma unroll
    for (int at = 0; at < warps; at += 2) {
      if (tiles < warps && at >= tiles) break;
      Tensor rP = load_weights<Bits16>(local_tile(sP, Shape<Int<mma_n>, _32, Int<N>>{}, make_coord(0, at / 2, 0)),
                                       lane);  // (MMA, two k-tiles of 16 tokens, N)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (tiles < warps && at + i >= tiles) break;
        const int first = token + 16 * (at + i);
        const auto sV = values(at + i);  // (16 tokens, D)
        if (p.tokens == 1 || all_see(see, first, 16)) {
          pv16<Bits16>(rO, rP(_, i, _), sV, C * warp, lane);
        } else {
#pragma unroll
          for (int n = 0; n < N; ++n) pv16_masked<Bits16>(rO(_, _, n), rP(_, i, n), sV, see[n], first, C * warp, lane);
        }
      }
    }
  }

  // A step in codes: `warps` KV tiles of 32 tokens from `token` on. A tile past the end of the row holds arbitrary
  // codes, and its weights are 0.
  template <class WaitV, class RefillK>
  __device__ void code_step(const CodeTile<format, D>* tiles, const CodeQueries<format, D> (&q)[N],
                            const float (&factor)[N][2], const Visible (&see)[N], int token, const WaitV& wait_v,
                            const RefillK& refill_k) {
    const int own = token + 32 * warp;
    const CodeTile<format, D>& own_tile = tiles[warp];
    const bool all = all_see(see, own, 32);
    const StepScales<format> scales(own_tile, all || seen(see, own + lane), lane, T(0.0f));
    float s[N][2][4];  // (n-tile, m-tile of 16 tokens, 4)
    qk_codes<T, format, D>(s, own_tile, q, factor, lane);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      soft_cap(s[n], p.softcap);
      if (!all) mask(s[n], see[n], own, lane);
    }
    using namespace cute;
    using Weights = Bits16Traits<tile::half, D>;
    Tensor sP = smem.template weights<Weights>();  // (8 packed rows, tokens of a step, N)
    float zero_value[4];                           // tokens 8 i + g of the warp's tile
#pragma unroll
    for (int i = 0; i < 4; ++i)
      zero_value[i] = has_min(format) ? __shfl_sync(0xffffffffu, scales.zero_value, 8 * i + lane / 4) : 0.0f;
    compute_weights(
        state, smem, s, scales.max_scale_bits, exceeds_scale(scales.max_scale_bits, state.o_scale),
        [&](float (&sum)[N][2], float (&min_term)[N][2]) {
          const float scaled = scales.scale * inverse_pow2(state.o_scale);
          float scale[4];  // tokens 8 i + g of the warp's tile
#pragma unroll
          for (int i = 0; i < 4; ++i) scale[i] = __shfl_sync(0xffffffffu, scaled, 8 * i + lane / 4);
          // A packed row that does not see a token must not meet its scale either: the scale may be NaN.
          const auto store = [&](auto all_seen) {
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
              for (int mt = 0; mt < 2; ++mt) {
                float weight[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  const int j = i & 1, row = 2 * mt + i / 2, position = own + 8 * row + lane / 4;
                  const bool counts = all_seen || (position >= see[n].begin[j] && position < see[n].end[j]);
                  const float w = weight_of(s[n][mt][i], state.m[n][j]);
                  sum[n][j] += w;
                  if constexpr (has_min(format))
                    min_term[n][j] = counts ? __fmaf_rn(w, zero_value[row], min_term[n][j]) : min_term[n][j];
                  weight[i] = counts ? w * scale[row] : 0.0f;
                }
                store_weights<tile::half, Weights>(
                    weight, local_tile(sP(_, _, n), Shape<Int<mma_n>, _16>{}, make_coord(0, 2 * warp + mt)), lane);
              }
          };
          if (all) store(std::true_type());
          else store(std::false_type());
        },
        wait_v, [](int, const float (&)[2]) {}, warp, lane);
    refill_k();
    const auto weights_of = [&](int tile, tile::FragmentB(&weights)[2][N]) {
      Tensor rP = load_weights<Weights>(local_tile(sP, Shape<Int<mma_n>, _32, Int<N>>{}, make_coord(0, tile, 0)),
                                        lane);   // (MMA, two k-tiles of 16 tokens, N)
      Tensor pairs = recast<std::uint32_t>(rP);  // (2, 2, N): pairs of tokens
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) weights[i][n] = {{pairs(0, i, n), pairs(1, i, n)}};
    };
    if constexpr (CodeKind<format>::has_zero_point) {
      constexpr std::uint32_t zero_point = CodeKind<format>::zero_point_pair;
      tile::FragmentB weights[2][N];  // (k-tile of 16 tokens, n-tile)
      weights_of(warp, weights);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int mt = 0; mt < 2; ++mt)
          tile::mma<tile::half>(state.zp_correction[n], {{zero_point, zero_point, zero_point, zero_point}},
                                weights[mt][n]);
    }
#pragma unroll
    for (int tile = 0; tile < warps; ++tile) {
      tile::FragmentB weights[2][N];  // (k-tile of 16 tokens, n-tile)
      weights_of(tile, weights);
      pv_codes<format, D, C>(state.o, weights, tiles[tile], warp, lane);
    }
  }

  const DecodeParams& p;
  CtaMainloopStorage<Config>& smem;
  const int warp, lane;
  CtaState<N, C, format> state;
};

}  // namespace rooftile::gpu
