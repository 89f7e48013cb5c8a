// SPDX-License-Identifier: Apache-2.0
// Loads of wgmma_codes.cuh's producer warps: codes and quantisation parameters, global memory -> stages of consumer
// warps. code_ring.cuh is the streaming kernels': one tile row a warp, whose addresses are immediates.
#pragma once

#include "kernels/gemm/params.h"
#include "kernels/gemm/stage_reader.cuh"
#include "tile/copy.cuh"

namespace rooftile::gpu {

// Copies the codes and quantisation parameters of two tile rows to the stages of two consumer warps, which are
// neighbours, a step at a time. Traits: a W4StageTraits. Every lane copies 16 bytes of each fragment block; some lanes
// copy a 16-byte vector as well: lanes 0 .. 7 of scales and lanes 8 .. 15 of offsets (zero points or minima) for the
// first tile row, lanes 16 .. 31 the same for the second.
template <class Traits>
class W4CodeLoader {
  using Stage = typename Traits::Stage;
  static constexpr int tile_bytes = w4_tile_bytes(Traits::bits), blocks = Traits::fragment_blocks;
  static constexpr int tile_words = tile_bytes / 4;

 public:
  // row: the first tile row; first: the first step of the K range. A tile row past the end of W loads row 0; a second
  // tile row past the end loads the first one again.
  __device__ __forceinline__ W4CodeLoader(const CodesParams& p, int row, int first)
      : tiles_left_(p.k_tiles - 2 * first) {
    using namespace cute;
    if (row >= p.tile_rows) row = 0;
    const bool second = row + 1 < p.tile_rows;
    const int groups_in_step = 4 >> p.scale_k_shift, vec = lane() % 8;
    // (word, fragment block) of a step
    Tensor gW =
        make_tensor(make_gmem_ptr<std::uint32_t>(p.w.codes + (std::int64_t{row} * p.k_tiles + 2 * first) * tile_bytes),
                    Layout<Shape<_128, Int<blocks>>>{});
    codes_ = raw_pointer_cast(typename Traits::GmemCopyCodes{}.get_slice(lane()).partition_S(gW).data());
    if (second) second_row_words_ = std::int64_t{p.k_tiles} * tile_words;
    const bool is_offset = lane() % 16 >= 8, is_bytes = is_offset && p.w.zeros == W4Zeros::integer;
    const int shift = is_bytes ? 0 : 1;  // log2 of the 16-byte vectors of a group
    group_vecs_ = 1 << shift;
    step_groups_ = p.scale_k < p.group && p.groups == 1 ? 0 : groups_in_step;
    const int first_group = first * step_groups_ + (vec >> shift);
    groups_left_ = p.groups - first_group;
    if (vec >= groups_in_step << shift || (is_offset && p.w.zeros == W4Zeros::symmetric)) return;
    const void* const qparams = is_offset ? p.w.offsets : p.w.scales;  // (16 rows, group, tile row)
    qparams_ = static_cast<const uint128_t*>(qparams) +
               (std::int64_t{row + (second && lane() >= 16 ? 1 : 0)} * p.groups + first_group) * group_vecs_ +
               (vec & shift);
  }

  // Prefetches the next `steps` steps into L2. Safe before the previous kernel has ended, which may still write them: a
  // prefetch reads nothing into the SM.
  __device__ __forceinline__ void prefetch(int steps) const {
    if (lane() % 16 == 0)
      tile::prefetch_l2_bulk(codes_ + lane() / 16 * second_row_words_ - lane() * 4,
                             min(2 * steps, tiles_left_) * tile_bytes);
    if (qparams_ && lane() % 8 == 0)
      tile::prefetch_l2_bulk(qparams_, 16 * min(max(steps * step_groups_, 1), groups_left_) * group_vecs_);
  }

  // Issues the cp.async copies of the next step to stage `stage` and advances to the step after it. ring: the first
  // consumer warp's first stage; the second warp's lies behind it.
  __device__ __forceinline__ void load(Stage* ring, int stage) {
    using namespace cute;
    CUTE_UNROLL
    for (int row = 0; row < 2; ++row) {
      Tensor tWgW = make_tensor(make_gmem_ptr(codes_ + row * second_row_words_),
                                Layout<Shape<_4, Int<blocks>>, Stride<_1, _128>>{});  // (CPY, fragment block)
      Tensor tWsW = w4_lane_codes<Traits>(ring + row);                                // (CPY, 1, fragment block, STAGE)
      CUTE_UNROLL
      for (int f = 0; f < blocks; ++f)
        if (f < blocks / 2 || tiles_left_ > 1)
          copy(typename Traits::GmemCopyCodes{}, tWgW(_, f), tWsW(_, _0{}, f, stage));
    }
    if (qparams_) {                                                   // zero-filled past the end of K
      Tensor gQ = make_tensor(make_gmem_ptr(qparams_), Shape<_1>{});  // (this lane's vector)
      Tensor sQ = make_tensor(make_smem_ptr(ring[lane() / 16].qparams + lane() % 16),
                              typename Traits::LaneLayoutQparams{});  // (1, STAGE)
      copy(typename Traits::GmemCopyQparams{}.with(groups_left_ > 0), gQ, sQ(_, stage));
    }
    codes_ += 2 * tile_words;
    qparams_ += qparams_ ? step_groups_ * group_vecs_ : 0;
    groups_left_ -= step_groups_;
    tiles_left_ -= 2;
  }

 private:
  __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }

  const std::uint32_t* codes_;                // this lane's words of the next step's first fragment block
  const cute::uint128_t* qparams_ = nullptr;  // this lane's vector of the next step's scales or offsets; null: no copy
  std::int64_t second_row_words_ = 0;         // from the first tile row's codes to the second's; 0: there is no second
  int group_vecs_;                            // 16-byte vectors of a group
  int step_groups_;                           // groups of a step; 0: one for all of K
  int groups_left_;                           // from the lane's group to the end of K
  int tiles_left_;                            // from the next step to the end of K
};

}  // namespace rooftile::gpu
