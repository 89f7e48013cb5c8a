// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 4 or 8 bits, on Hopper's wgmma: for more tokens than stream.cuh is
// fast for. Persistent, warp-specialised CTAs.
//   x [M, K]   y, residual [M, N]   bias [N]   W in tiles of 16 n x 64 k (core/w4_layout.h)
//
// W is the register A operand, tokens are wgmma's N. A work tile is 128 rows of W x `tokens` tokens x K, or one K split
// of it, or (stream-K) the part of K in the CTA's work range. Two consumer warp groups run the MMAs, one tile row of W
// a warp; the four warps of a producer warp group load for them, `stages` steps of 128 k ahead and on into the next
// work tile:
//   codes, scales   global -> one stage of each consumer warp (cp.async), as in stream.cuh; a producer warp loads for
//                   two consumer warps
//   x               global -> shared memory by TMA, 128-byte swizzle. The CTAs of a cluster have different rows of W
//                   and the same tokens: each loads its part of the tokens and multicasts it to all of them.
// Consumers decode codes into A fragments, a k-block of 32 at a time: as soon as a wgmma batch has read its registers,
// while the batches after it still run.
//   scale blocks of 128 k and more, no minima   operands (u - zero) / unit, exact; scales act in fp32 on the sum over a
//                                               step:
//                                               acc += scale * sum of (u - zero) / unit * x,   times unit at the end
//   others (`rounded`)                          operands (u - zero) * scale + minimum, rounded to T; one accumulator
//                                               over K. Scaling four sums a step in fp32 would cost more issue slots
//                                               than the tensor cores have cycles.
//
// Cost of a step, 128 tokens: 4 Mflop, 1024 cycles of the tensor cores; 8 KB of codes of 4 bits, 32 KB of x, of which
// the CTA loads 32 / cluster. A consumer warp issues some 200 instructions, with rounded operands some 250; what one
// warp group cannot overlap with its own MMAs overlaps with the other's. Tensor cores are the roof from 128 tokens on,
// the bytes of W below.
// Sync: producer -> full[stage] (TMA bytes and cp.async copies have landed) -> consumers -> empty[stage] (all consumer
// warps of the cluster have read the stage) -> producers of all CTAs. A named barrier of the consumer warps guards the
// epilogue's tile. A CTA stays alive until its peer's last multicast write and arrival have landed in its shared
// memory. Stream-K: `semaphores` in global memory: a CTA releases its semaphore when its fix-up sums are written, and
// the CTA of the next work range, later in the grid, waits for it at its own end, near whose beginning they were
// written.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include "kernels/products/epilogue.cuh"
#include "kernels/w4a16/code_loader.cuh"
#include "tile/cta_sync.cuh"
#include "tile/tma.cuh"
#include "tile/w4.cuh"
#include "tile/wgmma.cuh"

namespace rooftile::gpu {

// Scale_: void: exact operands; scale blocks of 128 k or more, no minima. Otherwise operands are weights rounded to T,
// and Scale_ is the type of scales and minima.
template <class Element, int bits_, int config_, class Scale_>
struct W4WgmmaTraits {
  using T = Element;
  using Scale = Scale_;
  static constexpr int bits = bits_;
  static constexpr W4WgmmaConfig config = w4_wgmma_config(bits, config_);
  static constexpr int tokens = config.tokens, warps = config.warps(), stages = config.stages,
                       ctas_per_sm = config.ctas_per_sm;
  static constexpr bool rounded = !std::is_void_v<Scale_>, stream_k = w4_stream_k(config);
  static constexpr int consumer_registers = ctas_per_sm == 1 ? 232 : 96, producer_registers = 40;  // a thread
  static_assert(128 * (config.consumer_groups * consumer_registers + producer_registers) <=
                    config.threads() * (65536 / (ctas_per_sm * config.threads()) / 8 * 8),
                "setmaxnreg would wait forever");
};

// The work tile of a CTA: 128 rows of W x Traits::tokens tokens x a range of K. The CTAs of a cluster
// have the same tokens.
struct W4WgmmaWorkTile {
  unsigned split, n_block;
  int token0;        // from the first token of this launch
  int first, steps;  // `steps` steps of 128 k, from step `first` on
};

// The tile scheduler of one cluster.
// Data-parallel or split-K: work tiles are strided over the clusters. Neighbouring clusters take different tokens, in
// groups of m_group m-blocks, whose x stays in L2 while the group meets all rows of W.
// Stream-K: for each m-block, the steps of all rows of W are one sequence, cut into `ranges` work ranges of equal
// length (up to one step). A work range may end inside a tile's K. The scheduler takes tiles from the end of the range
// to its beginning: first the tile whose K goes on in the next range, whose sums the CTA writes as fix-up sums; last
// the tile that the range before began, whose fix-up sums initialise the accumulator. So every output is summed in the
// order of K, wherever work ranges end.
template <class Traits>
class W4TileScheduler {
 public:
  __device__ __forceinline__ W4TileScheduler(const W4WgmmaParams& params, int cta_rank)
      : params_(params), cta_rank_(cta_rank) {
    const W4MatmulParams& p = params.product;
    const unsigned cluster = blockIdx.x >> p.cluster_shift;
    if (stream_k()) {
      const unsigned range = divide(cluster, p.by_m_blocks);
      m_block_ = cluster - range * p.m_blocks;
      next_ = params.range_begin(range);
      end_ = params.range_begin(range + 1);
    } else {
      next_ = cluster;
      end_ = (p.n_blocks >> p.cluster_shift) * p.m_blocks * p.splits;
    }
  }
  __device__ __forceinline__ bool has_next() const { return next_ < end_; }
  __device__ __forceinline__ W4WgmmaWorkTile next() {
    const W4MatmulParams& p = params_.product;
    W4WgmmaWorkTile at;
    if (stream_k()) {
      const unsigned cluster_tile = divide(end_ - 1, params_.by_steps), begin = max(cluster_tile * p.steps, next_);
      at.split = 0;
      at.n_block = (cluster_tile << p.cluster_shift) + cta_rank_;
      at.token0 = static_cast<int>(m_block_) * Traits::tokens;
      at.first = static_cast<int>(begin - cluster_tile * p.steps);
      at.steps = static_cast<int>(end_ - begin);
      end_ = begin;
      return at;
    }
    at.split = divide(next_, params_.by_tiles);
    const unsigned index = next_ - at.split * params_.by_tiles.value;
    next_ += gridDim.x >> p.cluster_shift;
    unsigned cluster_tile = divide(index, p.by_m_blocks), m_block = index - cluster_tile * p.m_blocks;
    if (p.m_blocks > params_.m_group) {
      const unsigned width = params_.m_group, of_group = (p.n_blocks >> p.cluster_shift) * width,
                     group = index / of_group, in_group = index - group * of_group;
      const unsigned own_width = min(width, p.m_blocks - group * width);
      cluster_tile = in_group / own_width;
      m_block = group * width + in_group - cluster_tile * own_width;
    }
    at.n_block = (cluster_tile << p.cluster_shift) + cta_rank_;
    at.token0 = static_cast<int>(m_block) * Traits::tokens;
    at.first = static_cast<int>(at.split) * p.split_steps;
    at.steps = min(p.split_steps, p.steps - at.first);
    return at;
  }
  // Stream-K: the tile's K goes on in the next range, or began in the range before.
  __device__ __forceinline__ bool writes_fixup(const W4WgmmaWorkTile& at) const {
    return stream_k() && at.first + at.steps < params_.product.steps;
  }
  __device__ __forceinline__ bool reads_fixup(const W4WgmmaWorkTile& at) const { return stream_k() && at.first > 0; }
  // The CTA of the range before, which writes this CTA's fix-up sums.
  __device__ __forceinline__ unsigned fixup_cta() const {
    return blockIdx.x - (params_.product.m_blocks << params_.product.cluster_shift);
  }

 private:
  __device__ __forceinline__ bool stream_k() const { return Traits::stream_k && params_.ranges > 0; }

  const W4WgmmaParams& params_;
  int cta_rank_;
  unsigned next_, end_, m_block_ = 0;  // [next, end): work tiles; stream-K: steps, taken from the end
};

template <class Traits>
__global__ void __launch_bounds__(Traits::config.threads(), Traits::ctas_per_sm)
    w4a16_wgmma([[maybe_unused]] const __grid_constant__ W4WgmmaParams params) {
#ifdef ROOFTILE_WGMMA
  using T = typename Traits::T;
  using Decode = tile::CodeDecode<T, Traits::bits>;
  constexpr int N = Traits::tokens, warps = Traits::warps, S = Traits::stages, half_step = N * 128,
                x_bytes = 2 * half_step;
  constexpr int stage_bytes = w4_stage_bytes(Traits::bits), qparams_offset = 2 * w4_tile_bytes(Traits::bits),
                zero_point = w4_zero_point(Traits::bits);
  const W4MatmulParams& p = params.product;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  std::uint8_t* const x_ring = shared;                  // (stages, 2 halves of 64 k, N tokens, 128 bytes), swizzled
  std::uint8_t* const stages_w = shared + S * x_bytes;  // (stages, consumer warps, stage_bytes)
  // (epilogue tokens, 128 rows of W + 4 against bank conflicts), fp32
  float* const out_tile = reinterpret_cast<float*>(stages_w + S * warps * stage_bytes);
  tile::Barrier* const full = reinterpret_cast<tile::Barrier*>(out_tile + w4_epilogue_bytes(Traits::config) / 4);
  tile::Barrier* const empty = full + S;

  const int warp = cutlass::canonical_warp_idx_sync(), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int cluster = 1 << p.cluster_shift, cta_rank = blockIdx.x & (cluster - 1);
  constexpr int producer_warps = Traits::config.threads() / 32 - warps;  // each loads the codes of two consumer warps
  static_assert(warps == 2 * producer_warps);

  if (threadIdx.x == 0) {
    for (int s = 0; s < S; ++s) {
      full[s].init(1 + producer_warps * 32);
      empty[s].init(warps * (32 + cluster - 1));  // own lanes, and one lane of each peer warp
    }
    tile::fence_barrier_init();
  }
  __syncwarp();
  tile::arrive_at_cluster();

  if (warp >= warps) {
    cutlass::arch::warpgroup_reg_dealloc<Traits::producer_registers>();
    const bool loads_x = warp == warps && cute::elect_one_sync();
    const int first_consumer = 2 * (warp - warps);
    if (loads_x) tile::prefetch_tma_descriptor(params.x);
    W4TileScheduler<Traits> scheduler(params, cta_rank);
    W4WgmmaWorkTile work = scheduler.next();
    const auto loader_of = [&](const W4WgmmaWorkTile& of) {
      return CodeLoader<Traits::bits>(p, p.tile_row<warps>(of.n_block, first_consumer), of.first);
    };
    CodeLoader<Traits::bits> loader = loader_of(work);
    loader.prefetch(S);
    tile::wait_for_cluster();  // all CTAs of the cluster have initialised their barriers
    tile::wait_for_previous_kernel();
    const int x_rows = N / cluster;  // tokens that this CTA loads and multicasts
    std::uint8_t* const x_to = x_ring + cta_rank * x_rows * 128;
    const auto cta_mask = static_cast<std::uint16_t>((1 << cluster) - 1);
    int s = 0, phase = 1;
    for (;;) {
      const int first_row = work.token0 + cta_rank * x_rows, end = (work.first + work.steps) * w4_step_k;
#pragma unroll 1  // unrolled copies would take registers
      for (int k = work.first * w4_step_k; k < end; k += w4_step_k) {
        empty[s].wait(phase);  // consumers -> producer: this stage may be overwritten
        if (loads_x) {
          full[s].arrive_and_expect_tx(x_bytes);
          std::uint8_t* const to = x_to + s * x_bytes;
          if (cluster > 1) {
            tile::tma_load(to, params.x, k, first_row, full[s], cta_mask);
            tile::tma_load(to + half_step, params.x, k + 64, first_row, full[s], cta_mask);
          } else {
            tile::tma_load(to, params.x, k, first_row, full[s]);
            tile::tma_load(to + half_step, params.x, k + 64, first_row, full[s]);
          }
        }
        __syncwarp();
        loader.load(stages_w + (s * warps + first_consumer) * stage_bytes + lane * 16);
        full[s].arrive_on_cp_async();  // producer -> consumers: when this thread's copies have landed
        if (++s == S) s = 0, phase ^= 1;
      }
      if (!scheduler.has_next()) break;
      work = scheduler.next();
      loader = loader_of(work);
    }
    tile::let_next_kernel_start();
    // Stay alive until the peers' last multicast writes (which this CTA's consumers wait for) and arrivals have landed.
    for (int i = 0; i < S; ++i) {
      empty[s].wait(phase);
      if (++s == S) s = 0, phase ^= 1;
    }
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<Traits::consumer_registers>();
  tile::wait_for_cluster();  // all CTAs of the cluster have initialised their barriers
  tile::wait_for_previous_kernel();

  float acc[N / 2];  // (N / 8 mma tiles of 8 tokens, 4): rows g, g, g + 8, g + 8 x tokens 2t, 2t + 1, ...
  const bool half_scales = p.w.scale_dtype == DType::f16, integer = p.w.zeros == W4Zeros::integer,
             minima = Traits::rounded && Traits::bits == 4 && p.w.zeros == W4Zeros::minima;
  [[maybe_unused]] typename Decode::Zero zero = Decode::zero(zero_point, zero_point);
  [[maybe_unused]] float scale[2] = {};   // rows g, g + 8
  tile::FragmentA a[4][2];                // (k-blocks of a step, k-steps of 16): A operands of 16 rows x 16 k
  int s = S - 1, phase = 1;               // of the stage read last; before the first load: none
  const std::uint8_t* stage_w = nullptr;  // this warp's codes and scales in that stage
  uint4 rCodes[Traits::bits / 2];         // (fragment blocks of 2 tiles): this lane's 16 bytes of each
  // rounded: scales.r, minimums.r: (k-blocks of the step), each a pair (row g, row g + 8). ldmatrix.trans reads rows
  // that alternate between the two halves of a scale block, so that the 8 lanes of each address row get the same block.
  [[maybe_unused]] tile::FragmentA scales, minimums = {};
  [[maybe_unused]] const int scales_offset = qparams_offset + (lane / 8 >> p.scale_k_shift) * 32 + lane % 2 * 16;
  // Waits until the next stage is full, then loads its codes (and scales of rounded operands) into registers.
  const auto load_next_stage = [&] {
    if (++s == S) s = 0, phase ^= 1;
    full[s].wait(phase);
    stage_w = stages_w + (s * warps + warp) * stage_bytes;
#pragma unroll
    for (int f = 0; f < Traits::bits / 2; ++f)
      rCodes[f] = *reinterpret_cast<const uint4*>(stage_w + f * w4_fragment_bytes + lane * 16);
    if constexpr (Traits::rounded) {
      scales = tile::ldmatrix_x4_trans(stage_w + scales_offset);
      if (minima) minimums = tile::ldmatrix_x4_trans(stage_w + scales_offset + w4_qparam_bytes);
    }
  };
  const auto load_scales = [&] {
    scale[0] = load_scale(stage_w + qparams_offset, g, half_scales);
    scale[1] = load_scale(stage_w + qparams_offset, g + 8, half_scales);
  };
  // k-block `k_block` of the stage loaded last -> A operands.
  const auto dequant = [&](int k_block, tile::FragmentA(&to)[2]) {
    const std::uint8_t* const offsets = stage_w + qparams_offset + w4_qparam_bytes;
    if constexpr (Traits::rounded) {
      std::uint32_t zeros[2] = {zero_point, zero_point};
      if (minima) zeros[0] = zeros[1] = 0;
      if (integer)
        zeros[0] = offsets[(k_block >> p.scale_k_shift) * 16 + g],
        zeros[1] = offsets[(k_block >> p.scale_k_shift) * 16 + g + 8];
      tile::WeightDecode<T, Traits::bits, typename Traits::Scale>(scales.r[k_block], minimums.r[k_block], zeros)
          .decode(rCodes, k_block, to);
    } else {
      if (integer && k_block == 0) zero = Decode::zero(offsets[g], offsets[g + 8]);
      Decode::decode(rCodes, k_block, zero, to);
    }
  };

  constexpr int rows = warps * w4_tile_n, pitch = rows + 4, out_tokens = w4_epilogue_tokens(Traits::config);
  const auto sync_consumers = [] { asm volatile("bar.sync 1, %0;" ::"n"(warps * 32) : "memory"); };
  W4TileScheduler<Traits> scheduler(params, cta_rank);
  W4WgmmaWorkTile work = scheduler.next();
  load_next_stage();
#pragma unroll
  for (int k_block = 0; k_block < 4; ++k_block) dequant(k_block, a[k_block]);
  if constexpr (!Traits::rounded) load_scales();
  for (;;) {
    const bool last = !scheduler.has_next();
    if (scheduler.reads_fixup(work)) {  // only the last tile; exact operands need acc after the first step's MMAs
      const unsigned cta = scheduler.fixup_cta();
      if (lane == 0) tile::wait_semaphore(params.semaphores + cta, params.semaphore_value);
      __syncwarp();
      const auto* const from =
          reinterpret_cast<const float4*>(params.fixup_sums + std::int64_t{cta} * (rows * N)) + threadIdx.x;
#pragma unroll
      for (int i = 0; i < N / 2; i += 4) {
        const float4 four = __ldcg(from + i / 4 * (warps * 32));
        acc[i] = four.x, acc[i + 1] = four.y, acc[i + 2] = four.z, acc[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (float& x : acc) x = 0.0f;
    }
    for (int step = 0; step < work.steps; ++step) {
      const bool has_more = step + 1 < work.steps || !last;
      const int stage = s;
      const std::uint64_t x_desc = tile::make_smem_desc(x_ring + s * x_bytes);
      // All MMAs of the step in four batches, one a k-block. As each batch ends, its A registers take the next step's
      // codes.
      const auto mma_and_dequant = [&](float (&sum)[N / 2], bool add) {
        tile::warpgroup_fence_operand(sum);
        cute::warpgroup_arrive();
#pragma unroll
        for (int k_block = 0; k_block < 4; ++k_block) {
          const std::uint64_t desc = x_desc + (k_block / 2 * half_step + k_block % 2 * 64) / 16;
          tile::wgmma<T>(sum, a[k_block][0], desc, add || k_block > 0);
          tile::wgmma<T>(sum, a[k_block][1], desc + 2, true);
          cute::warpgroup_commit_batch();
        }
        if (has_more) {
          load_next_stage();
          cute::warpgroup_wait<3>();
          dequant(0, a[0]);
          cute::warpgroup_wait<2>();
          dequant(1, a[1]);
          cute::warpgroup_wait<1>();
          dequant(2, a[2]);
        }
      };
      if constexpr (Traits::rounded) {
        mma_and_dequant(acc, true);
        cute::warpgroup_wait<0>();
        tile::warpgroup_fence_operand(acc);
      } else {
        float sum[N / 2];                           // as acc: of this step
        const float now[2] = {scale[0], scale[1]};  // of this step; load_scales overwrites scale
        mma_and_dequant(sum, false);
        if (has_more) load_scales();
        cute::warpgroup_wait<0>();
        tile::warpgroup_fence_operand(sum);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) acc[i] = fmaf(now[i / 2 % 2], sum[i], acc[i]);
      }
      if (has_more) dequant(3, a[3]);
      empty[stage].arrive();  // consumer -> producer: this lane has read its codes and scales
      __syncwarp();           // all lanes have, and the wgmmas have read x: peers may multicast into it
      if (lane < cluster && lane != cta_rank) empty[stage].arrive_at_cta(lane);
    }

    if (last) tile::let_next_kernel_start();
    if (scheduler.writes_fixup(work)) {  // only the first tile, never the last one
      auto* const to =
          reinterpret_cast<float4*>(params.fixup_sums + std::int64_t{blockIdx.x} * (rows * N)) + threadIdx.x;
#pragma unroll
      for (int i = 0; i < N / 2; i += 4)
        __stcg(to + i / 4 * (warps * 32), make_float4(acc[i], acc[i + 1], acc[i + 2], acc[i + 3]));
      sync_consumers();
      if (threadIdx.x == 0) tile::release_semaphore(params.semaphores + blockIdx.x, params.semaphore_value);
    }
    // Epilogue: fp32 through shared memory, transposed to (tokens, rows of W), so that stores along N coalesce. A
    // thread takes four neighbouring rows of W, or four pairs of gate and up; a warp stores tokens_per_warp tokens at
    // once.
    static_assert(rows == 128);
    const int shift = p.gate_tiles > 0 && !p.partial ? 1 : 0, tokens_per_warp = 1 << shift;
    const int first_token = warp * tokens_per_warp + (shift ? lane / 16 : 0), column = (shift ? lane % 16 : lane) * 4;
    const std::int64_t n =
        std::int64_t{p.tile_row<warps>(work.n_block, column / w4_tile_n)} * w4_tile_n + column % w4_tile_n;
    const std::int64_t padded_n = std::int64_t{p.tile_rows} * w4_tile_n;
    const Epilogue<T> out(p, n);
#pragma unroll 1  // unrolled copies of the epilogue would not fit into the instruction cache
    for (int epilogue_tile = scheduler.writes_fixup(work) ? N / out_tokens : 0; epilogue_tile < N / out_tokens;
         ++epilogue_tile) {
      sync_consumers();  // all consumers have read the epilogue tile before
#pragma unroll
      for (int i = 0; i < out_tokens / 2; ++i) {
        float own = acc[i];
        if constexpr (out_tokens < N) own = epilogue_tile == 0 ? own : acc[out_tokens / 2 + i];
        out_tile[(i / 4 * 8 + 2 * t + i % 2) * pitch + warp * w4_tile_n + g + i / 2 % 2 * 8] =
            Traits::rounded ? own : own * Decode::unit;
      }
      sync_consumers();  // all consumers have written this epilogue tile
      const std::int64_t token0 = work.token0 + epilogue_tile * out_tokens;
      const int tokens = static_cast<int>(min(std::int64_t{out_tokens}, p.tokens - token0));
      const float* from = out_tile + first_token * pitch + column;
      if (p.partial) {
        if (n >= padded_n) continue;
        float* to = p.partial + (work.split * p.tokens + token0 + first_token) * padded_n + n;
        for (int token = first_token; token < tokens; token += warps * tokens_per_warp,
                 from += warps * tokens_per_warp * pitch, to += warps * tokens_per_warp * padded_n)
          *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
      } else {
        for (int token = first_token; token < tokens;
             token += warps * tokens_per_warp, from += warps * tokens_per_warp * pitch)
          out.store(p.first_token + token0 + token, *reinterpret_cast<const float4*>(from),
                    *reinterpret_cast<const float4*>(from + shift * (rows / 2)));
      }
    }
    if (last) break;
    work = scheduler.next();
  }
  // All warps have passed the semaphore; clear it, so that a graph replay with the same value waits again.
  if (scheduler.reads_fixup(work) && threadIdx.x == 0) params.semaphores[scheduler.fixup_cta()] = 0;
#endif
}

// The instance of a tile config: `config` indexes w4_wgmma_configs (or w8_wgmma_configs).
template <class T, int bits, class Scale>
W4WgmmaKernel w4a16_wgmma_kernel(int config) {
  switch (config) {
    case 0:
      return w4a16_wgmma<W4WgmmaTraits<T, bits, 0, Scale>>;
    case 1:
      return w4a16_wgmma<W4WgmmaTraits<T, bits, 1, Scale>>;
    default:
      return w4a16_wgmma<W4WgmmaTraits<T, bits, 2, Scale>>;
  }
}
template <class T, int bits>
W4WgmmaKernel w4a16_wgmma_kernel(int config, W4Operand operand) {
  switch (operand) {
    case W4Operand::codes:
      return w4a16_wgmma_kernel<T, bits, void>(config);
    case W4Operand::f16_scales:
      return w4a16_wgmma_kernel<T, bits, tile::half>(config);
    default:
      return w4a16_wgmma_kernel<T, bits, tile::bf16>(config);
  }
}

}  // namespace rooftile::gpu
