// SPDX-License-Identifier: Apache-2.0
// A warp's codes and quantisation parameters in the weight-streaming kernel: global memory -> the warp's own ring of
// stages in shared memory (cp.async). stage_reader.cuh reads them.
#pragma once

#include "kernels/gemm/params.h"
#include "kernels/gemm/stage_reader.cuh"
#include "tile/copy.cuh"

namespace rooftile::gpu {

// Loads are issued in the order of steps. `step` counts from the ring's position, which advance() moves. Where `step`
// and `stage` are constants after unrolling, every address is a register and an immediate.
// Each lane copies 16 bytes of every fragment block, which it reads back itself. Some lanes also copy a 16-byte vector
// of quantisation parameters, which all lanes read: of scales or of offsets (zero points or minima).
template <class Traits>
class W4CodeRing {
  using Stage = typename Traits::Stage;
  static constexpr int tile_bytes = w4_tile_bytes(Traits::bits), blocks = Traits::fragment_blocks;

 public:
  // stages: this warp's (STAGE). `steps` steps from step `first` on are loaded. A tile row past the end of W loads
  // row 0.
  __device__ __forceinline__ W4CodeRing(const CodesParams& p, Stage* stages, int tile_row, int first, int steps)
      : stages_(stages), tiles_left_(min(2 * steps, p.k_tiles - 2 * first)) {
    using namespace cute;
    if (tile_row >= p.tile_rows) tile_row = 0;
    Tensor gW = make_tensor(
        make_gmem_ptr<std::uint32_t>(p.w.codes + (std::int64_t{tile_row} * p.k_tiles + 2 * first) * tile_bytes),
        typename Traits::GmemLayoutCodes{});  // (word, fragment block, step)
    codes_ = raw_pointer_cast(typename Traits::GmemCopyCodes{}.get_slice(lane()).partition_S(gW).data());

    // vectors of 8 scales, 8 minima or 16 zero points: lanes 0 .. 7 copy scales, lanes 8 .. 15 offsets
    const int vec = lane() % 8, groups_in_step = Traits::small_groups ? 4 >> p.scale_k_shift : 1;
    const bool is_offset = lane() >= 8;
    group_vecs_ = is_offset && Traits::has_zero_points(p.w) ? 1 : 2;
    step_groups_ = p.scale_k < p.group && p.groups == 1 ? 0 : groups_in_step;
    step_vecs_ = step_groups_ * group_vecs_;
    groups_left_ = p.groups - first * step_groups_ - vec / group_vecs_;
    if (lane() >= 16 || vec / group_vecs_ >= groups_in_step ||
        (is_offset && !Traits::minima && !Traits::has_zero_points(p.w)))
      return;
    qparam_steps_left_ = steps;
    const void* const qparams = is_offset ? p.w.offsets : p.w.scales;  // (16 rows, group, tile row)
    qparams_ = static_cast<const uint128_t*>(qparams) +
               (std::int64_t{tile_row} * p.groups + first * step_groups_) * group_vecs_ + vec;
  }

  // Prefetches the first `steps` steps into L2. Safe before the previous kernel has ended, which may still write
  // them: a prefetch reads nothing into the SM.
  __device__ __forceinline__ void prefetch(int steps) const {
    if (lane() == 0) tile::prefetch_l2_bulk(codes_, min(2 * steps, tiles_left_) * tile_bytes);
    if (qparam_steps_left_ > 0 && lane() % 8 == 0)
      tile::prefetch_l2_bulk(qparams_, 16 * min(max(steps * step_vecs_, group_vecs_), groups_left_ * group_vecs_));
  }

  // Issues the cp.async copies of a step to a stage; none past the last step.
  __device__ __forceinline__ void load(int step, int stage) {
    using namespace cute;
    Tensor tWgW =
        make_tensor(make_gmem_ptr(codes_), typename Traits::LaneLayoutCodes{});  // (CPY, fragment block, step)
    CUTE_UNROLL
    for (int f = 0; f < blocks; ++f)
      if (2 * step + f / w4_tile_fragments(Traits::bits) < tiles_left_)
        copy(typename Traits::GmemCopyCodes{}, tWgW(_, f, step), w4_lane_codes<Traits>(stages_)(_, _0{}, f, stage));
    if (step < qparam_steps_left_) {
      Tensor gQ = make_tensor(make_gmem_ptr(qparams_), Shape<_1>{});  // (this lane's vector)
      Tensor sQ =
          make_tensor(make_smem_ptr(stages_->qparams + lane()), typename Traits::LaneLayoutQparams{});  // (1, STAGE)
      if constexpr (Traits::small_groups)  // zero-filled past the end of K
        copy(typename Traits::GmemCopyQparams{}.with(groups_left_ > 0), gQ, sQ(_, stage));
      else copy(typename Traits::GmemCopyQparams{}, gQ, sQ(_, stage));
    }
    qparams_ += step_vecs_;
    if constexpr (Traits::small_groups) groups_left_ -= step_groups_;
  }
  // Moves the ring's position by `steps`; load() has moved the scales and offsets already.
  __device__ __forceinline__ void advance(int steps) {
    codes_ += steps * (2 * tile_bytes / 4);
    tiles_left_ -= 2 * steps;
    qparam_steps_left_ -= steps;
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  Stage* stages_;
  const std::uint32_t* codes_;                // this lane's words of the first fragment block at the ring's position
  const cute::uint128_t* qparams_ = nullptr;  // this lane's vector of scales or offsets of the step that is loaded next
  int tiles_left_;                            // tiles of W from the ring's position to the end of the steps
  int qparam_steps_left_ = 0;                 // the same in steps; 0: this lane copies no scales or offsets
  int group_vecs_;                            // 16-byte vectors of a group
  int step_groups_, step_vecs_;               // groups of a step, 0: one for all of K; and their vectors
  int groups_left_;                           // from the lane's group to the end of K
};

}  // namespace rooftile::gpu
