// SPDX-License-Identifier: Apache-2.0
// The producer warp group of wgmma_codes.cuh: codes, scales and x -> the ring of stages, ahead of the consumers.
#pragma once

#include <cutlass/pipeline/sm90_pipeline.hpp>

#include "kernels/gemm/code_loader.cuh"
#include "kernels/gemm/wgmma_codes_scheduler.cuh"
#include "tile/barrier.cuh"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {

// x of a step, by one thread: two TMA loads of 64 k of this CTA's part of the tokens, which with multicast go to all
// CTAs of the cluster. Their bytes count at the full barrier of each CTA that receives them.
template <class Traits>
class W4XLoader {
 public:
  __device__ __forceinline__ W4XLoader(const WgmmaParams& params, typename Traits::SharedStorage& smem, int cta_rank)
      : params_(params), smem_(smem), cta_rank_(cta_rank) {}

  __device__ __forceinline__ void load(unsigned m_block, int step, int stage) const {
    using namespace cute;
    smem_.full[stage].arrive_and_expect_tx(Traits::x_bytes);
    auto* const barrier = recast_ptr<std::uint64_t>(&smem_.full[stage]);
    constexpr auto hint = static_cast<std::uint64_t>(TMA::CacheHintSm90::EVICT_NORMAL);
    if (params_.cluster_shift > 0) {
      using Atom = typename Traits::template TmaX<SM90_TMA_LOAD_MULTICAST_OP>;
      // 3: multicast to both CTAs of the cluster
      copy_x(Atom{{&params_.x_map, barrier, std::uint16_t{3}, hint}}, Layout<_2>{}, m_block, step, stage);
    } else {
      using Atom = typename Traits::template TmaX<SM90_TMA_LOAD_OP>;
      copy_x(Atom{{&params_.x_map, barrier, hint}}, Layout<_1>{}, m_block, step, stage);
    }
  }

 private:
  // The TMA descriptor knows how many tokens a CTA loads: the box of params.x_map. CuTe's own descriptors would fix the
  // cluster at compile time, and their maker cannot report a driver's error.
  template <class Atom, class Ctas>
  __device__ __forceinline__ void copy_x(const Atom& atom, Ctas ctas, unsigned m_block, int step, int stage) const {
    using namespace cute;
    const auto extents = make_shape(static_cast<int>(params_.tokens), params_.k);
    Tensor mX = make_coord_tensor(make_layout(extents, make_stride(E<1>{}, E<0>{})));  // (token, k) -> TMA's (k, token)
    Tensor gX = local_tile(mX, Shape<typename Traits::BLK_N, typename Traits::BLK_K>{},
                           make_coord(_, _));                                         // (BLK_N, BLK_K, m-block, step)
    Tensor sX = make_tensor(make_smem_ptr(smem_.x), typename Traits::SmemLayoutX{});  // (BLK_N, BLK_K, STAGE)
    auto [tXgX, tXsX] = tma_partition(atom, cta_rank_, ctas, group_modes<0, 2>(sX),
                                      group_modes<0, 2>(gX));  // ((TMA, 2), m-block, step), ((TMA, 2), STAGE)
    copy(atom, tXgX(_, m_block, step), tXsX(_, stage));
  }

  const WgmmaParams& params_;
  typename Traits::SharedStorage& smem_;
  int cta_rank_;
};

// Runs producer warp `producer` (0 ..), which loads for two consumer warps; warp 0 also loads x.
template <class Traits>
__device__ __forceinline__ void w4_wgmma_producer(const WgmmaParams& params, typename Traits::SharedStorage& smem,
                                                  int cta_rank, int producer) {
  using namespace cute;
  const CodesParams& p = params;
  const bool loads_x = producer == 0 && elect_one_sync();
  const int first_consumer = 2 * producer;
  if (loads_x) prefetch_tma_descriptor(&params.x_map);
  const W4XLoader<Traits> x(params, smem, cta_rank);
  W4TileScheduler<Traits> scheduler(params, cta_rank);
  W4WgmmaWorkTile work = scheduler.next();
  const auto loader_of = [&](const W4WgmmaWorkTile& of) {
    return W4CodeLoader<Traits>(p, p.template tile_row<Traits::warps>(of.n_block, first_consumer), of.first);
  };
  W4CodeLoader<Traits> codes = loader_of(work);
  codes.prefetch(Traits::stages);
  tile::wait_for_cluster();  // all CTAs of the cluster have initialised their barriers
  tile::wait_for_previous_kernel();
  cutlass::PipelineState<Traits::stages> state(0, 1, 0);  // a new barrier counts as one whose phase 1 has completed
  for (;;) {
    const int end = work.first + work.steps;
    // unrolled copies would take registers
    CUTE_NO_UNROLL
    for (int step = work.first; step < end; ++step, ++state) {
      const int stage = state.index();
      tile::wait_barrier(smem.empty[stage], state.phase());  // consumers -> producer: the stage may be overwritten
      if (loads_x) x.load(work.m_block, step, stage);
      __syncwarp();
      codes.load(&smem.ring[0][first_consumer], stage);
      tile::arrive_on_copies(smem.full[stage]);  // producer -> consumers: when this thread's copies have landed
    }
    if (!scheduler.has_next()) break;
    work = scheduler.next();
    codes = loader_of(work);
  }
  tile::let_next_kernel_start();
  // Stay alive until the peers' last multicast writes (which this CTA's consumers wait for) and arrivals have landed.
  for (int i = 0; i < Traits::stages; ++i, ++state) tile::wait_barrier(smem.empty[state.index()], state.phase());
}

}  // namespace rooftile::gpu
