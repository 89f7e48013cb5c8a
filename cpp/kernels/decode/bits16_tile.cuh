// SPDX-License-Identifier: Apache-2.0
// KV tiles of 16 tokens in 16 bits: copies from a page to shared memory, and the products of a warp.
//   S^T [16 tokens, packed rows] = K [16 tokens, D] Q^T
//   O^T [channels, packed rows] += V^T [channels, 16 tokens] P^T
#pragma once

#include "kernels/decode/queries.cuh"
#include "kernels/decode/traits.cuh"

namespace rooftile::gpu {

template <class T, int D>
struct Bits16Tile {
  using Traits = Bits16Traits<T, D>;
  alignas(128) T k[16 * D], v[16 * D];
  __device__ __forceinline__ auto sK() { return Traits::template smem_rows<16>(k); }        // (16 tokens, D)
  __device__ __forceinline__ auto sV() { return Traits::template smem_rows<16>(v); }        // (16 tokens, D)
  __device__ __forceinline__ auto sK() const { return Traits::template smem_rows<16>(k); }  // (16 tokens, D)
  __device__ __forceinline__ auto sV() const { return Traits::template smem_rows<16>(v); }  // (16 tokens, D)
};

// A KV head's rows in pages of a 16-bit cache.
template <class Traits>
__device__ __forceinline__ auto page_rows(const KvCacheView& c, const KvCacheView::Plane& plane, int kv_head) {
  using namespace cute;
  using Element = typename Traits::Element;
  constexpr int bytes = sizeof(Element);
  Tensor mX =
      make_tensor(make_gmem_ptr<Element>(static_cast<const void*>(plane.codes)),
                  make_shape(c.page_size, Int<Traits::head_dim>{}, c.kv_heads, c.pages),
                  make_stride(plane.token_stride / bytes, _1{}, plane.head_stride / bytes, plane.page_stride / bytes));
  return mX(_, _, kv_head, _);  // (tokens of a page, D, pages)
}
// The 16 tokens from `token` on, which lie in page `page`.
template <class GTensor>
__device__ __forceinline__ auto tile_rows(const GTensor& mX, int token, int page) {
  using namespace cute;
  Tensor pX = domain_offset(make_coord(token & (size<0>(mX) - 1), _0{}), mX(_, _, page));   // (tokens of a page, D)
  return make_tensor(pX.data(), make_layout(make_shape(_16{}, shape<1>(pX)), stride(pX)));  // (16 tokens, D)
}

// The 16 tokens from `token` on in the kivi cache's ring of raw tokens (of K or of V).
template <class Traits>
__device__ __forceinline__ auto ring_rows(const std::byte* ring, const DecodeParams& p, const WorkTile& tile,
                                          const RowWork& w, int token) {
  using namespace cute;
  using Tile = Layout<Shape<_16, Int<Traits::head_dim>>, Stride<Int<Traits::head_dim>, _1>>;
  const std::int64_t tiles = (std::int64_t{w.row} * p.cache.kv_heads + tile.kv_head) * (kv_ring / 16);
  Tensor mX = make_tensor(make_gmem_ptr<typename Traits::Element>(static_cast<const void*>(ring)),
                          append(Tile{}, Layout<Int<kv_ring / 16>, Int<16 * Traits::head_dim>>{}));
  return domain_offset(make_coord(_0{}, _0{}, tiles + token % kv_ring / 16), mX)(_, _, _0{});  // (16 tokens, D)
}

// Copies the rows of a tile that `wanted` accepts, by Threads threads. The others are zero-filled and not read.
template <class Traits, int Threads, class GTensor, class STensor, class Wanted>
__device__ __forceinline__ void copy_rows_async(int thread, const GTensor& gX, STensor&& sX, const Wanted& wanted) {
  using namespace cute;
  typename Traits::template GmemCopy<Threads> gmem_copy;
  if (size(gmem_copy) < Threads && thread >= size(gmem_copy)) return;
  const auto thr_copy = gmem_copy.get_slice(thread);
  Tensor tXgX = thr_copy.partition_S(gX);  // (CPY, rows of the thread, 1)
  Tensor tXsX = thr_copy.partition_D(sX);  // (CPY, rows of the thread, 1)
  Tensor tXcX =
      thr_copy.partition_S(make_identity_tensor(shape(gX)));  // (CPY, rows of the thread, 1) -> (row, channel)
  CUTE_UNROLL
  for (int i = 0; i < size<1>(tXsX); ++i)
    copy(gmem_copy.with(wanted(get<0>(tXcX(0, i, 0)))), tXgX(_, i, 0), tXsX(_, i, 0));
}

// N n-tiles of 8 packed query rows from shared memory.
template <class Traits, int N, class STensor>
__device__ __forceinline__ auto load_queries(const STensor& sQ, int lane) {  // sQ (8 N, D)
  using namespace cute;
  typename Traits::SmemCopyQ smem_copy;
  const auto thr_copy = smem_copy.get_slice(lane);
  typename Traits::template QueryFragment<N> rQ;  // (MMA, N, D / 16)
  copy(smem_copy, thr_copy.partition_S(sQ), thr_copy.retile_D(rQ));
  return rQ;
}

// S^T of one tile, s[n][0] for n-tile n: two sums, of even and odd k-steps, halve the dependency chain of MMAs.
template <class Traits, int N, class STensor, class Queries>
__device__ __forceinline__ void qk16(float (&s)[N][1][4], const STensor& sK, const Queries& rQ, int lane) {
  using namespace cute;
  typename Traits::TiledMma mma;
  typename Traits::SmemCopyK smem_copy;
  const auto thr_copy = smem_copy.get_slice(lane);
  Tensor tSsK = thr_copy.partition_S(sK);                              // (CPY, 1, D / 16)
  Tensor rK = mma.get_slice(lane).partition_fragment_A(sK);            // (MMA, 1, D / 16)
  Tensor tSrK = thr_copy.retile_D(rK);                                 // (CPY, 1, D / 16)
  Tensor rS = make_tensor<float>(Shape<Shape<_2, _2>, Int<N>, _2>{});  // (MMA, N, chain)
  clear(rS);
  CUTE_UNROLL
  for (int k = 0; k < size<2>(rK); ++k) {
    copy(smem_copy, tSsK(_, _, k), tSrK(_, _, k));
    CUTE_UNROLL
    for (int n = 0; n < N; ++n) gemm(mma, rK(_, 0, k), rQ(_, n, k), rS(_, n, k % 2));
  }
  CUTE_UNROLL
  for (int n = 0; n < N; ++n) CUTE_UNROLL
  for (int i = 0; i < 4; ++i) s[n][0][i] = rS(i, n, 0) + rS(i, n, 1);
}

// The sums o[n * C + i] of channel tile i and n-tile n, as accumulators.
template <int C, int N>
__device__ __forceinline__ auto accumulators(float (*o)[4]) {
  using namespace cute;
  return make_tensor(
      make_rmem_ptr(&o[0][0]),
      Layout<Shape<Shape<_2, _2>, Int<C>, Int<N>>, Stride<Stride<_1, _2>, _4, Int<4 * C>>>{});  // (MMA, C, N)
}

// V^T of a tile in shared memory, as one lane loads it: (CPY, D / 16, 1).
template <class Traits, class STensor>
__device__ __forceinline__ auto partition_values(const STensor& sV, int lane) {
  using namespace cute;
  Tensor sVt = make_tensor(sV.data(), composition(sV.layout(), typename Traits::Transpose{}));  // (D, 16 tokens)
  return typename Traits::SmemCopyV{}.get_slice(lane).partition_S(sVt);
}
// V^T of 16 tokens x channels 16 i .. 16 i + 15 as the A operand: (MMA, 1, 1).
template <class Traits, class Values>
__device__ __forceinline__ auto load_values(const Values& tOsV, int i, int lane) {
  using namespace cute;
  typename Traits::SmemCopyV smem_copy;
  Tensor rV = make_tensor<typename Traits::Element>(Shape<Shape<_2, _2, _2>, _1, _1>{});  // (MMA, 1, 1)
  copy(smem_copy, tOsV(_, i, 0), smem_copy.get_slice(lane).retile_D(rV)(_, 0, 0));
  return rV;
}

// Adds weight x V of 16 tokens to C tiles of 16 channels, from channel tile `first` on. rO (MMA, C, N), rP (MMA, N).
template <class Traits, class Accumulators, class Weights, class STensor>
__device__ __forceinline__ void pv16(Accumulators&& rO, const Weights& rP, const STensor& sV, int first, int lane) {
  using namespace cute;
  typename Traits::TiledMma mma;
  const auto tOsV = partition_values<Traits>(sV, lane);  // (CPY, D / 16, 1)
  CUTE_UNROLL
  for (int i = 0; i < size<1>(rO); ++i) {
    Tensor rV = load_values<Traits>(tOsV, first + i, lane);  // (MMA, 1, 1)
    CUTE_UNROLL
    for (int n = 0; n < size<2>(rO); ++n) gemm(mma, rV(_, 0, 0), rP(_, n), rO(_, i, n));
  }
}

// The same for one n-tile where some packed rows do not see all of the tokens. A weight of 0 does not stop a NaN or an
// infinity, so every new token gets an MMA of its own over the values that it sees, and takes only its own packed rows
// from the result. rO (MMA, C), rP (MMA).
template <class Traits, class Accumulators, class Weights, class STensor>
__device__ __forceinline__ void pv16_masked(Accumulators&& rO, const Weights& rP, const STensor& sV, const Visible& see,
                                            int token, int first, int lane) {
  using namespace cute;
  typename Traits::TiledMma mma;
  const auto tOsV = partition_values<Traits>(sV, lane);  // (CPY, D / 16, 1)
  int last = max(see.query[0], see.query[1]);
#pragma unroll
  for (int step = 1; step < 4; step *= 2) last = max(last, __shfl_xor_sync(0xffffffffu, last, step));
#pragma unroll 1
  for (int query = __shfl_sync(0xffffffffu, see.query[0], 0); query <= last; ++query) {
    // The visible range comes from a lane that holds a packed row of the query. This lane's tokens in the A operand are
    // 2t, 2t + 1, 2t + 8, 2t + 9.
    const bool own[2] = {see.query[0] == query, see.query[1] == query};
    const int from = first_bit(__ballot_sync(0xffffffffu, own[0] || own[1]));
    const int begin = __shfl_sync(0xffffffffu, own[0] ? see.begin[0] : see.begin[1], from) - token;
    const int end = __shfl_sync(0xffffffffu, own[0] ? see.end[0] : see.end[1], from) - token;
    std::uint32_t seen[2];  // masks of token pairs 2t and 2t + 8
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int at = lane % 4 * 2 + 8 * half;
      seen[half] = (at >= begin && at < end ? 0xffffu : 0u) | (at + 1 >= begin && at + 1 < end ? 0xffff0000u : 0u);
    }
    CUTE_UNROLL
    for (int i = 0; i < size<1>(rO); ++i) {
      Tensor rV = load_values<Traits>(tOsV, first + i, lane);  // (MMA, 1, 1)
      Tensor pairs = recast<std::uint32_t>(rV);                // (4, 1, 1): two tokens each
      CUTE_UNROLL
      for (int r = 0; r < 4; ++r) pairs(r) &= seen[r / 2];
      Tensor sum = make_tensor<float>(Shape<Shape<_2, _2>>{});  // (MMA)
      copy(rO(_, i), sum);
      gemm(mma, rV(_, 0, 0), rP, sum);
      CUTE_UNROLL
      for (int e = 0; e < 4; ++e) rO(e, i) = own[e % 2] ? sum(e) : rO(e, i);
    }
  }
}

// Weights of 16 tokens as B operands: elements of S^T, rounded in pairs and transposed in registers.
template <class T, class Traits>
__device__ __forceinline__ auto weights_operand(const float (&s)[4]) {
  using namespace cute;
  Tensor pairs = make_tensor<std::uint32_t>(Shape<_1, _2>{});  // (1, 8 tokens each)
  pairs(0) = tile::pack<T>(s[0], s[1]);
  pairs(1) = tile::pack<T>(s[2], s[3]);
  Tensor rP = make_tensor<typename Traits::Element>(Shape<Shape<_2, _2>, _1>{});  // (MMA, 1 n-tile)
  copy(typename Traits::TransposeCopy{}, pairs, make_tensor(recast<std::uint32_t>(rP).data(), Shape<_1, _2>{}));
  return rP;
}

}  // namespace rooftile::gpu
