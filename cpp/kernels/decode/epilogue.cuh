// SPDX-License-Identifier: Apache-2.0
// The end of a work tile: a packed row's result, or a partial of it, is written.
#pragma once

#include "kernels/decode/queries.cuh"
#include "tile/copy.cuh"
#include "tile/element.cuh"
#include "tile/softmax.cuh"

namespace rooftile::gpu {

// Stores V consecutive floats with one instruction.
template <int V>
__device__ __forceinline__ void store_vec(float* to, const float (&x)[V]) {
  struct alignas(4 * V) Vec {
    float x[V];  // (V) consecutive floats
  };
  // No copy of x, by bit_cast or by elements: int4-kivi-sym took 9.86 us for 9.10 (8 x 4096 tokens, 9 query heads of
  // 64, one H200).
  tile::store_vec_at(to, reinterpret_cast<const Vec&>(x));
}

// Writes a thread's part of a partial to the workspace, number `index` of the grid's. Layout: how the thread holds it.
// rows_used: packed rows of the work tile that are not padding. invalid: a page of these KV splits was invalid, so out
// is not written.
template <class Layout>
__device__ __forceinline__ void write_partial(const DecodeParams& p, const Layout& layout,
                                              const typename Layout::Type& partial, int index, int rows_used,
                                              bool invalid) {
  layout.for_each_row(rows_used, [&](int k, int m_row) {
    const std::int64_t row = std::int64_t{index} * Layout::block_m + m_row;
    layout.for_each_vec(partial.o, k, [&](int d, const auto& o) { store_vec(p.partial_o + row * Layout::D + d, o); });
    if (layout.writes_ml())
      tile::store_vec_at(p.partial_ml + row * 2, make_float2(partial.m[k], invalid ? -1.0f : partial.l[k]));
  });
}

// Writes the result of one packed row: sinks, normalisation, out, lse. The constructor may run before the previous
// kernel has ended, so its loads bypass L1. finalize() must be called before anything is stored.
template <class T>
class RowEpilogue {
 public:
  __device__ __forceinline__ RowEpilogue(const DecodeParams& p, const WorkTile& tile, const RowWork& w, int m_row)
      : p_(&p) {
    const QueryRow row = query_row(p, tile, w, m_row);
    in_tile_ = row.token >= 0;
    if (!in_tile_) return;
    if (p.sinks.given()) {
      const std::int64_t at = row.head * p.sinks.stride[0];
      sink_ = tile::log2_e * (p.sinks.dtype == DType::f32 ? __ldcg(p.sinks.as<const float>() + at)
                                                          : tile::to_float(__ldcg(p.sinks.as<const T>() + at)));
    }
    real_ = row.token < w.count;
    out_ = p.out.as<T>() + tile.b * p.out.stride[0] + row.token * p.out.stride[1] + row.head * p.out.stride[2];
    if (p.lse.given())
      lse_ = p.lse.as<float>() + tile.b * p.lse.stride[0] + row.token * p.lse.stride[1] + row.head * p.lse.stride[2];
  }
  __device__ __forceinline__ void finalize(float m, float l) {
    if (!real_) return;
    result_ = tile::finalize_softmax(m, l, sink_);
    sees_keys_ = l != 0.0f;
  }
  // Stores N consecutive channels.
  template <int N>
  __device__ __forceinline__ void store(int d, const float (&o)[N]) const {
    if (!in_tile_) return;
    struct alignas(N * sizeof(T)) Vec {
      T x[N];  // (N) consecutive channels
    } values;
#pragma unroll
    for (int i = 0; i < N; ++i) values.x[i] = tile::from_float<T>(sees_keys_ ? __fmul_rn(o[i], result_.factor) : 0.0f);
    if (p_->out.stride[3] == 1 && reinterpret_cast<std::uintptr_t>(out_) % sizeof(Vec) == 0) {
      tile::store_vec_at(out_ + d, values);
    } else {
#pragma unroll
      for (int i = 0; i < N; ++i) out_[(d + i) * p_->out.stride[3]] = values.x[i];
    }
  }
  // Called by one thread of the row.
  __device__ __forceinline__ void store_lse() const {
    if (in_tile_ && p_->lse.given()) *lse_ = result_.lse;
  }

 private:
  const DecodeParams* p_;
  bool in_tile_, real_ = false, sees_keys_ = false;  // not padding; below the entry's count; sees a key
  float sink_ = -INFINITY;
  tile::SoftmaxResult result_{0.0f, -INFINITY};
  T* out_ = nullptr;  // [D] of the row, stride p.out.stride[3]
  float* lse_ = nullptr;
};

}  // namespace rooftile::gpu
