// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 16 bits, for few tokens on GPUs that are not Hopper, and for any
// number of tokens and any strides where the tensors do not meet the rules of the other kernels.
//   x [M, K]   W [N, K]   y, residual [M, N]   bias [N]   any strides
//
// W is the A operand of mma m16n8k16 and tokens are its N, so 1 to 16 tokens cost nearly the same. A CTA computes
// row_tiles x 16 rows of W x 16 tokens over one split of K. The `slices` warps of a row tile slice K (sliced-K): slice
// i takes 64 k at i * 64 of every slices * 64. A step is 16 rows x 64 k.
//   W   global -> the warp's own ring of shared memory (cp.async, `linear_stages` stages) -> registers; a lane reads
//       back the bytes that it copied itself
//   x   global -> registers, one step ahead; the other warps of the CTA hit L1
// A lane takes 8 neighbouring k of every 32, the same for W and x: the lane feeds k 8t .. 8t + 7 to the mma where the
// instruction names k 2t, 2t + 1, 2t + 8, 2t + 9. Both operands permute k alike, so only the order of the sum changes.
// Slices, then splits (split_k.cu), are summed in order. K is split up to 16 tokens only: a row's bits depend on N, K,
// the device and whether M exceeds 16.
//
// Cost: 2 N K bytes of W, 2 M N K flop: M flop a byte, so up to 16 tokens bandwidth is the roof and 2 N K / bandwidth
// the floor (25.5 us for K = 4096, N = 14336 at 4.6 TB/s). A warp issues some 90 instructions for the 2 KB of a step
// and has 10 KB in flight, an SM 70 to 80 KB. Each CTA reads x from L2 once or a little more: M / (16 row_tiles) of W's
// bytes.
// Sync: each lane waits for its own cp.async groups; the ring needs no barrier. One __syncthreads publishes the sums of
//   all warps, which replace the rings. PDL: W is prefetched into L2 while the previous kernel runs; nothing is read
//   before that kernel has ended.
#pragma once

#include "kernels/gemm/bits16_traits.cuh"
#include "kernels/gemm/epilogue.cuh"
#include "kernels/gemm/launch.cuh"
#include "kernels/gemm/stream_scheduler.cuh"
#include "tile/copy.cuh"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {

// Gathers eight elements of a row, `stride` elements apart; elements from the `left`th on are zero-filled.
template <class T>
__device__ __forceinline__ uint4 gather(const T* from, std::int64_t stride, int left) {
  std::uint32_t words[4] = {};  // (4) words of two elements
#pragma unroll
  for (int i = 0; i < 8; ++i)
    if (i < left) words[i / 2] |= std::uint32_t{from[i * stride].raw()} << 16 * (i % 2);
  return {words[0], words[1], words[2], words[3]};
}

// Loads this lane's B fragments of x, step by step: for tokens g and g + 8, 8 neighbouring k of each half of a step.
template <class Cfg>
class XLoader {
  using T = typename Cfg::T;

 public:
  // (halves of 32 k, token_tiles) vectors of 8 elements
  using Step = decltype(cute::make_tensor<uint4>(cute::Shape<cute::_2, cute::Int<Cfg::token_tiles>>{}));
  // k: first k of this lane in its first step; step_stride: k from a step to the next one.
  __device__ __forceinline__ XLoader(const Bits16Params& p, std::int64_t token0, int tokens, std::int64_t k,
                                     int step_stride)
      : k_stride_(Cfg::vec ? 1 : p.x.last_stride), left_(static_cast<int>(p.k - k)), step_stride_(step_stride) {
#pragma unroll
    for (int nt = 0; nt < Cfg::token_tiles; ++nt) {
      const int token = static_cast<int>(threadIdx.x % 32) / 4 + 8 * nt;
      valid_[nt] = token < tokens;  // past the last token: zeros, never stored
      const std::int64_t row = token0 + (valid_[nt] ? token : 0);
      src_[nt] = static_cast<const T*>(p.x.data) + (Cfg::vec ? row * p.x_stride : p.x.offset(row)) + k * k_stride_;
    }
  }
  __device__ __forceinline__ Step next() {
    Step x;
    cute::clear(x);
#pragma unroll
    for (int nt = 0; nt < Cfg::token_tiles; ++nt) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!valid_[nt] || left_ <= 32 * half) continue;
        const T* const from = src_[nt] + 32 * half * k_stride_;
        if constexpr (Cfg::vec) x(half, nt) = *cute::recast_ptr<const uint4>(from);
        else x(half, nt) = gather(from, k_stride_, left_ - 32 * half);
      }
      src_[nt] += step_stride_ * k_stride_;
    }
    left_ -= step_stride_;
    return x;
  }

 private:
  const T* src_[Cfg::token_tiles];  // (token_tiles) next vector of each token
  bool valid_[Cfg::token_tiles];    // (token_tiles) the token exists
  const std::int64_t k_stride_;     // elements between neighbouring k
  int left_;                        // k that remain from this lane's first k of the next step on
  const int step_stride_;
};

// Copies this lane's vectors of W to shared memory, step by step.
template <class Cfg>
class WLoader {
  using T = typename Cfg::T;

 public:
  // row: first row of the warp. Rows past N read row N - 1 again; their results are never stored.
  __device__ __forceinline__ WLoader(const Bits16Params& p, std::int64_t row, std::int64_t k, int step_stride)
      : k_stride_(Cfg::vec ? 1 : p.w_last_stride), left_(static_cast<int>(p.k - k)), step_stride_(step_stride) {
#pragma unroll
    for (int r = 0; r < 2; ++r)
      src_[r] = static_cast<const T*>(p.w) +
                min(row + static_cast<int>(threadIdx.x % 32) / 4 + 8 * r, p.n - 1) * p.w_stride + k * k_stride_;
  }
  // Starts the copies of the next step. to: this lane's vectors of a stage, (8, rows g and g + 8, halves of 32 k)
  template <class To>
  __device__ __forceinline__ void copy(To&& to) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const T* const from = src_[r] + 32 * half * k_stride_;
        if constexpr (Cfg::vec)
          cute::copy(typename Cfg::CopyAtom{}.with(left_ > 32 * half),
                     cute::make_tensor(cute::make_gmem_ptr(from), typename Cfg::Vec{}), to(cute::_, r, half));
        else cute::recast<uint4>(to(cute::_, r, half))(0) = gather(from, k_stride_, left_ - 32 * half);
      }
      src_[r] += step_stride_ * k_stride_;
    }
    left_ -= step_stride_;
  }

 private:
  const T* src_[2];  // (2) next vector of rows g and g + 8
  const std::int64_t k_stride_;
  int left_;
  const int step_stride_;
};

template <class Cfg>
__global__ void __launch_bounds__(linear_warps * 32, 2) linear_stream(const __grid_constant__ Bits16Params p) {
  using T = typename Cfg::T;
  constexpr int NT = Cfg::token_tiles, S = linear_stages;
  extern __shared__ __align__(128) std::uint8_t shared[];
  tile::let_next_kernel_start();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  const int slices = 1 << p.slices_log2, slice = warp & (slices - 1);
  const auto [m_block, n_block, split] = stream_work_tile(static_cast<int>(blockIdx.x), p.by_m_blocks, p.by_n_blocks);
  const std::int64_t local_token0 = std::int64_t{m_block} * linear_stream_tokens;
  const int tokens = static_cast<int>(min(std::int64_t{8 * NT}, p.tokens - local_token0));
  const std::int64_t row0 = std::int64_t{n_block} * p.row_tiles * linear_rows,
                     row = row0 + (warp >> p.slices_log2) * linear_rows;
  const int first_step = split * p.split_steps, all = min(p.split_steps, p.steps - first_step);
  // In the last CTA a warp may have no rows.
  const int steps = row < p.n ? (all - slice + slices - 1) >> p.slices_log2 : 0;
  const int step_stride = linear_step_k << p.slices_log2;  // k from a step of a slice to its next one
  std::uint8_t* const ring = shared + warp * (S * linear_step_bytes);
  const auto sW = cute::make_tensor(cute::make_smem_ptr<T>(ring), typename Cfg::LayoutW{});  // (BLK_M, BLK_K, STAGE)
  const auto tWsW = typename Cfg::CopyW{}.get_slice(lane).partition_D(sW);                   // (8, 2, 2, STAGE)

  if constexpr (Cfg::vec) {  // prefetch what the ring takes: S steps of all slices are contiguous in a row
    const std::int64_t from = (std::int64_t{first_step} + slice * S) * linear_step_k,
                       end = min(p.k, (std::int64_t{first_step} + all) * linear_step_k);
    if (lane < linear_rows && row + lane < p.n && from < end)
      tile::prefetch_l2_bulk(static_cast<const T*>(p.w) + (row + lane) * p.w_stride + from,
                             static_cast<int>(min(end - from, std::int64_t{S * linear_step_k})) * 2);
  }
  const std::int64_t k = (std::int64_t{first_step} + slice) * linear_step_k + 8 * t;  // first k of this lane
  WLoader<Cfg> weights(p, row, k, step_stride);
  XLoader<Cfg> x(p, p.first_token + local_token0, tokens, k, step_stride);
  tile::wait_for_previous_kernel();

#pragma unroll
  for (int s = 0; s < S - 1; ++s) {
    if (s < steps) weights.copy(tWsW(cute::_, cute::_, cute::_, s));
    cute::cp_async_fence();
  }
  typename XLoader<Cfg>::Step next = x.next();

  typename Cfg::TiledMma mma;
  auto acc = cute::partition_fragment_C(mma, cute::Shape<typename Cfg::BlkM, typename Cfg::BlkN>{});  // ((2, 2), 1, NT)
  cute::clear(acc);
  int stage = 0;
  for (int step = 0; step < steps; ++step) {
    cute::cp_async_wait<S - 2>();  // this lane's copies of this step are in shared memory
    if (step + S - 1 < steps) weights.copy(tWsW(cute::_, cute::_, cute::_, stage == 0 ? S - 1 : stage - 1));
    cute::cp_async_fence();
    const typename XLoader<Cfg>::Step x_step = next;
    if (step + 1 < steps) next = x.next();
    const auto here = tWsW(cute::_, cute::_, cute::_, stage);  // (8, 2, 2)
    stage = stage == S - 1 ? 0 : stage + 1;
    const auto rX = cute::make_tensor(cute::recast_ptr<const T>(x_step.data()), typename Cfg::FragmentX{});
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      auto vecs = cute::make_tensor<T>(cute::Shape<cute::_8, cute::_2>{});  // (8, rows g and g + 8)
      cute::copy(cute::AutoVectorizingCopyWithAssumedAlignment<128>{}, here(cute::_, cute::_, half), vecs);
      const auto rW = cute::make_tensor(vecs.data(), typename Cfg::FragmentW{});  // ((2, 2, 2), 2)
#pragma unroll
      for (int nt = 0; nt < NT; ++nt) {
#pragma unroll
        for (int s = 0; s < 2; ++s) cute::gemm(mma, rW(cute::_, s), rX(cute::_, s, half, nt), acc(cute::_, 0, nt));
      }
    }
  }

  // The warp's ring now holds its sums.
  cute::cp_async_wait<0>();
  __syncwarp();  // all lanes -> all lanes: every lane has read its last step
  const auto sums = cute::make_tensor(cute::make_smem_ptr<float>(ring), typename Cfg::LayoutSums{});  // (BLK_M, BLK_N)
  cute::copy(acc, mma.get_slice(lane).partition_C(sums));
  __syncthreads();  // all warps -> all warps: the sums are written
  // (vectors of 4 rows, BLK_N, warps): the sums of all warps
  const auto all_sums = cute::make_tensor(
      cute::make_smem_ptr<float4>(&shared[0]),
      cute::make_layout(cute::make_shape(cute::_4{}, typename Cfg::BlkN{}, cute::Int<linear_warps>{}),
                        cute::make_stride(cute::_1{}, cute::_4{}, cute::Int<S * linear_step_bytes / 16>{})));
  const int vecs = 4 * p.row_tiles;
  for (int i = threadIdx.x; i < vecs * tokens; i += blockDim.x) {
    const int token = i / vecs, vec = i % vecs;
    const std::int64_t n = row0 + 4 * vec;
    // 4 neighbouring rows for one token, summed over the slices in order
    const float4 sum =
        sum_in_order(slices, [&](int s) -> float4 { return all_sums(vec % 4, token, (vec / 4 << p.slices_log2) + s); });
    if (p.splits == 1) {
      Epilogue<typename Cfg::Element>(p, n).store(p.first_token + local_token0 + token, sum, {});
    } else if (n < p.n) {  // padded_n has room for the last vector
      *cute::recast_ptr<float4>(p.partial + (split * p.tokens + local_token0 + token) * p.padded_n() + n) = sum;
    }
  }
}

// A row of the table.
template <DType dtype, int token_tiles, bool vec>
GemmVariant stream_bits16_variant() {
  using Config = LinearConfig<tile::ElementOf<dtype>, token_tiles, vec>;
  return VariantOf<Bits16Params, linear_stream<Config>>::row(
      {.path = GemmPath::stream, .dtype = dtype, .config = token_tiles - 1, .vec = vec});
}
template <DType dtype>
std::span<const GemmVariant> stream_bits16_variants() {
  static const GemmVariant rows[] = {stream_bits16_variant<dtype, 1, true>(), stream_bits16_variant<dtype, 2, true>(),
                                     stream_bits16_variant<dtype, 1, false>(),
                                     stream_bits16_variant<dtype, 2, false>()};
  return rows;
}

}  // namespace rooftile::gpu
