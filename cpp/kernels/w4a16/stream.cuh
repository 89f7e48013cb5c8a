// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 4 or 8 bits, on mma m16n8k16: for few tokens, and for any where
// tiles.cuh cannot run.
// Gated: the rows of W are [gate | up], y = activation(gate) * up + residual.
//   x [M, K]   y, residual [M, N or N / 2]   bias [N]   W in tiles of 16 n x 64 k (core/w4_layout.h)
//
// W is the register A operand, tokens are the mma's N: 8 of them a tile, so few tokens waste little. A CTA takes up to
// 64 tokens, 8 warps x one tile row of W (gated: four of gates, four of their ups) and one chunk of K. A step is two
// tiles: 16 n x 128 k.
//   codes, scales   global -> the warp's own ring in shared memory (cp.async, `stages` steps) -> registers; a lane
//                   reads the 16 bytes of a run that it copied itself, scales are the warp's
//   x               global -> shared memory as it lies, a panel of `panel_k` of K at a time and the next one behind it
//                   (cp.async) -> ldmatrix, which is the B fragment
// Codes become (u - zero) / unit in registers, exactly (zero = 8 or 128, z, or 0 with minima; unit a power of two). The
// sum over 64 k (32 where groups are smaller than 128) is finished in fp32:
//   total += scale * sum of (u - zero) / unit * x  [+ minimum * sum of x / unit],   times unit at the end
// so products of exactly representable data stay exact. The sum of x is one more product, with 1 / unit. Sums of a
// chunk go through shared memory to the threads that finish them; two chunks of K are a cluster, whose CTAs finish half
// of their rows each; of more chunks the sums go to the workspace, and `finish` adds them in order.
//
// Cost: N K (bits/8 + b/G) bytes of W, 2 M N K flop, some 150 instructions of a warp for 1 KB of codes (2 KB in 8 bits)
// up to 8 tokens: bandwidth is the roof if the loads run ahead, close to the issue slots; beyond 32 tokens mma.sync. x
// is read from L2 once a CTA.
// Sync: ring: a lane waits for its own copies, __syncwarp makes the others' scales visible and is also what allows a
// slot to be filled again. x: one __syncthreads a panel: it has come, and the one before it may be overwritten. Sums:
// all have read their codes, or all CTAs of the cluster run; then the sums have come.
#pragma once

#include "core/w4_layout.h"
#include "kernels/products/finish.cuh"
#include "kernels/w4a16/params.h"
#include "tile/copy.cuh"
#include "tile/grid.cuh"
#include "tile/mma.cuh"
#include "tile/w4.cuh"

namespace rooftile::gpu {

// small_groups: a step may hold several spans. minima take the same path.
template <class Element, int bits_, int form_, bool small_groups_, bool minima_>
struct W4Config {
  using T = Element;
  static constexpr int bits = bits_;
  static constexpr W4Form form = w4_form(bits, form_);
  static constexpr int token_tiles = form.token_tiles, stages = form.stages, panel_k = form.panel_k;
  static constexpr int panel_steps = panel_k / w4_step_k, pitch = w4_panel_pitch(form);
  static constexpr bool minima = minima_, small_groups = small_groups_ || minima_;
  static constexpr int ctas = minima && token_tiles == 8 ? 1 : 2;  // a multiprocessor: sums of x take 32 registers more
};

// ---- x ------------------------------------------------------------------------------------------

// Starts the copies of one panel: rows [token][panel_k], a row `pitch` bytes behind the one before it; 0 past the end
// of K.
template <class Cfg>
__device__ __forceinline__ void copy_panel(const W4MatmulParams& p, std::uint8_t* panel, std::int64_t token0,
                                           int tokens, std::int64_t k0) {
  using T = typename Cfg::T;
  const T* x = static_cast<const T*>(p.x.data);
  if (p.x_in_pieces) {
    constexpr int pieces = Cfg::panel_k / 8, tokens_at_once = w4_warps * 32 / pieces;
    const int first = threadIdx.x / pieces, piece = threadIdx.x % pieces;
    const bool inside = k0 + piece * 8 < p.w.k;
    const T* from = x + (token0 + first) * p.x_stride + (inside ? k0 + piece * 8 : 0);
    std::uint8_t* to = panel + first * Cfg::pitch + piece * 16;
    for (int token = first; token < tokens; token += tokens_at_once) {
      cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<cute::uint128_t>::copy(*reinterpret_cast<const cute::uint128_t*>(from),
                                                                   *reinterpret_cast<cute::uint128_t*>(to), inside);
      from += tokens_at_once * p.x_stride;
      to += tokens_at_once * Cfg::pitch;
    }
    return;
  }
  for (int i = threadIdx.x; i < tokens * Cfg::panel_k; i += w4_warps * 32) {
    const int token = i / Cfg::panel_k, at = i % Cfg::panel_k;
    T value = T(0.0f);
    if (k0 + at < p.w.k) {
      const std::int64_t column = p.w.perm ? p.w.perm[k0 + at] : k0 + at;
      const bool there = column >= 0 && column < p.w.k;  // a column order that leaves the row reads as NaN
      value = there ? x[p.x.offset(token0 + token) + column * p.x.last_stride] : tile::from_float<T>(NAN);
    }
    *reinterpret_cast<T*>(panel + token * Cfg::pitch + at * 2) = value;
  }
}

// ---- a warp's stream of codes -------------------------------------------------------------------

// A slot: two tiles of codes [runs][lane] 16 bytes, then scales and offsets of up to four groups, 32 bytes each
// (integer zeros 16). Every lane copies 16 bytes of each run of codes, and some of them 16 bytes of scales or offsets;
// `slot` below is the lane's own 16 bytes of a slot's first run. A warp copies for itself or for two others, whose
// slots are neighbours.
template <int bits, int rows = 1>
struct CodeStream {
  static constexpr int tile_bytes = w4_tile_bytes(bits), slot_bytes = w4_slot_bytes(bits);
  const std::uint8_t* codes;        // this lane's 16 bytes of the next step's first run
  const std::byte* side = nullptr;  // this lane's 16 bytes of scales or offsets of the next step; null: it copies none
  std::int64_t codes_apart = 0;     // from a row's codes to the second one's
  int side_at = 0, side_step = 0;   // from the lane's place in a slot; bytes a step
  int group_bytes;                  // of one group's scales or offsets
  int side_left, group_step;        // groups from those bytes on; groups a step
  int tiles_left;                   // of the row, from the next step on

  // first: the chunk's first step in K. row: none of W's gets row 0; of two the second is the one behind it, or again
  // this one.
  __device__ __forceinline__ CodeStream(const W4MatmulParams& p, int row, int first)
      : tiles_left(p.row_tiles - 2 * first) {
    if (row >= p.tile_rows) row = 0;
    const bool second = rows == 2 && row + 1 < p.tile_rows;
    const int lane = threadIdx.x % 32, in_step = 4 >> p.span_shift, piece = lane % 8;
    codes = p.w.codes + (std::int64_t{row} * p.row_tiles + 2 * first) * tile_bytes + lane * 16;
    if (second) codes_apart = std::int64_t{p.row_tiles} * tile_bytes;
    const bool offset = lane % 16 >= 8, bytes = offset && p.w.zeros == W4Zeros::integer;
    const int shift = bytes ? 0 : 1;  // log2 of the pieces of a group
    group_bytes = bytes ? 16 : 32;
    group_step = p.span < p.group && p.groups == 1 ? 0 : in_step;  // one group for all of K
    const int side_group = first * group_step + (piece >> shift);
    side_left = p.groups - side_group;
    side_step = group_step * group_bytes;
    side_at = lane / 16 * slot_bytes + 2 * tile_bytes + (offset ? w4_side_bytes : 0) + piece * 16 - lane * 16;
    if (lane >= 16 * rows || piece >= in_step << shift || (offset && p.w.zeros == W4Zeros::symmetric)) return;
    side = (offset ? p.w.offsets : p.w.scales) +
           (std::int64_t{row + (second && lane >= 16 ? 1 : 0)} * p.groups + side_group) * group_bytes +
           (piece & shift) * 16;
  }

  // Starts the codes and scales of the next `steps` steps on their way to L2; the kernel before may still be writing
  // them.
  __device__ __forceinline__ void prefetch(int steps) const {
    const int lane = threadIdx.x % 32;
    if (lane % 16 == 0 && lane < 16 * rows)
      tile::prefetch_l2_bulk(codes + lane / 16 * codes_apart - lane * 16, min(2 * steps, tiles_left) * tile_bytes);
    if (side && lane % 8 == 0) tile::prefetch_l2_bulk(side, min(max(steps * group_step, 1), side_left) * group_bytes);
  }

  // Starts the copies of the next step.
  __device__ __forceinline__ void fill(std::uint8_t* slot) {
#pragma unroll
    for (int row = 0; row < rows; ++row) {
      const std::uint8_t* const from = codes + row * codes_apart;
      std::uint8_t* const to = slot + row * slot_bytes;
#pragma unroll
      for (int at = 0; at < tile_bytes; at += w4_run_bytes) tile::cp_async_16(to + at, from + at);
      if (tiles_left > 1)
#pragma unroll
        for (int at = tile_bytes; at < 2 * tile_bytes; at += w4_run_bytes) tile::cp_async_16(to + at, from + at);
    }
    if constexpr (rows == 2) {  // 0 past the end of K
      if (side)
        cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<cute::uint128_t>::copy(
            *reinterpret_cast<const cute::uint128_t*>(side), *reinterpret_cast<cute::uint128_t*>(slot + side_at),
            side_left > 0);
    } else if (side && side_left > 0) {
      cute::SM80_CP_ASYNC_CACHEALWAYS<cute::uint128_t>::copy(*reinterpret_cast<const cute::uint128_t*>(side),
                                                             *reinterpret_cast<cute::uint128_t*>(slot + side_at));
    }
    codes += 2 * tile_bytes;
    side += side ? side_step : 0;
    side_left -= group_step;
    tiles_left -= 2;
  }
};

__device__ __forceinline__ float load_scale(const std::uint8_t* shared, int row, bool is_half) {
  const std::uint32_t bits = reinterpret_cast<const std::uint16_t*>(shared)[row];
  return is_half ? __half2float(__ushort_as_half(static_cast<unsigned short>(bits))) : __uint_as_float(bits << 16);
}

// ---- the kernel ---------------------------------------------------------------------------------

// What a block works on. The CTAs of a cluster have the chunks of K of the same rows and of all tokens; without
// clusters neighbouring CTAs share rows of W, then the chunk of x.
struct W4Place {
  std::int64_t local_token0;
  unsigned row_block, split;
  int row, tokens;  // row: this warp's tile row
};
template <int NT>
__device__ __forceinline__ W4Place w4_place(const W4MatmulParams& p, unsigned block) {
  W4Place at;
  unsigned token_block = 0;
  if (p.cluster_shift > 0) {
    at.split = block & ((1u << p.cluster_shift) - 1);
    at.row_block = block >> p.cluster_shift;
  } else {
    const unsigned rest = divide(block, p.by_token_blocks);
    token_block = block - rest * p.token_blocks;
    at.split = divide(rest, p.by_row_blocks);
    at.row_block = rest - at.split * p.row_blocks;
  }
  at.local_token0 = std::int64_t{token_block} * w4_tokens;
  at.row = p.tile_row<w4_warps>(at.row_block, threadIdx.x / 32);
  at.tokens = static_cast<int>(min(static_cast<std::int64_t>(8 * NT), p.tokens - at.local_token0));
  return at;
}

template <class Cfg>
__global__ void __launch_bounds__(w4_warps * 32, Cfg::ctas) w4a16_stream(const __grid_constant__ W4MatmulParams p) {
  using T = typename Cfg::T;
  using Decode = tile::CodeDecode<T, Cfg::bits>;
  constexpr int NT = Cfg::token_tiles, S = Cfg::stages, slot_bytes = w4_slot_bytes(Cfg::bits),
                middle = w4_middle(Cfg::bits);
  extern __shared__ __align__(128) std::uint8_t shared[];
  tile::let_next_kernel_start();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const W4Place place = w4_place<NT>(p, blockIdx.x);
  const int first = place.split * p.chunk_steps, steps = min(p.chunk_steps, p.steps - first);
  const bool works = place.row < p.tile_rows;  // the last CTA of rows may have warps without any

  std::uint8_t* const ring = shared + warp * (S * slot_bytes) + lane * 16;
  std::uint8_t* panel = shared + w4_warps * S * slot_bytes;
  const int panel_bytes = p.x_rows * Cfg::pitch;
  if (p.cluster_shift > 0) tile::arrive_at_cluster();
  CodeStream<Cfg::bits> codes(p, place.row, first);
  codes.prefetch(S - 1);
  tile::wait_for_previous_kernel();
  copy_panel<Cfg>(p, panel, p.first_token + place.local_token0, place.tokens, std::int64_t{first} * w4_step_k);
#pragma unroll
  for (int s = 0; s < S - 1; ++s) {
    if (s < steps) codes.fill(ring + s * slot_bytes);
    cute::cp_async_fence();
  }

  // Of a step, 4 quarters of 32 k: sums over `unit` of them are scaled at once.
  constexpr int unit = Cfg::small_groups ? 1 : 2;
  float total[NT][4] = {};  // of the chunk: rows g, g + 8 x tokens 2t, 2t + 1
  const bool half_scales = p.w.scale_dtype == DType::f16;
  typename Decode::Zero zero = Cfg::minima ? Decode::zero(0, 0) : Decode::zero(middle, middle);
  // where ldmatrix reads: token lane % 8 of a tile, k 8 (lane / 8) of 32. One tile of tokens holds only those that are
  // there: the other columns repeat the last.
  const int x_at = min(lane % 8, p.x_rows - 1) * Cfg::pitch + lane / 8 * 16;
  std::uint8_t* slot = ring + (S - 1) * slot_bytes;  // the one before the first

  for (int step = 0; step < steps;) {
    cute::cp_async_wait<S - 2>();
    __syncthreads();  // all threads' copies of this panel have come; all warps have read the one before it
    std::uint8_t* const next_panel =
        shared + w4_warps * S * slot_bytes + (panel == shared + w4_warps * S * slot_bytes ? panel_bytes : 0);
    const int panel_end = min(step + Cfg::panel_steps, steps);
    if (panel_end < steps)
      copy_panel<Cfg>(p, next_panel, p.first_token + place.local_token0, place.tokens,
                      std::int64_t{first + panel_end} * w4_step_k);

    for (const std::uint8_t* x = panel + x_at; step < panel_end; ++step, x += 2 * w4_step_k) {
      cute::cp_async_wait<S - 2>();
      __syncwarp();  // all lanes' copies of this slot have come; all lanes have read the slot before it
      std::uint8_t* const before = slot;
      slot = slot == ring + (S - 1) * slot_bytes ? ring : slot + slot_bytes;
      uint4 runs[Cfg::bits / 2];
#pragma unroll
      for (int run = 0; run < Cfg::bits / 2; ++run)
        runs[run] = *reinterpret_cast<const uint4*>(slot + run * w4_run_bytes);
      const std::uint8_t* const sides = slot - lane * 16 + 2 * w4_tile_bytes(Cfg::bits);
      if (step + S - 1 < steps) codes.fill(before);
      cute::cp_async_fence();

      [[maybe_unused]] const int left = p.k - (first + step) * w4_step_k;  // of K, from this step on
      float sum[NT][4] = {}, ones[Cfg::minima ? NT : 1][4] = {};           // ones: of x / unit, in every row
#pragma unroll
      for (int quarter = 0; quarter < 4; ++quarter) {
        const int group = Cfg::small_groups ? quarter >> p.span_shift : 0;
        if (p.w.zeros == W4Zeros::integer &&
            (Cfg::small_groups ? (quarter & ((1 << p.span_shift) - 1)) == 0 : quarter == 0)) {
          const std::uint8_t* const zeros = sides + w4_side_bytes + group * 16;
          zero = Decode::zero(zeros[g], zeros[g + 8]);
        }
        tile::FragmentA a[2];
        Decode::decode(runs, quarter, zero, a);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          const tile::FragmentA b = tile::ldmatrix_x4(x + quarter * 64 + nt * (8 * Cfg::pitch));
          tile::mma<T>(sum[nt], a[0], {{b.r[0], b.r[1]}});
          tile::mma<T>(sum[nt], a[1], {{b.r[2], b.r[3]}});
          if constexpr (Cfg::minima) {
            constexpr std::uint32_t one = Decode::one;
            tile::mma<T>(ones[nt], {{one, one, one, one}}, {{b.r[0], b.r[1]}});
            tile::mma<T>(ones[nt], {{one, one, one, one}}, {{b.r[2], b.r[3]}});
          }
        }
        if (quarter % unit != unit - 1) continue;

        const bool inside =
            !Cfg::small_groups || left > (group << p.span_shift) * 32;  // past K there are neither codes nor scales
        const auto load = [&](const std::uint8_t* side, int row) {
          return inside ? load_scale(side + group * 32, row, half_scales) : 0.0f;
        };
        const float scale[2] = {load(sides, g), load(sides, g + 8)};
        float minimum[2] = {};
        if constexpr (Cfg::minima)
          minimum[0] = load(sides + w4_side_bytes, g), minimum[1] = load(sides + w4_side_bytes, g + 8);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[nt][i] = fmaf(scale[i / 2], sum[nt][i], total[nt][i]);
            sum[nt][i] = 0.0f;
            if constexpr (Cfg::minima) {
              total[nt][i] = fmaf(minimum[i / 2], ones[nt][i], total[nt][i]);
              ones[nt][i] = 0.0f;
            }
          }
      }
    }
    panel = next_panel;
  }

  // Found again rather than kept in registers through the loop.
  unsigned block = blockIdx.x;
  asm volatile("" : "+r"(block));
  const W4Place end = w4_place<NT>(p, block);
  if (p.partial) {
    if (!works) return;
    const std::int64_t padded_n = std::int64_t{p.tile_rows} * w4_tile_n;
    float* to = p.partial + (end.split * p.tokens + end.local_token0 + 2 * t) * padded_n +
                std::int64_t{end.row} * w4_tile_n + g;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt, to += 8 * padded_n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (nt * 8 + 2 * t + i % 2 < end.tokens)
          to[i % 2 * padded_n + i / 2 * 8] = total[nt][i] * Decode::unit;  // the padding of N has room
    return;
  }

  // [chunk][a finisher's warps][token][rows]: to the CTA of the cluster that finishes them.
  const bool pairs = p.gate_tiles > 0;
  const int rank = static_cast<int>(end.split) & ((1 << p.cluster_shift) - 1),
            output = pairs ? warp % (w4_warps / 2) : warp;
  const W4Finisher mine = w4_finisher(pairs, p.cluster_shift);
  constexpr int pitch = w4_sums_pitch, of_warp = 8 * NT * pitch;
  float* const sums = reinterpret_cast<float*>(shared + p.sums_at);
  const int part = output % mine.outputs + (pairs && warp >= w4_warps / 2 ? mine.outputs : 0);
  float* to = sums + (rank * mine.warps + part) * of_warp + 2 * t * pitch + g;
  if (p.cluster_shift > 0) {
    tile::wait_for_cluster();  // all of its CTAs run
    to = tile::in_block(to, output / mine.outputs);
  } else {
    __syncthreads();  // all have read their codes, which lie here
  }
#pragma unroll
  for (int nt = 0; nt < NT; ++nt)
#pragma unroll
    for (int i = 0; i < 4; ++i) to[(nt * 8 + i % 2) * pitch + i / 2 * 8] = total[nt][i] * Decode::unit;
  if (p.cluster_shift > 0) {
    tile::sync_cluster();  // the sums have come
  } else {
    __syncthreads();
  }
  for (int item = threadIdx.x; item < mine.outputs * 8 * NT * 4; item += w4_warps * 32) {
    const int rows = item % 4 * 4, token = item / 4 % (8 * NT), at = item / (4 * 8 * NT);
    if (token >= end.tokens || rank * mine.outputs + at >= (pairs ? w4_warps / 2 : w4_warps)) continue;
    const auto sum_of = [&](int part) {
      float4 sum = {};
      for (int chunk = 0; chunk < 1 << p.cluster_shift; ++chunk) {
        const float4 x =
            *reinterpret_cast<const float4*>(sums + (chunk * mine.warps + part) * of_warp + token * pitch + rows);
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      }
      return sum;
    };
    const Outputs<T> out(
        p, std::int64_t{p.tile_row<w4_warps>(end.row_block, rank * mine.outputs + at)} * w4_tile_n + rows);
    out.store(p.first_token + end.local_token0 + token, sum_of(at), pairs ? sum_of(mine.outputs + at) : float4{});
  }
}

// The kernel of one form: the rows of the table are those of w4_form, how spans lie in a step, and whether there are
// minima.
template <class T, int bits, bool small_groups, bool minima>
W4Kernel w4a16_form(int form) {
  switch (form) {
    case 0:
      return w4a16_stream<W4Config<T, bits, 0, small_groups, minima>>;
    case 1:
      return w4a16_stream<W4Config<T, bits, 1, small_groups, minima>>;
    case 2:
      return w4a16_stream<W4Config<T, bits, 2, small_groups, minima>>;
    default:
      return w4a16_stream<W4Config<T, bits, 3, small_groups, minima>>;
  }
}
template <class T, int bits>
W4Kernel w4a16_kernel(int form, int span) {
  return span < w4_step_k ? w4a16_form<T, bits, true, false>(form) : w4a16_form<T, bits, false, false>(form);
}
template <class T>
W4Kernel w4a16_kernel(int form, int span, W4Zeros zeros) {
  return zeros == W4Zeros::minima ? w4a16_form<T, 4, true, true>(form) : w4a16_kernel<T, 4>(form, span);
}

}  // namespace rooftile::gpu
