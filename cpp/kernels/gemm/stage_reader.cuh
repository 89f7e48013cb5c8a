// SPDX-License-Identifier: Apache-2.0
// What a warp reads of its stages: codes and quantisation parameters, shared memory -> registers.
#pragma once

#include "kernels/gemm/code_traits.cuh"

namespace rooftile::gpu {

// (CPY, 1, fragment block, STAGE): this lane's words of a warp's stages.
template <class Traits>
__device__ __forceinline__ auto w4_lane_codes(typename Traits::Stage* stages) {
  return typename Traits::GmemCopyCodes{}
      .get_slice(threadIdx.x % 32)
      .partition_D(cute::make_tensor(cute::make_smem_ptr(stages->codes), typename Traits::SmemLayoutCodes{}));
}

// Traits: a W4StageTraits. Every lane reads 16 bytes of each fragment block, and the scales, zero points or minima of
// its rows g and g + 8.
template <class Traits>
class W4StageReader {
 public:
  using Stage = typename Traits::Stage;

  // stages: this warp's (STAGE), Traits' pitch apart.
  __device__ __forceinline__ W4StageReader(Stage* stages, int scale_k_shift)
      : stages_(stages), scale_k_shift_(scale_k_shift) {
    using namespace cute;
    const void* const shared_scales = stages->qparams;
    Tensor sS = make_tensor(make_smem_ptr(static_cast<const std::uint16_t*>(shared_scales)),
                            Traits::smem_layout_scales(scale_k_shift));  // (g, ((row half, k-block), t), STAGE)
    scales_ = raw_pointer_cast(typename Traits::SmemCopyScales{}.get_slice(lane()).partition_S(sS).data());
  }

  // rCodes (WORD, (k-step, k-block)): this lane's words of a stage.
  template <class Codes>
  __device__ __forceinline__ void read_codes(int stage, Codes& rCodes) const {
    using namespace cute;
    copy(Copy_Atom<UniversalCopy<uint128_t>, std::uint32_t>{}, w4_lane_codes<Traits>(stages_)(_, _0{}, _, stage),
         make_tensor(rCodes.data(), Shape<_4, Int<Traits::fragment_blocks>>{}));
  }
  // rScales (2 scale blocks): the 16-bit scales of rows g and g + 8 in each scale block of a stage.
  template <class Scales>
  __device__ __forceinline__ void read_scales(int stage, Scales& rScales) const {
    read_pairs(0, stage, rScales);
  }
  // The same of minima.
  template <class Scales>
  __device__ __forceinline__ void read_minima(int stage, Scales& rMinima) const {
    read_pairs(w4_qparam_bytes, stage, rMinima);
  }
  // The zero points of rows g and g + 8 in a k-block.
  __device__ __forceinline__ uint2 read_zeros(int stage, int k_block) const {
    using namespace cute;
    Tensor sZ = zeros();
    return {sZ(lane(), 0, group(k_block), stage), sZ(lane(), 1, group(k_block), stage)};
  }
  // The zero points of this lane's rows in a stage: (rows g and g + 8, group).
  __device__ __forceinline__ auto zeros_of_stage(int stage) const { return zeros()(lane(), cute::_, cute::_, stage); }
  // The group of a k-block within its stage.
  __device__ __forceinline__ int group(int k_block) const {
    return Traits::scale_blocks == 4 ? k_block >> scale_k_shift_ : k_block * Traits::scale_blocks / 4;
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
  __device__ __forceinline__ auto zeros() const {  // (lane, rows g and g + 8, group, STAGE)
    const void* const bytes = stages_->qparams + w4_qparam_bytes / 16;
    return cute::make_tensor(cute::make_smem_ptr(static_cast<const std::uint8_t*>(bytes)),
                             typename Traits::SmemLayoutZeros{});
  }
  // offset: bytes from the stage's scales.
  template <class Pairs>
  __device__ __forceinline__ void read_pairs(int offset, int stage, Pairs& rPairs) const {
    using namespace cute;
    Tensor tSsS =
        make_tensor(make_smem_ptr(scales_ + offset / 2), typename Traits::LaneLayoutScales{});  // (CPY, STAGE)
    copy(typename Traits::SmemCopyScales{}, tSsS(_, stage), rPairs);
  }

  Stage* stages_;
  const std::uint16_t* scales_;  // this lane's row of scales in the first stage, for ldmatrix
  int scale_k_shift_;
};

}  // namespace rooftile::gpu
