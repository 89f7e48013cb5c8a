// SPDX-License-Identifier: Apache-2.0
// The main loop of wgmma_codes.cuh: what a consumer warp group does with the stages.
#pragma once

#include <cutlass/pipeline/sm90_pipeline.hpp>

#include "kernels/gemm/params.h"
#include "kernels/gemm/stage_reader.cuh"
#include "kernels/gemm/wgmma_codes_traits.cuh"
#include "tile/barrier.cuh"
#include "tile/hints.cuh"

namespace rooftile::gpu {

// A runs one step ahead, on from one work tile into the next: while wgmma multiplies a step, the codes of the next one
// become operands, a k-block at a time, as soon as wgmma has read the registers of that k-block.
template <class Traits>
class W4WgmmaMainloop {
  using T = typename Traits::T;
  using Decode = tile::CodeDecode<T, Traits::bits>;
  using ScaleOut = cute::SM90::GMMA::ScaleOut;
  using KBlocks = cute::make_int_sequence<4>;  // of 32 k, two k-steps each
  using SUMS = cute::Int<Traits::sums>;
  // The scales of rows g and g + 8: in fp32 where a CTA has the registers of an SM, else as they were stored.
  using HeldScale = std::conditional_t<Traits::ctas_per_sm == 1, float2, std::uint32_t>;

 public:
  __device__ __forceinline__ W4WgmmaMainloop(const CodesParams& p, typename Traits::SharedStorage& smem, int cta_rank)
      : smem_(smem),
        reader_(&smem.ring[0][threadIdx.x / 32], p.scale_k_shift),
        peer_(peer_of_lane(1 << p.cluster_shift, cta_rank)),
        half_scales_(p.w.scale_dtype == DType::f16),
        integer_(p.w.zeros == W4Zeros::integer),
        minima_(Traits::rounded && Traits::bits == 4 && p.w.zeros == W4Zeros::minima) {
    rZero_(0) = rZero_(1) = Decode::symmetric_zero;
    if constexpr (Traits::rounded) cute::clear(rMinima_);
  }

  // Loads and dequantises the first step.
  __device__ __forceinline__ void start() {
    load_stage();
    cute::for_each(KBlocks{}, [&](auto k_block) { dequant(k_block); });
    read_scale();
  }

  // rAcc ((2, 2, BLK_N / 8), 1, 1) += W x of the next `steps` steps; exact operands: in units of CodeDecode::unit.
  // last: no work tile follows this one.
  template <class Acc>
  __device__ __forceinline__ void run(int steps, bool last, Acc& rAcc) {
    using namespace cute;
    int loads = last ? steps - 1 : steps;  // steps after which a stage is loaded
    // Pinned, because ptxas would compute it in every step. Not with 128 tokens, where the register costs more (6 % at
    // M = 1024).
    if constexpr (Traits::tokens <= 64) tile::pin(loads);
    CUTE_NO_UNROLL
    for (int step = 0; step < steps; ++step) {
      const bool has_next = step < loads;
      const int stage = state_.index();
      if constexpr (Traits::rounded) {
        Tensor rSum = make_tensor(rAcc.data(), append(rAcc.layout(), Layout<_1, _0>{}));
        multiply(stage, ScaleOut::One, has_next, rSum);
      } else {
        const auto scales = scales_;  // of this step; multiply() reads those of the next one
        // ((2, 2, BLK_N / 8), 1, 1, SUMS)
        Tensor rSum = make_tensor<float>(append(rAcc.layout(), Layout<SUMS, Int<size(Acc{})>>{}));
        multiply(stage, ScaleOut::Zero, has_next, rSum);
        CUTE_UNROLL
        for (int s = 0; s < Traits::sums; ++s) {
          const float2 scale = scale_pair(scales[s]);
          CUTE_UNROLL
          for (int i = 0; i < size(rAcc); ++i)
            rAcc(i) = fmaf(i / 2 % 2 == 0 ? scale.x : scale.y, rSum(_, _, _, s)(i), rAcc(i));
        }
      }
      if (has_next) dequant(_3{});
      release(stage);
    }
  }

 private:
  // The CTA of the cluster that this lane tells when a stage is read; -1: none.
  __device__ __forceinline__ static int peer_of_lane(int cluster, int cta_rank) {
    const int lane = threadIdx.x % 32;
    const int peer = lane < cluster && lane != cta_rank ? lane : -1;
    return __shfl_sync(~0u, peer, lane);  // the shuffle hides where it comes from: ptxas would compute it in every step
  }
  // All MMAs of a step, in four batches, one a k-block; meanwhile the next step's codes become operands, but for the
  // last k-block. rSum ((2, 2, BLK_N / 8), 1, 1, SUMS): of its part of the step each; first: whether the MMAs add to it
  // or overwrite it.
  template <class Sum>
  __device__ __forceinline__ void multiply(int stage, ScaleOut first, bool has_next, Sum& rSum) {
    using namespace cute;
    typename Traits::TiledMma mma;
    const Tensor tBrX = x_operand(stage);  // (MMA, 1, MMA_K): descriptors
    warpgroup_fence_operand(rSum);
    warpgroup_arrive();
    for_each(KBlocks{}, [&](auto k_block) {
      constexpr auto sum = k_block / (_4{} / SUMS{});
      if constexpr (k_block % (_4{} / SUMS{}) == 0) mma.accumulate_ = first;
      for_each(make_int_sequence<2>{}, [&](auto k) {
        gemm(mma, rA_(_, _, make_coord(k, k_block)), tBrX(_, _, 2 * k_block + k), rSum(_, _, _, sum));
        mma.accumulate_ = ScaleOut::One;
      });
      warpgroup_commit_batch();
    });
    if (has_next) {
      ++state_;
      load_stage();
      for_each(make_int_sequence<3>{}, [&](auto k_block) {
        warpgroup_wait<3 - k_block>();  // wgmma has read the registers of this k-block
        dequant(k_block);
      });
      read_scale();
    }
    warpgroup_wait<0>();
    warpgroup_fence_operand(rSum);
  }
  // x of a stage, as descriptors. CuTe adds to the lower half of a descriptor alone; adding to all 64 bits saves an
  // instruction (UMOV) for most wgmmas.
  __device__ __forceinline__ auto x_operand(int stage) const {
    using namespace cute;
    Tensor sX = make_tensor(make_smem_ptr(smem_.x), typename Traits::SmemLayoutX{});  // (BLK_N, BLK_K, STAGE)
    Tensor tBrX = typename Traits::TiledMma{}.get_slice(0).partition_fragment_B(sX);  // (MMA, 1, MMA_K, STAGE)
    return make_tensor(counting_iterator<std::uint64_t>(*tBrX.data()), tBrX.layout())(_, _, _, stage);
  }

  // Waits until the stage is full, then loads its codes, scales and minima into registers.
  __device__ __forceinline__ void load_stage() {
    const int stage = state_.index();
    tile::wait_barrier(smem_.full[stage], state_.phase());  // producer -> consumers: x, codes and scales have landed
    reader_.read_codes(stage, rCodes_);
    reader_.read_scales(stage, rScales_);
    if (minima_) reader_.read_minima(stage, rMinima_);
    sZeros_ = reader_.zeros_of_stage(stage);
  }
  // Exact operands: the scales of the stage loaded last, while MMAs run.
  __device__ __forceinline__ void read_scale() {
    if constexpr (Traits::rounded) return;
    const auto pairs = cute::recast<std::uint32_t>(rScales_);  // (SUMS)
    CUTE_UNROLL
    for (int s = 0; s < Traits::sums; ++s)
      if constexpr (std::is_same_v<HeldScale, float2>) scales_[s] = Traits::scale_pair(half_scales_, pairs(s));
      else scales_[s] = pairs(s);
  }
  __device__ __forceinline__ float2 scale_pair(HeldScale scale) const {
    if constexpr (std::is_same_v<HeldScale, float2>) return scale;
    else return Traits::scale_pair(half_scales_, scale);
  }
  // k-block `k_block` of the stage loaded last -> A.
  template <class KBlock>
  __device__ __forceinline__ void dequant(KBlock k_block) {
    using namespace cute;
    const auto rCodes = rCodes_(_, make_coord(_, k_block));  // (WORD, 2 k-steps)
    auto rA = rA_(_, _, make_coord(_, k_block));             // (MMA, 1, 2 k-steps)
    if constexpr (Traits::rounded) {
      constexpr std::uint32_t zero_point = w4_zero_point(Traits::bits);
      std::uint32_t zeros[2] = {zero_point, zero_point};  // of rows g, g + 8
      if (minima_) zeros[0] = zeros[1] = 0;
      if (integer_) zeros[0] = sZeros_(0, reader_.group(k_block)), zeros[1] = sZeros_(1, reader_.group(k_block));
      tile::WeightDecode<T, Traits::bits, typename Traits::Scale>(recast<std::uint32_t>(rScales_)(k_block),
                                                                  recast<std::uint32_t>(rMinima_)(k_block), zeros)
          .dequant(rCodes, rA);
    } else {
      if constexpr (k_block % (_4{} / SUMS{}) == 0)
        if (integer_) Decode::set_zeros(rZero_, sZeros_(0, reader_.group(k_block)), sZeros_(1, reader_.group(k_block)));
      Decode::dequant(rCodes, rZero_, rA);
    }
  }
  // This warp has read the stage, and its MMAs have ended: producers of all CTAs may overwrite it.
  __device__ __forceinline__ void release(int stage) {
    tile::arrive_at_barrier(smem_.empty[stage]);  // consumer -> producer: this lane has read its codes and scales
    __syncwarp();  // all lanes have, and the wgmmas have read x: peers may multicast into it
    if (peer_ >= 0) tile::arrive_at_barrier(smem_.empty[stage], peer_);
  }

  typename Traits::SharedStorage& smem_;
  const W4StageReader<Traits> reader_;
  const int peer_;                                // the CTA that this lane tells when a stage is read; -1: none
  const bool half_scales_, integer_, minima_;     // the type of scales; the kind of zeros
  cutlass::PipelineState<Traits::stages> state_;  // of the stage loaded last
  // (rows g and g + 8, group): zero points in that stage
  decltype(std::declval<const W4StageReader<Traits>&>().zeros_of_stage(0)) sZeros_;
  // (WORD, (k-step, k-block)) of that stage
  decltype(cute::make_tensor<std::uint32_t>(
      cute::Shape<cute::Int<Traits::bits / 4>, cute::Shape<cute::_2, cute::_4>>{})) rCodes_;
  // (MMA, 1, (k-step, k-block)): 16 rows x 16 k a warp and k-step
  decltype(cute::make_tensor<typename Traits::MmaT>(
      cute::Shape<cute::Shape<cute::_2, cute::_2, cute::_2>, cute::_1, cute::Shape<cute::_2, cute::_4>>{})) rA_;
  // (2 scale blocks) of that stage: 16-bit scales, minima of rows g and g + 8
  decltype(cute::make_tensor<std::uint16_t>(cute::Int<2 * Traits::scale_blocks>{})) rScales_, rMinima_;
  [[maybe_unused]] cute::array<HeldScale, Traits::sums>
      scales_;  // (SUMS), exact operands: of rows g, g + 8 in that stage
  decltype(cute::make_tensor<std::uint32_t>(cute::_2{})) rZero_;  // (row g, row g + 8): -zero / unit in both halves
};

}  // namespace rooftile::gpu
