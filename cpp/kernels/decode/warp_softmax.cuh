// SPDX-License-Identifier: Apache-2.0
// The softmax state of the warps of one KV tile: up to 8 packed rows. All of these warps compute the same scores; each
// has its own channels of the output. P^T is S^T transposed in registers, so maximum, sum and rescaling stay within the
// lanes that share a packed row. The states of the CTA's KV tiles are merged at the end of a KV split.
#pragma once

#include "kernels/decode/logits.cuh"
#include "kernels/decode/reduction.cuh"
#include "kernels/decode/softmax_state.cuh"
#include "kernels/decode/traits.cuh"
#include "tile/copy.cuh"

namespace rooftile::gpu {

template <class Traits>
struct WarpSoftmaxStorage {
  static constexpr int D = Traits::D;
  alignas(16) float o[Traits::warps_kv][mma_n][D + 4];  // (warp_kv, packed row, channel), padded against bank conflicts
  float m[Traits::warps_kv][mma_n], l[Traits::warps_kv][mma_n];  // (warp_kv, packed row)
  // The queries take this memory until the first partials are written.
  __device__ tile::MmaType<typename Traits::T>* queries() {
    return reinterpret_cast<tile::MmaType<typename Traits::T>*>(&o[0][0][0]);
  }
};

// How a thread holds a partial: `values` channels of one packed row, in vectors of `vec` channels at a stride of
// vec_stride.
template <class Traits>
struct RowPartial {
  static constexpr int threads_per_row = Traits::threads / mma_n, rows = 1, values = Traits::D / threads_per_row,
                       row_sets = mma_n, D = Traits::D, block_m = Traits::block_m;
  static constexpr int vec = Traits::D % 64 == 0 ? 4 : 2, vec_stride = vec * threads_per_row;
  using Type = Partial<rows, values>;
  int m_row = threadIdx.x / threads_per_row, d0 = threadIdx.x % threads_per_row * vec;
  __device__ int row_set() const { return m_row; }
  __device__ bool writes_ml() const { return d0 == 0; }  // the row's first thread
  // Calls visit(k, m_row) for the packed row of the thread.
  template <class Visit>
  __device__ void for_each_row(int, const Visit& visit) const {
    visit(0, m_row);
  }
  // Calls visit(channel, vector) for the thread's vectors of a packed row.
  template <class Float, class Visit>
  __device__ void for_each_vec(Float (&o)[values], int, const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < values / vec; ++i) visit(d0 + i * vec_stride, reinterpret_cast<Float(&)[vec]>(o[i * vec]));
  }
};

template <class Traits>
class WarpSoftmax {
  using T = typename Traits::T;
  static constexpr KvFormat F = Traits::format;
  static constexpr int C = Traits::C, warps_kv = Traits::warps_kv;

 public:
  using Storage = WarpSoftmaxStorage<Traits>;
  using Layout = RowPartial<Traits>;
  using ThreadPartial = typename Layout::Type;
  using Coord = WarpCoord<Traits>;

  __device__ WarpSoftmax(Storage& smem, const Coord& at) : smem_(smem), at_(at) {}
  __device__ void reset() { state_.reset(); }
  __device__ auto& state() { return state_; }

  // Replaces the logits of 16 tokens in 16 bits by weights, and adds these to the state.
  template <class Stage, class Rescale>
  __device__ void weigh(float (&s)[1][1][4], Stage&, const Rescale&) {
    update_max(s[0]);
    exp_and_sum(s[0]);
    state_.o_scale = 1.0f;
    weights_[0] = to_operand<T>(s[0][0]);
  }
  // The same for 32 tokens in codes. The weights are multiplied by V's scales; minima go into the min term. all: every
  // packed row sees all 32 tokens; otherwise a token that a row does not see counts as 0.
  template <class Stage, class All>
  __device__ void weigh_codes(float (&s)[1][2][4], const TokenScales<T, F>& scales, const Visible (&see)[1], int token,
                              All all, Stage&) {
    update_max(s[0], max_scale_bits_);
    exp_and_sum(s[0]);
    scale_weights(s[0], see[0], token, all);
  }
  // Broadcasts the scales of V to the lanes' rows of S^T: after the MMAs of the scores, so that nothing waits for the
  // loads.
  __device__ void broadcast(const TokenScales<T, F>& scales) {
    max_scale_bits_ = scales.max_bits();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scale_[i] = scales.of_row(scales.scale, i, at_.lane);
      if constexpr (has_min(F)) zero_value_[i] = scales.of_row(scales.zero_value, i, at_.lane);
    }
  }
  // Calls visit(i, weights) for the only KV tile of the step. weights: (n-tile), or with codes (k-tile of 16 tokens,
  // n-tile), B operands.
  template <class Tiles, class Visit>
  __device__ void for_each_tile(Tiles, const Visit& visit) const {
    const tile::FragmentB weights[1] = {weights_[0]};  // (n-tile)
    visit(0, weights);
  }
  template <class Visit>
  __device__ void for_each_code_tile(const Visit& visit) const {
    const tile::FragmentB weights[2][1] = {{weights_[0]}, {weights_[1]}};  // (k-tile of 16 tokens, n-tile)
    visit(0, weights);
  }
  // The weights of the KV tile whose scores this warp has computed.
  __device__ void load_own_weights(tile::FragmentB (&weights)[2][1]) const {
    weights[0][0] = weights_[0], weights[1][0] = weights_[1];
  }

  // Converts sums of codes to sums of dequantised values, so that 16-bit tokens can be added.
  __device__ void dequantize_sums() {
    if constexpr (has_min(F)) {
#pragma unroll
      for (float& x : state_.min_term[0]) state_.sum_lanes(x);
    }
    const DequantSums<T, F> values = dequant_sums({1.0f, 1.0f});
#pragma unroll
    for (auto& tile : state_.o)
#pragma unroll
      for (int e = 0; e < 4; ++e) tile[e] = values(tile[e], e);
    state_.min_term[0][0] = state_.min_term[0][1] = 0.0f;
    state_.o_scale = 1.0f;
  }

  // Merges the states of the CTA's KV tiles into one partial and resets them. Codes: the states hold sums of codes.
  // Each warp rescales its sums to the common maximum while it writes them, so the threads that merge only add. Sync: m
  // is read between the barriers, l and o after the second. They are written again before the next call's first barrier
  // (m) and after it (l, o), when no thread reads them.
  template <bool Codes>
  __device__ ThreadPartial take_partial() {
    const Layout layout;
    const int g = at_.lane / 4, t = at_.lane % 4;
    const bool writes_rows = g == 0 && at_.warp_d == 0;
    float (&m)[2] = state_.m[0], (&l)[2] = state_.l[0];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      state_.sum_lanes(l[j]);
      if constexpr (Codes && has_min(F)) state_.sum_lanes(state_.min_term[0][j]);
    }
    if (writes_rows) tile::store_vec_at(&smem_.m[at_.warp_kv][2 * t], make_float2(m[0], m[1]));
    __syncthreads();  // all maxima are in shared memory
    ThreadPartial partial;
    partial.m[0] = -INFINITY;
    float top[2] = {-INFINITY, -INFINITY};  // (packed rows 2t, 2t + 1)
#pragma unroll
    for (int w = 0; w < warps_kv; ++w) {
      const float2 m = tile::load_vec_at<float2>(&smem_.m[w][2 * t]);
      top[0] = fmaxf(top[0], m.x);
      top[1] = fmaxf(top[1], m.y);
      partial.m[0] = fmaxf(partial.m[0], smem_.m[w][layout.m_row]);
    }
    float weight[2];  // (packed row 2t + j)
#pragma unroll
    for (int j = 0; j < 2; ++j) weight[j] = exp2f(m[j] - (top[j] == -INFINITY ? 0.0f : top[j]));
    if (writes_rows) tile::store_vec_at(&smem_.l[at_.warp_kv][2 * t], make_float2(l[0] * weight[0], l[1] * weight[1]));
    if constexpr (Codes) store_sums(dequant_sums(weight));
    else store_sums([&](float o, int e) { return o * weight[e % 2]; });
    state_.reset();
    __syncthreads();  // all sums are in shared memory
    partial.l[0] = 0.0f;
#pragma unroll
    for (float& o : partial.o) o = 0.0f;
#pragma unroll
    for (int w = 0; w < warps_kv; ++w) {
      partial.l[0] += smem_.l[w][layout.m_row];
      layout.for_each_vec(partial.o, 0, [&](int d, auto& o) { add_vec(o, smem_.o[w][layout.m_row] + d); });
    }
    return partial;
  }

 private:
  template <int V>
  __device__ static void add_vec(float (&sum)[V], const float* from) {
    struct alignas(4 * V) Vec {
      float x[V];  // (V channels)
    };
    const Vec o = tile::load_vec_at<Vec>(from);
#pragma unroll
    for (int j = 0; j < V; ++j) sum[j] += o.x[j];
  }
  // Writes value(sum, e) of the warp's sums to shared memory.
  template <class Value>
  __device__ void store_sums(const Value& value) {
    const int g = at_.lane / 4, t = at_.lane % 4;
#pragma unroll
    for (int i = 0; i < C; ++i)
#pragma unroll
      for (int e = 0; e < 4; ++e)
        smem_.o[at_.warp_kv][2 * t + e % 2][at_.warp_d * (16 * C) + 16 * i + 8 * (e / 2) + g] =
            value(state_.o[i][e], e);
  }
  __device__ DequantSums<T, F> dequant_sums(const float (&weight)[2]) const {
    float zp_correction[2] = {};  // (packed rows 2t, 2t + 1)
    if constexpr (KvTraits<F>::has_zero_point)
      zp_correction[0] = state_.zp_correction[0][0], zp_correction[1] = state_.zp_correction[0][1];
    return {zp_correction, state_.min_term[0], weight, state_.o_scale};
  }

  // Moves the state to the maximum of these logits and to the scale that their tokens need. max_scale_bits: the largest
  // scale, as exceeds_scale takes it. Usually neither changes.
  template <int M>
  __device__ void update_max(const float (&s)[M][4], std::uint32_t max_scale_bits = 0) {
    float top[2] = {lane_max(s, 0), lane_max(s, 1)};  // (packed rows 2t, 2t + 1)
    float (&m)[2] = state_.m[0];
    const bool grows = !Traits::elements && exceeds_scale(max_scale_bits, state_.o_scale);
    if (__any_sync(0xffffffffu, top[0] > m[0] + rescale_threshold || top[1] > m[1] + rescale_threshold || grows)) {
      float scale[2];  // (packed rows 2t, 2t + 1)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int step = 4; step < 32; step *= 2) top[j] = fmaxf(top[j], __shfl_xor_sync(0xffffffffu, top[j], step));
        const bool moves = top[j] > m[j] + rescale_threshold;
        scale[j] = moves ? tile::fast_exp2(m[j] - top[j]) : 1.0f;
        if (moves) m[j] = top[j];
        state_.l[0][j] *= scale[j];
        state_.min_term[0][j] *= scale[j];
      }
      const float o_scale = grows ? pow2_above(max_scale_bits) : state_.o_scale,
                  change = grows ? state_.o_scale * inverse_pow2(o_scale) : 1.0f;
      scale_sums(scale[0] * change, scale[1] * change);
      state_.o_scale = o_scale;
    }
  }
  __device__ void scale_sums(float first, float second) {
    if (state_.o_scale == 0.0f) return;  // o is all zeros
    const auto scale = [&](float (&tile)[4]) {
      tile[0] *= first;
      tile[1] *= second;
      tile[2] *= first;
      tile[3] *= second;
    };
#pragma unroll
    for (auto& tile : state_.o) scale(tile);
    if constexpr (KvTraits<F>::has_zero_point) scale(state_.zp_correction[0]);
  }

  // Replaces logits by weights 2^(s - m) and adds them to the state's sum.
  template <int M>
  __device__ void exp_and_sum(float (&s)[M][4]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const float base = state_.m[0][j] == -INFINITY ? 0.0f : state_.m[0][j];
#pragma unroll
      for (int mt = 0; mt < M; ++mt)
#pragma unroll
        for (int i = j; i < 4; i += 2) {
          s[mt][i] = tile::fast_exp2(s[mt][i] - base);
          state_.l[0][j] += s[mt][i];
        }
    }
  }

  // Weights of 16 tokens as the B operand of V^T P^T.
  template <class Element>
  __device__ static tile::FragmentB to_operand(const float (&s)[4]) {
    return {
        {tile::transpose_8x8(tile::pack<Element>(s[0], s[1])), tile::transpose_8x8(tile::pack<Element>(s[2], s[3]))}};
  }
  template <class All>
  __device__ void scale_weights(const float (&s)[2][4], const Visible& see, int token, All all) {
    const float inverse = inverse_pow2(state_.o_scale);
#pragma unroll
    for (int mt = 0; mt < 2; ++mt) {
      float p[4];  // (2 tokens x 2 packed rows)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = token + 16 * mt + 8 * half + at_.lane / 4;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const bool seen = all || (at >= see.begin[j] && at < see.end[j]);
          const float weight = s[mt][2 * half + j];
          float& min_term = state_.min_term[0][j];
          if constexpr (has_min(F))
            min_term = seen ? __fmaf_rn(weight, zero_value_[2 * mt + half], min_term) : min_term;
          p[2 * half + j] = seen ? weight * (scale_[2 * mt + half] * inverse) : 0.0f;
        }
      }
      weights_[mt] = to_operand<tile::half>(p);
    }
  }

  Storage& smem_;
  const Coord at_;
  SoftmaxState<1, C, F> state_;
  tile::FragmentB weights_[2];                       // (k-tile of 16 tokens): of the KV tile
  float scale_[4], zero_value_[has_min(F) ? 4 : 1];  // V's scales and zero values of tokens 8 i + g
  std::uint32_t max_scale_bits_;                     // the largest finite scale, as exceeds_scale takes it
};

}  // namespace rooftile::gpu
