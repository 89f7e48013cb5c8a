// SPDX-License-Identifier: Apache-2.0
// Tiles of x in the weight-streaming kernel: global -> shared memory, two buffers.
#pragma once

#include "kernels/gemm/code_traits.cuh"
#include "kernels/gemm/params.h"

namespace rooftile::gpu {

template <class Traits>
class W4XTiles {
  using T = typename Traits::MmaT;

 public:
  // token0: of the call. x_tiles: shared memory for (BLK_N, BLK_K, buffer).
  __device__ __forceinline__ W4XTiles(const CodesParams& p, T* x_tiles, std::int64_t token0, int tokens, int first)
      : p_(p), x_tiles_(x_tiles), token0_(token0), tokens_(tokens), k0_(first * w4_step_k) {}

  __device__ __forceinline__ auto smem() const {
    return cute::make_tensor(cute::make_smem_ptr(x_tiles_), Traits::smem_layout_x(p_.x_tile_tokens));
  }

  // Copies tile `tile` to buffer tile % 2: (tokens, BLK_K), 0 past the end of K. The 16-byte path is asynchronous
  // (cp.async); the caller commits the group.
  __device__ __forceinline__ void load(int tile) const {
    using namespace cute;
    const int k0 = k0_ + tile * typename Traits::BLK_K{};
    if (!p_.x_in_vec16) return gather(k0, smem()(_, _, tile % 2));
    typename Traits::GmemCopyX gmem_x;
    auto thread_x = gmem_x.get_slice(threadIdx.x);
    const T* const x = static_cast<const T*>(p_.x.data) + token0_ * p_.x_stride + k0;
    Tensor gX = make_tensor(make_gmem_ptr(x), make_layout(Shape<typename Traits::BLK_N, typename Traits::BLK_K>{},
                                                          make_stride(p_.x_stride, _1{})));  // (BLK_N, BLK_K)
    Tensor tXgX = thread_x.partition_S(gX);                                                  // (CPY, CPY_N, CPY_K)
    Tensor tXsX = thread_x.partition_D(smem());                           // (CPY, CPY_N, CPY_K, buffer)
    Tensor tXcX = thread_x.partition_S(make_identity_tensor(shape(gX)));  // (CPY, CPY_N, CPY_K)
    CUTE_UNROLL
    for (int n = 0; n < size<1>(tXcX); ++n) {
      if (get<0>(tXcX(0, n, 0)) >= tokens_) return;
      CUTE_UNROLL
      for (int k = 0; k < size<2>(tXcX); ++k)
        copy(gmem_x.with(k0 + get<1>(tXcX(0, n, k)) < p_.k), tXgX(_, n, k), tXsX(_, n, k, tile % 2));
    }
  }

 private:
  // Element by element: any strides, act-order. A column number outside of [0, K) reads as NaN.
  template <class XTile>
  __device__ __forceinline__ void gather(int k0, XTile&& to) const {
    constexpr int tile_k = typename Traits::BLK_K{};
    const T* const x = static_cast<const T*>(p_.x.data);
    for (int i = threadIdx.x; i < tokens_ * tile_k; i += w4_warps * 32) {
      const int token = i / tile_k, at = i % tile_k;
      T value(0.0f);
      if (k0 + at < p_.k) {
        const int column = p_.w.perm ? p_.w.perm[k0 + at] : k0 + at;
        const bool there = column >= 0 && column < p_.k;
        value = there ? x[p_.x.offset(token0_ + token) + column * p_.x.last_stride] : T(NAN);
      }
      to(token, at) = value;
    }
  }

  const CodesParams& p_;
  T* x_tiles_;
  std::int64_t token0_;
  int tokens_, k0_;
};

}  // namespace rooftile::gpu
