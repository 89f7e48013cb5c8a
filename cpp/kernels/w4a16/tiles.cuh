// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 4 or 8 bits, on Hopper's wgmma: for more tokens than stream.cuh is fast for.
//   x [M, K]   y, residual [M, N]   bias [N]   W in tiles of 16 n x 64 k (core/w4_layout.h)
//
// W is the register A operand, tokens are wgmma's N. A CTA takes 128 rows of W, `tokens` tokens and one chunk of K: two groups of
// four warps multiply, a warp one tile row of W; one thread of a third group brings x. A step is 128 k.
//   codes, scales   as in stream.cuh: each warp's own ring (cp.async)
//   x               global -> a ring of all warps, by the copy engine, swizzled; the CTAs of a cluster have other rows of W and
//                   the same tokens: each brings a part of the tokens to all of them
//   sums of x       with minima only: over every span, from the workspace (prepare.cuh), a step's behind its x
// Codes become (u - zero) / unit in registers, 32 k at a time as the tensor cores are done with the registers, while they work on
// the rest of the step before. The sum over a span (32, 64 or 128 k, never more than a group) is finished in fp32, as in stream.cuh:
//   total += scale * sum of (u - zero) / unit * x  [+ minimum * sum of x / unit],   times unit at the end
// What minima add is added while the tensor cores work on the span.
//
// Cost of a step, 128 tokens: 4 Mflop, 1024 cycles of the tensor cores; 8 KB of codes, 32 KB of x of which the CTA brings
// 32 / cluster. A warp decodes in 90 issue slots and scales in 70; while one group does what cannot overlap with its own product
// the other one's runs. Tensor cores are the roof from 128 tokens on, the bytes of W below.
// Sync: x: `full` (its bytes have come) and `free` (all warps of the cluster have read it), barriers in shared memory; ring: as in
// stream.cuh; the output's tile, which takes the place of x: a barrier of the warps that multiply; a CTA ends when all of its
// cluster have read and been read.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include "kernels/w4a16/stream.cuh"
#include "tile/tensor_copy.cuh"
#include "tile/wgmma.cuh"

namespace rooftile::gpu {

// span: k that are scaled at once.
template <class Element, int bits_, int form_, int span_, bool minima_>
struct W4TilesConfig {
  using T = Element;
  static constexpr int bits = bits_;
  static constexpr W4TilesForm form = w4_tiles_form(bits, form_);
  static constexpr int tokens = form.tokens, warps = form.warps(), x_stages = form.x_stages, stages = form.stages, ctas = form.ctas, span = span_;
  static constexpr bool minima = minima_;
  static constexpr int registers = ctas == 1 ? 240 : 104;   // of the threads that multiply
  static constexpr int step_sums = minima ? w4_step_k / span * tokens : 0;   // of x: [span][token]
};

template <class Cfg>
__global__ void __launch_bounds__(Cfg::form.threads(), Cfg::ctas) w4a16_tiles([[maybe_unused]] const __grid_constant__ W4TilesParams params) {
#ifdef ROOFTILE_WGMMA
  using T = typename Cfg::T;
  using Decode = tile::CodeDecode<T, Cfg::bits>;
  constexpr int N = Cfg::tokens, warps = Cfg::warps, S = Cfg::stages, X = Cfg::x_stages, half_step = N * 128, x_bytes = 2 * half_step;
  constexpr int slot_bytes = w4_slot_bytes(Cfg::bits), sides_at = 2 * w4_tile_bytes(Cfg::bits), middle = w4_middle(Cfg::bits);
  const W4MatmulParams& p = params.product;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  std::uint8_t* const x_ring = shared;
  std::uint8_t* const rings = shared + X * x_bytes;
  float* const sums_ring = reinterpret_cast<float*>(rings + warps * S * slot_bytes);
  tile::Barrier* const full = reinterpret_cast<tile::Barrier*>(sums_ring + X * Cfg::step_sums);
  tile::Barrier* const free = full + X;

  const int warp = cutlass::canonical_warp_idx_sync(), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int cluster = 1 << p.cluster_shift, rank = blockIdx.x & (cluster - 1);
  // Neighbours have other tokens, of token_group blocks, whose x stays in L2 while all rows of W pass by.
  const unsigned row_groups = p.row_blocks >> p.cluster_shift, all = row_groups * p.token_blocks;
  unsigned at = blockIdx.x >> p.cluster_shift;
  const unsigned split = p.splits > 1 ? at / all : 0;
  at -= split * all;
  const unsigned group = at / (row_groups * params.token_group), width = min(params.token_group, p.token_blocks - group * params.token_group);
  at -= group * row_groups * params.token_group;
  const unsigned row_group = at / width;
  const unsigned row_block = row_group * cluster + rank;
  const std::int64_t row = p.tile_row<warps>(row_block, warp);
  const int token0 = static_cast<int>(group * params.token_group + at - row_group * width) * N;   // of this launch
  const int first = split * p.chunk_steps, steps = min(p.chunk_steps, p.steps - first);

  if (threadIdx.x == 0) {
    for (int s = 0; s < X; ++s) {
      full[s].init(1);
      free[s].init(warps * cluster);
    }
    tile::publish_barriers();
  }
  __syncwarp();
  tile::arrive_at_cluster();

  if (warp >= warps) {   // one thread brings x
    cutlass::arch::warpgroup_reg_dealloc<24>();
    if (warp == warps && cute::elect_one_sync()) tile::prefetch_map(params.x);
    tile::wait_for_cluster();   // the barriers are there
    if (warp == warps && cute::elect_one_sync()) {
      tile::wait_for_previous_kernel();
      const int part = N / cluster, first_row = token0 + rank * part;
      std::uint8_t* const x_part = x_ring + rank * part * 128;
      const auto all = static_cast<std::uint16_t>((1 << cluster) - 1);
      [[maybe_unused]] const float* sums = params.sums + (std::int64_t{token0 / N} * p.steps + first) * Cfg::step_sums;
#pragma unroll 1   // copies of it would take registers
      for (int step = 0, s = 0, parity = 1, k = first * w4_step_k; step < steps; ++step, k += w4_step_k) {
        free[s].wait(parity);
        full[s].arrive_and_expect(x_bytes + Cfg::step_sums * 4);
        std::uint8_t* const to = x_part + s * x_bytes;
        if (cluster > 1) {
          tile::copy_box(to, params.x, k, first_row, full[s], all);
          tile::copy_box(to + half_step, params.x, k + 64, first_row, full[s], all);
        } else {
          tile::copy_box(to, params.x, k, first_row, full[s]);
          tile::copy_box(to + half_step, params.x, k + 64, first_row, full[s]);
        }
        if constexpr (Cfg::minima) {
          tile::copy_bytes(sums_ring + s * Cfg::step_sums, sums, Cfg::step_sums * 4, full[s]);
          sums += Cfg::step_sums;
        }
        if (++s == X) s = 0, parity ^= 1;
      }
    }
    __syncwarp();
    tile::let_next_kernel_start();
    tile::arrive_at_cluster();
    tile::wait_for_cluster();   // nobody copies into, or arrives at, a CTA that has ended
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<Cfg::registers>();

  std::uint8_t* const ring = rings + warp * (S * slot_bytes);
  CodeStream<Cfg::bits> codes(p, row < w4_tiles_n(p.w.n) ? row : 0, first);   // the last CTAs may have warps without rows
  codes.prefetch(S - 1);
  tile::wait_for_cluster();   // the barriers are there
  tile::wait_for_previous_kernel();
#pragma unroll
  for (int s = 0; s < S - 1; ++s) {
    if (s < steps) codes.fill(ring + s * slot_bytes + lane * 16);
    cute::cp_async_fence();
  }

  float sum[N / 2], total[N / 2];   // of the span, of the chunk
#pragma unroll
  for (float& x : total) x = 0.0f;
  const bool half_scales = p.w.scale_dtype == DType::f16, integer = !Cfg::minima && p.w.zeros == W4Zeros::integer;
  constexpr int span_quarters = Cfg::span / 32;
  typename Decode::Zero zero = Cfg::minima ? Decode::zero(0, 0) : Decode::zero(middle, middle);
  float scale[2] = {};
  tile::FragmentA a[4][2];   // of a step: 32 k each
  std::uint8_t* slot = ring + (S - 1) * slot_bytes;   // the one before the first
  uint4 runs[Cfg::bits / 2];   // of the step: two tiles
  // The codes of step `step` have come; the ring's next copies start. Then `slot` is its.
  const auto take_step = [&](int step) {
    cute::cp_async_wait<S - 2>();
    __syncwarp();   // all lanes' copies of this slot have come; all lanes have read the slot before it
    std::uint8_t* const before = slot;
    slot = slot == ring + (S - 1) * slot_bytes ? ring : slot + slot_bytes;
    if (step + S - 1 < steps) codes.fill(before + lane * 16);
    cute::cp_async_fence();
#pragma unroll
    for (int run = 0; run < Cfg::bits / 2; ++run) runs[run] = *reinterpret_cast<const uint4*>(slot + run * w4_run_bytes + lane * 16);
  };
  const auto decode = [&](int quarter, tile::FragmentA (&to)[2]) {
    if (integer && quarter % span_quarters == 0) {
      const std::uint8_t* const zeros = slot + sides_at + w4_side_bytes + quarter / span_quarters * 16;
      zero = Decode::zero(zeros[g], zeros[g + 8]);
    }
    Decode::decode(runs, quarter, zero, to);
  };
  const auto load_scales = [&](int quarter) {
    const std::uint8_t* const group = slot + sides_at + quarter / span_quarters * 32;
    scale[0] = load_scale(group, g, half_scales);
    scale[1] = load_scale(group, g + 8, half_scales);
  };

  take_step(0);
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) decode(quarter, a[quarter]);
  int s = 0, parity = 0;   // of x
  for (int step = 0; step < steps; ++step) {
    [[maybe_unused]] const int left = p.k - (first + step) * w4_step_k;   // of K, from this step on
    const auto past_k = [&](int quarter) { return Cfg::span < w4_step_k && left <= quarter / span_quarters * Cfg::span; };   // there are no scales
    full[s].wait(parity);
    const std::uint64_t x = tile::swizzled_operand(x_ring + s * x_bytes);
    const auto multiply = [&](int quarter) {
      const std::uint64_t here = x + (quarter / 2 * half_step + quarter % 2 * 64) / 16;
      tile::wgmma<T>(sum, a[quarter][0], here, quarter % span_quarters != 0);
      tile::wgmma<T>(sum, a[quarter][1], here + 2, true);
      tile::end_wgmma_batch();
    };
    const auto add_minima = [&](int quarter) {
      if (!Cfg::minima || past_k(quarter)) return;
      const std::uint8_t* const group = slot + sides_at + w4_side_bytes + quarter / span_quarters * 32;
      const float minimum[2] = {load_scale(group, g, half_scales), load_scale(group, g + 8, half_scales)};
      const float* const sums = sums_ring + s * Cfg::step_sums + quarter / span_quarters * N + 2 * t;
#pragma unroll
      for (int i = 0; i < N / 2; i += 4) {
        const float2 two = *reinterpret_cast<const float2*>(sums + 2 * i);
#pragma unroll
        for (int j = 0; j < 4; ++j) total[i + j] = fmaf(minimum[j / 2], j % 2 == 0 ? two.x : two.y, total[i + j]);
      }
    };
    // The span that ends with `quarter` has ended on the tensor cores: its sum is scaled and added.
    const auto finish_span = [&](int quarter) {
      load_scales(quarter);
      add_minima(quarter);
      tile::wait_for_wgmma<0>();
      tile::pin(sum);
      if (past_k(quarter)) return;
#pragma unroll
      for (int i = 0; i < N / 2; ++i) total[i] = fmaf(scale[i / 2 % 2], sum[i], total[i]);
    };
    tile::pin(sum);
    tile::begin_wgmma();
    if constexpr (span_quarters == 4) {
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) multiply(quarter);
      load_scales(3);
      add_minima(3);
      if (step + 1 < steps) {   // registers are free again one batch after another
        take_step(step + 1);
        tile::wait_for_wgmma<3>();
        decode(0, a[0]);
        tile::wait_for_wgmma<2>();
        decode(1, a[1]);
        tile::wait_for_wgmma<1>();
        decode(2, a[2]);
      }
      tile::wait_for_wgmma<0>();
      tile::pin(sum);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) total[i] = fmaf(scale[i / 2 % 2], sum[i], total[i]);
      if (step + 1 < steps) decode(3, a[3]);
    } else {
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        if (quarter > 0 && quarter % span_quarters == 0) {
          tile::pin(sum);
          tile::begin_wgmma();
        }
        multiply(quarter);
        if ((quarter + 1) % span_quarters == 0) finish_span(quarter);
      }
      if (step + 1 < steps) {
        take_step(step + 1);
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) decode(quarter, a[quarter]);
      }
    }
    if constexpr (Cfg::minima) __syncwarp();   // all lanes have read the sums
    if (lane < cluster) free[s].arrive_in_block(lane);
    if (++s == X) s = 0, parity ^= 1;
  }

  // fp32 through shared memory: rows of tokens, so that neighbours of N are stored together. All copies have come and been read.
  constexpr int rows = warps * w4_tile_n, pitch = rows + 4;
  float* const tile_out = reinterpret_cast<float*>(x_ring);
  static_assert(N * pitch * 4 <= X * x_bytes);
  const auto sync_readers = [] { asm volatile("bar.sync 1, %0;" ::"n"(warps * 32) : "memory"); };
  tile::let_next_kernel_start();
  __syncwarp();
  tile::arrive_at_cluster();
  sync_readers();
#pragma unroll
  for (int i = 0; i < N / 2; ++i) tile_out[(i / 4 * 8 + 2 * t + i % 2) * pitch + warp * w4_tile_n + g + i / 2 % 2 * 8] = total[i] * Decode::unit;
  sync_readers();
  // A thread has four neighbouring rows of W, or of a pair of gates and ups; a warp stores 1 << shift tokens at once.
  static_assert(rows == 128);
  const int shift = p.gate_tiles > 0 && !p.partial ? 1 : 0, at_once = 1 << shift;
  const int first_token = warp * at_once + (shift ? lane / 16 : 0), column = (shift ? lane % 16 : lane) * 4;
  const int tokens = static_cast<int>(min(std::int64_t{N}, p.tokens - token0));
  const std::int64_t n = p.tile_row<warps>(row_block, column / w4_tile_n) * w4_tile_n + column % w4_tile_n, padded_n = w4_tiles_n(p.w.n) * w4_tile_n;
  const float* from = tile_out + first_token * pitch + column;
  if (p.partial) {
    if (n < padded_n) {
      float* to = p.partial + (split * p.tokens + token0 + first_token) * padded_n + n;
      for (int token = first_token; token < tokens; token += warps * at_once, from += warps * at_once * pitch, to += warps * at_once * padded_n)
        *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
    }
  } else {
    const Outputs<T> out(p, n);
    for (int token = first_token; token < tokens; token += warps * at_once, from += warps * at_once * pitch)
      out.store(p.first_token + token0 + token, *reinterpret_cast<const float4*>(from), *reinterpret_cast<const float4*>(from + shift * (rows / 2)));
  }
  tile::wait_for_cluster();   // nobody copies into, or arrives at, a CTA that has ended
#endif
}

template <class T, int bits, int span, bool minima>
W4TilesKernel w4a16_tiles_form(int form) {
  switch (form) {
    case 0: return w4a16_tiles<W4TilesConfig<T, bits, 0, span, minima>>;
    case 1: return w4a16_tiles<W4TilesConfig<T, bits, 1, span, minima>>;
    default: return w4a16_tiles<W4TilesConfig<T, bits, 2, span, minima>>;
  }
}
template <class T, int bits, bool minima = false>
W4TilesKernel w4a16_tiles_kernel(int form, int span) {
  return span == 32   ? w4a16_tiles_form<T, bits, 32, minima>(form)
         : span == 64 ? w4a16_tiles_form<T, bits, 64, minima>(form)
                      : w4a16_tiles_form<T, bits, 128, minima>(form);
}
template <class T>
W4TilesKernel w4a16_tiles_kernel(int form, int span, W4Zeros zeros) {
  return zeros == W4Zeros::minima ? w4a16_tiles_kernel<T, 4, true>(form, span) : w4a16_tiles_kernel<T, 4>(form, span);
}

}  // namespace rooftile::gpu
