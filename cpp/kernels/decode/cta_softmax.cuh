// SPDX-License-Identifier: Apache-2.0
// One softmax state for all warps of a CTA: 16 packed rows. Each warp computes the weights of its own KV tile of a
// step. All warps read all weights from shared memory, and each multiplies them with its own channels of the step's V.
// So the state is distributed over the warps' registers, and a warp has registers for N n-tiles of 8 packed rows.
#pragma once

#include "kernels/decode/logits.cuh"
#include "kernels/decode/reduction.cuh"
#include "kernels/decode/softmax_state.cuh"
#include "kernels/decode/traits.cuh"
#include "tile/copy.cuh"

namespace rooftile::gpu {

template <class Traits>
struct CtaSoftmaxStorage {
  using Element = tile::MmaType<typename Traits::T>;
  static constexpr int N = Traits::N, warps = Traits::warps, rows = Traits::block_m;
  // 16-bit weights for every format: [n-tile, token, 8 packed rows], 16 bytes a token and n-tile. Without kivi the
  // queries take the same memory until the first weights are written.
  static constexpr int weights_size = rows * Traits::step_tokens, queries_size = Traits::kivi ? 0 : rows * Traits::D;
  alignas(16) Element weights_or_queries[weights_size > queries_size ? weights_size : queries_size];
  float row_max[warps][rows];           // row maxima of the logits: (warp, packed row)
  std::uint32_t max_scale_bits[warps];  // (warp): largest V scale of a step
  float l[warps][rows], min_term[warps][rows], zp_correction[warps][rows];  // (warp, packed row)

  __device__ Element* queries() { return weights_or_queries; }
};

// How a thread holds a partial: C fragments of mma.m16n8k16 with channels as rows, two packed rows of every n-tile
// each. m, l (n-tile n, row 2t + j) are at 2 n + j; o (n, m-tile i, element e) at (n * C + i) * 4 + e.
template <class Traits>
struct FragmentPartial {
  static constexpr int N = Traits::N, C = Traits::C, rows = 2 * N, values = N * C * 4, row_sets = Traits::threads / 8,
                       D = Traits::D, block_m = Traits::block_m;
  using Type = Partial<rows, values>;
  int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  __device__ int row_set() const { return warp * 4 + lane % 4; }
  __device__ bool writes_ml() const { return warp == 0 && lane < 4; }
  // Calls visit(k, m_row) for the lane's packed rows that are not padding.
  template <class Visit>
  __device__ void for_each_row(int rows_used, const Visit& visit) const {
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j)
        if (const int m_row = n * mma_n + lane % 4 * 2 + j; m_row < rows_used) visit(2 * n + j, m_row);
  }
  // Calls visit(channel, value) for the lane's values of packed row k.
  template <class Visit>
  __device__ void for_each_vec(const float (&o)[values], int k, const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < C; ++i)
#pragma unroll
      for (int e = k % 2; e < 4; e += 2)
        visit(16 * (C * warp + i) + 8 * (e / 2) + lane / 4,
              reinterpret_cast<const float (&)[1]>(o[(k / 2 * C + i) * 4 + e]));
  }
};

template <class Traits>
class CtaSoftmax {
  using T = typename Traits::T;
  static constexpr KvFormat F = Traits::format;
  static constexpr int N = Traits::N, C = Traits::C, warps = Traits::warps, step_tokens = Traits::step_tokens;

 public:
  using Storage = CtaSoftmaxStorage<Traits>;
  using Layout = FragmentPartial<Traits>;
  using ThreadPartial = typename Layout::Type;
  using Coord = WarpCoord<Traits>;

  __device__ CtaSoftmax(Storage& smem, const Coord& at) : smem_(smem), at_(at) {}
  __device__ void reset() {
    state_.reset();
    empty_ = true;
  }
  __device__ auto& state() { return state_; }

  // Weights of a step of 16 tokens a warp, in 16 bits. s: the logits of the warp's own tile. rescale(n, factors)
  // rescales sums outside the state.
  template <class Stage, class Rescale>
  __device__ void weigh(const float (&s)[N][1][4], Stage& stage, const Rescale& rescale) {
    compute_weights(
        s, 0, false,
        [&](float (&sum)[N][2], float (&)[N][2]) {
#pragma unroll
          for (int n = 0; n < N; ++n) {
            float weight[4];  // (2 tokens x 2 packed rows)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              weight[i] = weight_of(s[n][0][i], state_.m[n][i & 1]);
              sum[n][i & 1] += weight[i];
            }
            store_weights<T>(n, 16 * at_.warp_kv, weight);
          }
        },
        stage, rescale);
    stage.k_done();
  }
  // Weights of a step of 32 tokens a warp, in codes. The weights are multiplied by V's scales; minima go into the min
  // term. all: every packed row sees all 32 tokens of the warp's own tile, which begins at `token`.
  template <class Stage>
  __device__ void weigh_codes(const float (&s)[N][2][4], const TokenScales<T, F>& scales, const Visible (&see)[N],
                              int token, bool all, Stage& stage) {
    float zero_value[4];  // tokens 8 i + g of the warp's tile
#pragma unroll
    for (int i = 0; i < 4; ++i) zero_value[i] = has_min(F) ? scales.of_row(scales.zero_value, i, at_.lane) : 0.0f;
    compute_weights(
        s, max_scale_bits_, exceeds_scale(max_scale_bits_, state_.o_scale),
        [&](float (&sum)[N][2], float (&min_term)[N][2]) {
          const float scaled = scales.scale * inverse_pow2(state_.o_scale);
          float scale[4];  // tokens 8 i + g of the warp's tile
#pragma unroll
          for (int i = 0; i < 4; ++i) scale[i] = scales.of_row(scaled, i, at_.lane);
          // A packed row that does not see a token must not meet its scale either: the scale may be NaN.
          const auto store = [&](auto all_seen) {
#pragma unroll
            for (int n = 0; n < N; ++n)
#pragma unroll
              for (int mt = 0; mt < 2; ++mt) {
                float weight[4];  // (2 tokens x 2 packed rows)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                  const int j = i & 1, row = 2 * mt + i / 2, position = token + 8 * row + at_.lane / 4;
                  const bool counts = all_seen || (position >= see[n].begin[j] && position < see[n].end[j]);
                  const float w = weight_of(s[n][mt][i], state_.m[n][j]);
                  sum[n][j] += w;
                  if constexpr (has_min(F))
                    min_term[n][j] = counts ? __fmaf_rn(w, zero_value[row], min_term[n][j]) : min_term[n][j];
                  weight[i] = counts ? w * scale[row] : 0.0f;
                }
                store_weights<tile::half>(n, 32 * at_.warp_kv + 16 * mt, weight);
              }
          };
          if (all) store(std::true_type());
          else store(std::false_type());
        },
        stage, [](int, const float (&)[2]) {});
    stage.k_done();
  }
  __device__ void broadcast(const TokenScales<T, F>& scales) { max_scale_bits_ = scales.max_bits(); }

  // Calls visit(i, weights) for the first `tiles` KV tiles of the step. weights: (n-tile), or with codes (k-tile of 16
  // tokens, n-tile), B operands.
  template <class Tiles, class Visit>
  __device__ void for_each_tile(Tiles tiles, const Visit& visit) const {
#pragma unroll
    for (int pair = 0; pair < warps; pair += 2) {
      if (tiles < warps && pair >= tiles) break;
      tile::FragmentB weights[2][N];  // (KV tile of 16 tokens, n-tile)
      load_weights<T>(16 * pair, weights);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (tiles < warps && pair + i >= tiles) break;
        visit(pair + i, weights[i]);
      }
    }
  }
  template <class Visit>
  __device__ void for_each_code_tile(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < warps; ++i) {
      tile::FragmentB weights[2][N];  // (k-tile of 16 tokens, n-tile)
      load_weights<tile::half>(32 * i, weights);
      visit(i, weights);
    }
  }
  // The weights of the KV tile whose scores this warp has computed.
  __device__ void load_own_weights(tile::FragmentB (&weights)[2][N]) const {
    load_weights<tile::half>(32 * at_.warp_kv, weights);
  }

  // Returns the CTA's state as a partial and resets it. raw: sums of raw tokens, added to the sums of codes.
  // Sync: the warps' sums are read after the barrier, and written again after a later step's barrier.
  __device__ ThreadPartial take_partial(const float (&raw)[N * C][4]) {
    constexpr bool has_zero_point = KvTraits<F>::has_zero_point, has_minimum = has_min(F);
    const int t = at_.lane % 4;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        state_.sum_lanes(state_.l[n][j]);
        if constexpr (has_minimum) state_.sum_lanes(state_.min_term[n][j]);
      }
    if (at_.lane < 4)
#pragma unroll
      for (int n = 0; n < N; ++n) {
        const auto store = [&](float (&to)[warps][Traits::block_m], float x, float y) {
          tile::store_vec_at(&to[at_.warp_kv][n * mma_n + 2 * t], make_float2(x, y));
        };
        store(smem_.l, state_.l[n][0], state_.l[n][1]);
        if constexpr (has_minimum) store(smem_.min_term, state_.min_term[n][0], state_.min_term[n][1]);
        if constexpr (has_zero_point)
          store(smem_.zp_correction, state_.zp_correction[n][0], state_.zp_correction[n][1]);
      }
    __syncthreads();  // all warps' sums are in shared memory
    ThreadPartial partial;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const auto sum_warps = [&](const float (&from)[warps][Traits::block_m], float (&sum)[2]) {
        sum[0] = sum[1] = 0.0f;
#pragma unroll
        for (int i = 0; i < warps; ++i) {
          const float2 x = tile::load_vec_at<float2>(&from[i][n * mma_n + 2 * t]);
          sum[0] += x.x;
          sum[1] += x.y;
        }
      };
      float zp_correction[2] = {}, min_term[2] = {};  // (packed rows 2t, 2t + 1)
      float l[2];                                     // (packed rows 2t, 2t + 1)
      sum_warps(smem_.l, l);
      if constexpr (has_zero_point) sum_warps(smem_.zp_correction, zp_correction);
      if constexpr (has_minimum) sum_warps(smem_.min_term, min_term);
      const DequantSums<T, F> values(zp_correction, min_term, {1.0f, 1.0f}, state_.o_scale);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        partial.m[2 * n + j] = state_.m[n][j];
        partial.l[2 * n + j] = l[j];
      }
#pragma unroll
      for (int i = 0; i < C; ++i)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float o = state_.o[n * C + i][e];
          partial.o[(n * C + i) * 4 + e] =
              (Traits::elements ? o : values(o, e)) + (Traits::kivi ? raw[n * C + i][e] : 0.0f);
        }
    }
    reset();
    return partial;
  }

 private:
  __device__ static float weight_of(float logit, float m) {
    return tile::fast_exp2(logit - (m == -INFINITY ? 0.0f : m));
  }
  // The 8 weights of a token of the step and an n-tile.
  template <class Element>
  __device__ Element* weights_of(int n, int token) const {
    return reinterpret_cast<Element*>(&smem_.weights_or_queries[(n * step_tokens + token) * mma_n]);
  }
  // Stores one lane's four weights of the 16 tokens from `token` of the step on.
  template <class Element>
  __device__ void store_weights(int n, int token, const float (&p)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half)
      tile::store_vec_at(weights_of<Element>(n, token + 8 * half + at_.lane / 4) + at_.lane % 4 * 2,
                         tile::pack<Element>(p[2 * half], p[2 * half + 1]));
  }
  // Loads the weights of 32 tokens from `token` of the step on: (16 tokens, n-tile).
  template <class Element>
  __device__ void load_weights(int token, tile::FragmentB (&weights)[2][N]) const {
#pragma unroll
    for (int n = 0; n < N; ++n) {
      const tile::FragmentA both = tile::ldmatrix_x4_trans(weights_of<Element>(n, token + at_.lane));
      weights[0][n] = {{both.r[0], both.r[1]}};
      weights[1][n] = {{both.r[2], both.r[3]}};
    }
  }

  // Moves all reference maxima to the step's row maxima (s: this lane's logits), and o_scale to the step's largest V
  // scale. Rescales the state. rescale(n, factors) does the same for sums outside the state.
  template <int M, class Rescale>
  __device__ void update_max(const float (&s)[N][M][4], std::uint32_t max_scale_bits, const Rescale& rescale) {
    const int t = at_.lane % 4;
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float top[2] = {lane_max(s[n], 0), lane_max(s[n], 1)};  // (packed rows 2t, 2t + 1)
#pragma unroll
      for (int j = 0; j < 2; ++j)
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top[j] = fmaxf(top[j], __shfl_xor_sync(0xffffffffu, top[j], step));
      if (at_.lane < 4) tile::store_vec_at(&smem_.row_max[at_.warp_kv][n * mma_n + 2 * t], make_float2(top[0], top[1]));
    }
    if (at_.lane == 0) smem_.max_scale_bits[at_.warp_kv] = max_scale_bits;
    __syncthreads();  // all warps' maxima are in shared memory, and no thread reads weights
    float change = 1.0f;
    if constexpr (!Traits::elements) {
      std::uint32_t scale = 0;
#pragma unroll
      for (int i = 0; i < warps; ++i) scale = max(scale, smem_.max_scale_bits[i]);
      if (exceeds_scale(scale, state_.o_scale)) {
        const float o_scale = pow2_above(scale);
        change = state_.o_scale * inverse_pow2(o_scale);
        state_.o_scale = o_scale;
      }
    }
#pragma unroll
    for (int n = 0; n < N; ++n) {
      float scale[2];  // (packed rows 2t, 2t + 1)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        float top = -INFINITY;
#pragma unroll
        for (int i = 0; i < warps; ++i) top = fmaxf(top, smem_.row_max[i][n * mma_n + 2 * t + j]);
        const bool moves = top > state_.m[n][j] + rescale_threshold;
        scale[j] = moves ? tile::fast_exp2(state_.m[n][j] - top) : 1.0f;
        if (moves) state_.m[n][j] = top;
        state_.l[n][j] *= scale[j];
        state_.min_term[n][j] *= scale[j];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float by = scale[e % 2] * change;
#pragma unroll
        for (int i = 0; i < C; ++i) state_.o[n * C + i][e] *= by;
        state_.zp_correction[n][e] *= by;
      }
      rescale(n, scale);
    }
  }

  // Computes a step's weights from its logits: store(sum, min_term) writes this lane's weights and sums them. After
  // return all warps' weights and V of the step are visible. The weights are written again after update_max if one may
  // exceed 2^rescale_threshold (the lane's sum tells), or if `more`: V's scales exceed o_scale. While m is -inf the
  // base is 0 and finite logits may give weights of 0: so a KV split's first step moves the maxima first, and a row
  // whose m is still -inf repeats at its first finite logit.
  template <int M, class Store, class Stage, class Rescale>
  __device__ void compute_weights(const float (&s)[N][M][4], std::uint32_t max_scale_bits, bool more,
                                  const Store& store, Stage& stage, const Rescale& rescale) {
    float sum[N][2], min_term[N][2];  // (n-tile, packed row 2t + j)
    stage.wait_v();
#pragma unroll 1
    for (bool moves = empty_;; moves = true) {
      if (moves) update_max(s, max_scale_bits, rescale);
#pragma unroll
      for (int n = 0; n < N; ++n) sum[n][0] = sum[n][1] = min_term[n][0] = min_term[n][1] = 0.0f;
      store(sum, min_term);
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int j = 0; j < 2; ++j)
          more |= state_.m[n][j] == -INFINITY ? lane_max(s[n], j) > -INFINITY : sum[n][j] > max_weight;
      if (!__syncthreads_or(more && !moves)) break;  // all weights are in shared memory; repeat if one may be too large
    }
    empty_ = false;
#pragma unroll
    for (int n = 0; n < N; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        state_.l[n][j] += sum[n][j];
        if constexpr (has_min(F)) state_.min_term[n][j] += min_term[n][j];
      }
  }

  Storage& smem_;
  const Coord at_;
  SoftmaxState<N, C, F> state_;
  std::uint32_t max_scale_bits_;  // of the warp's own tile
  bool empty_;                    // no step yet
};

}  // namespace rooftile::gpu
