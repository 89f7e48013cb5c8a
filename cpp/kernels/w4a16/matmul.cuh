// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 4 bits, on mma m16n8k16.
//   x [M, K]   y, residual [M, N]   bias [N]   W in tiles of 16 n x 64 k (core/w4_layout.h)
//
// W is the register A operand, tokens are the mma's N: 8 of them a tile, so few tokens waste little. A CTA takes up to 64
// tokens, 8 warps x row_tiles tile rows of W and one chunk of K:
//   codes, scales   global -> the warp's own ring in shared memory (cp.async) -> registers; a lane reads the 16 bytes of a
//                   tile that it copied itself, scales are the warp's
//   x               global -> shared memory, in the order of the B fragments, a panel of K at a time; and its sum over
//                   each span (32, 64 or 128 k, never more than a group), in fp32
// Codes enter the mma as they are, u times a power of two that belongs to the row. A span's sum of u x is finished in fp32:
//   total += scale * (sum of u x - zero * sum of x) + minimum * sum of x            zero = 8, z or 0
// so products of exactly representable data stay exact. Chunks of K leave fp32 sums in the workspace, which `finish` adds
// in order; with one chunk the CTA finishes alone.
//
// Cost: N K (1/2 + b/G) bytes of W, 2 M N K flop: bandwidth is the roof up to some 50 tokens, if the loads run ahead: a CTA
// has warps x stages x row_tiles x 512 B of codes on the way. Beyond, mma.sync is. x is read from L2 once a CTA.
// Sync: ring: a lane waits for its own copies, __syncwarp makes the others' scales visible and is also what allows a slot
// to be filled again. x: __syncthreads before a panel is overwritten and after it is filled.
#pragma once

#include "core/w4_layout.h"
#include "kernels/w4a16/params.h"
#include "tile/copy.cuh"
#include "tile/element.cuh"
#include "tile/w4.cuh"

namespace rooftile::gpu {

template <class Element, int form_, int min_ctas_>
struct W4Config {
  using T = Element;
  static constexpr W4Form form = w4_forms[form_];
  static constexpr int token_tiles = form.token_tiles, row_tiles = form.row_tiles, stages = form.stages, min_ctas = min_ctas_;
  static constexpr int slot = w4_slot_bytes(form), warp_ring = stages * slot, ring = w4_warps * warp_ring;
};

// ---- the end of a row -----------------------------------------------------------------------------------------------------

__device__ __forceinline__ float activate(Activation a, float x) {
  switch (a) {
    case Activation::none: return x;
    case Activation::silu: return x / (1.0f + expf(-x));
    case Activation::gelu_tanh: return x / (1.0f + expf(-1.5957691216057308f * x * fmaf(0.044715f * x, x, 1.0f)));
    case Activation::gelu_erf: return 0.5f * x * erfcf(-0.70710678118654752f * x);
  }
  return x;
}

// Adds bias, activation and residual to one output and stores it. `token` counts from the first of the call.
template <class T>
__device__ __forceinline__ void store_output(const W4MatmulParams& p, std::int64_t token, std::int64_t n, float sum) {
  if (p.bias) sum += tile::to_float(static_cast<const T*>(p.bias)[n * p.bias_stride]);
  sum = activate(p.activation, sum);
  if (p.residual.data) sum += tile::to_float(static_cast<const T*>(p.residual.data)[p.residual.offset(token) + n * p.residual.last_stride]);
  static_cast<T*>(p.y.data)[p.y.offset(token) + n * p.y.last_stride] = tile::from_float<T>(sum);
}

inline constexpr int w4_finish_threads = 256;

// Adds the chunks of K in order. A thread has one output.
template <class T>
__global__ void __launch_bounds__(w4_finish_threads) w4a16_finish(const __grid_constant__ W4MatmulParams p) {
  const std::int64_t index = static_cast<std::int64_t>(blockIdx.x) * w4_finish_threads + threadIdx.x;
  if (index >= p.tokens * p.w.n) return;
  const std::int64_t padded_n = w4_tiles_n(p.w.n) * w4_tile_n, token = index / p.w.n, n = index - token * p.w.n;
  const float* partial = p.partial + token * padded_n + n;
  float sum = 0;
#pragma unroll 4
  for (int split = 0; split < p.splits; ++split) sum += partial[split * p.tokens * padded_n];
  store_output<T>(p, p.first_token + token, n, sum);
}

// ---- x in the order of the B fragments ------------------------------------------------------------------------------------

// Elements k and k + 1 of a row of x; 0 past the end. A column order that leaves the row reads as NaN.
template <class T>
__device__ __forceinline__ std::uint32_t load_pair(const W4MatmulParams& p, const T* row, std::int64_t k) {
  if (k >= p.w.k) return 0;   // K is even
  if (p.x_in_pairs) return *reinterpret_cast<const std::uint32_t*>(row + k);
  std::uint32_t pair = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::int64_t column = p.w.perm ? p.w.perm[k + i] : k + i;
    const bool inside = column >= 0 && column < p.w.k;
    const std::uint32_t bits = inside ? reinterpret_cast<const std::uint16_t&>(row[column * p.x.last_stride]) : 0x7fffu;
    pair |= bits << (16 * i);
  }
  return pair;
}

// A panel of x: [half tile of 32 k][token][t = 0..3] of 16 bytes, lane 4 g + t's B fragments of two k-steps for token g; and
// its sums [span][token]. Tokens past the end are 0.
template <class T>
__device__ __forceinline__ void stage_panel(const W4MatmulParams& p, std::int64_t token0, int tokens, std::int64_t tile0, int tiles,
                                            uint4* panel, float* sums) {
  constexpr int batch = 4;   // loads on the way, in a lane: 4 of these
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = lane % 4;
  const int halves = 2 * tiles, octets = (halves + 7) / 8, jobs = octets * p.x_tokens, spans = p.span / 32;
  const T* x = static_cast<const T*>(p.x.data);
  for (int first = warp; first < jobs; first += w4_warps * batch) {
    std::uint32_t pairs[batch][4];
#pragma unroll
    for (int j = 0; j < batch; ++j) {
      const int job = first + j * w4_warps, token = job / octets, half = job % octets * 8 + lane / 4;
      const bool wanted = job < jobs && token < tokens && half < halves;
      const T* row = x + (wanted ? p.x.offset(token0 + token) : 0);
      const std::int64_t k = tile0 * w4_tile_k + half * 32 + 2 * t;
#pragma unroll
      for (int i = 0; i < 4; ++i) pairs[j][i] = wanted ? load_pair(p, row, k + 8 * i) : 0;
    }
#pragma unroll
    for (int j = 0; j < batch; ++j) {
      const int job = first + j * w4_warps, token = job / octets, half = job % octets * 8 + lane / 4;
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 x01 = tile::unpack<T>(pairs[j][i]);
        sum += x01.x + x01.y;
      }
      sum += __shfl_xor_sync(0xffffffffu, sum, 1);
      sum += __shfl_xor_sync(0xffffffffu, sum, 2);
      if (spans > 1) sum += __shfl_xor_sync(0xffffffffu, sum, 4);
      if (spans > 2) sum += __shfl_xor_sync(0xffffffffu, sum, 8);
      if (job >= jobs || half >= halves) continue;
      panel[(half * p.x_tokens + token) * 4 + t] = make_uint4(pairs[j][0], pairs[j][1], pairs[j][2], pairs[j][3]);
      if (t == 0 && half % spans == 0) sums[half / spans * p.x_tokens + token] = sum;
    }
  }
}

// ---- a warp's stream of codes ---------------------------------------------------------------------------------------------

// Slots of [row tile][lane] 16 bytes of codes, then [row tile][group of the tile, 0..1][scales, offsets] 32 bytes.
template <class Cfg>
struct CodeRing {
  std::uint8_t* slots;                // this warp's
  const std::uint8_t* codes;          // of tile 0 of the chunk, this lane's 16 bytes
  std::int64_t row_stride[Cfg::row_tiles];   // from the first row tile, in bytes; a row tile past the end reads the last
  const std::byte* side = nullptr;    // this lane's 16 bytes of scales or offsets of group 0; null: it copies none
  int side_at = 0, side_step = 0;     // where in a slot; bytes a group
  int side_half = 0;                  // which group of a tile
  int groups, up = 0, down = 0;       // tile t of a row starts in group t << up >> down
  std::uint64_t policy;

  __device__ __forceinline__ CodeRing(const W4MatmulParams& p, std::uint8_t* ring, std::int64_t first_row, int first_tile)
      : slots(ring), groups(p.groups), policy(tile::evict_first()) {
    const int lane = threadIdx.x % 32;
    const std::int64_t last_row = w4_tiles_n(p.w.n) - 1, tiles_k = w4_tiles_k(p.w.k);
    codes = p.w.codes + (first_row * tiles_k + first_tile) * w4_tile_bytes + lane * 16;
#pragma unroll
    for (int r = 0; r < Cfg::row_tiles; ++r)
      row_stride[r] = (min(first_row + r, last_row) - first_row) * tiles_k * w4_tile_bytes;
    // eight lanes a row tile: (group of the tile, scales or offsets, half of the 32 bytes)
    const int r = lane / 8, half = lane / 4 % 2, offset = lane / 2 % 2, piece = lane % 2;
    up = p.span == 32;
    down = p.span == 128 ? (p.groups == 1 ? 31 : 1) : 0;   // one group for all of K: 0
    if (r >= Cfg::row_tiles || (half == 1 && !up)) return;
    if (offset && p.w.zeros == W4Zeros::symmetric) return;
    const bool bytes = offset && p.w.zeros == W4Zeros::integer;
    if (bytes && piece == 1) return;
    side_step = bytes ? 16 : 32;
    side_half = half;
    side_at = Cfg::row_tiles * w4_tile_bytes + (r * 2 + half) * 64 + offset * 32 + piece * 16;
    side = (offset ? p.w.offsets : p.w.scales) + min(first_row + r, last_row) * groups * side_step + piece * 16;
  }

  // Starts the copies of tile `tile` of the chunk, whose first tile is `first_tile` of the row.
  __device__ __forceinline__ void fill(int slot, int tile, int first_tile) const {
    std::uint8_t* to = slots + slot * Cfg::slot;
#pragma unroll
    for (int r = 0; r < Cfg::row_tiles; ++r)
      tile::cp_async_16(to + r * w4_tile_bytes + threadIdx.x % 32 * 16, codes + row_stride[r] + static_cast<std::int64_t>(tile) * w4_tile_bytes, policy);
    const int group = ((first_tile + tile) << up >> down) + side_half;
    if (side && group < groups)
      cute::SM80_CP_ASYNC_CACHEALWAYS<cute::uint128_t>::copy(*reinterpret_cast<const cute::uint128_t*>(side + group * side_step),
                                                             *reinterpret_cast<cute::uint128_t*>(to + side_at));
  }
};

__device__ __forceinline__ float load_scale(const std::uint8_t* shared, int row, bool is_half) {
  const std::uint32_t bits = reinterpret_cast<const std::uint16_t*>(shared)[row];
  return is_half ? __half2float(__ushort_as_half(static_cast<unsigned short>(bits))) : __uint_as_float(bits << 16);
}

// ---- the kernel -----------------------------------------------------------------------------------------------------------

template <class Cfg>
__global__ void __launch_bounds__(w4_warps * 32, Cfg::min_ctas) w4a16_stream(const __grid_constant__ W4MatmulParams p) {
  using T = typename Cfg::T;
  using Mma = tile::W4Mma<T>;
  constexpr int NT = Cfg::token_tiles, R = Cfg::row_tiles, S = Cfg::stages;
  extern __shared__ __align__(16) std::uint8_t shared[];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  // neighbouring CTAs share rows of W, then the chunk of x
  const std::int64_t token_block = blockIdx.x % p.token_blocks, rest = blockIdx.x / p.token_blocks;
  const std::int64_t row_block = rest % p.row_blocks;
  const int split = static_cast<int>(rest / p.row_blocks);
  const std::int64_t local_token0 = token_block * w4_tokens, token0 = p.first_token + local_token0;
  const int tokens = static_cast<int>(min(static_cast<std::int64_t>(8 * NT), p.tokens - local_token0));
  const int first_tile = split * p.chunk_tiles;
  const int tiles = min(p.chunk_tiles, static_cast<int>(w4_tiles_k(p.w.k)) - first_tile);
  const std::int64_t first_row = (row_block * w4_warps + warp) * R;
  const bool works = first_row < w4_tiles_n(p.w.n);   // the last CTA of rows may have warps without any

  std::uint8_t* ring = shared + warp * Cfg::warp_ring;
  uint4* panel = reinterpret_cast<uint4*>(shared + Cfg::ring);
  float* sums = reinterpret_cast<float*>(panel + p.panel_tiles * 2 * p.x_tokens * 4);
  const CodeRing<Cfg> codes(p, ring, works ? first_row : 0, first_tile);
#pragma unroll
  for (int s = 0; s < S - 1; ++s) {
    if (works && s < tiles) codes.fill(s, s, first_tile);
    cute::cp_async_fence();
  }

  float acc[R][NT][4] = {}, total[R][NT][4] = {};   // of the span, of the chunk: rows g, g + 8 x tokens 2t, 2t + 1
  const bool half_scales = p.w.scale_dtype == DType::f16, minima = p.w.zeros == W4Zeros::minima;
  // with one token tile x holds only the tokens that are there: the other columns repeat the last
  const int x_token = NT == 1 ? min(g, tokens - 1) : g;
  const int sum_token0 = NT == 1 ? min(2 * t, tokens - 1) : 2 * t, sum_token1 = NT == 1 ? min(2 * t + 1, tokens - 1) : 2 * t + 1;

  int slot = 0;
  for (int panel0 = 0; panel0 < tiles; panel0 += p.panel_tiles) {
    const int panel_end = min(panel0 + p.panel_tiles, tiles);
    if (panel0 > 0) __syncthreads();   // every warp -> the next panel: its last read of this one is done
    stage_panel<T>(p, token0, tokens, first_tile + panel0, panel_end - panel0, panel, sums);
    __syncthreads();                   // every warp's part of the panel and the sums -> all
    if (!works) continue;

    const uint4* x = panel + x_token * 4 + t;
    for (int tile = panel0; tile < panel_end; ++tile) {
      cute::cp_async_wait<S - 2>();
      __syncwarp();   // all lanes' copies of this slot have arrived; all lanes have read the slot before it
      if (tile + S - 1 < tiles) codes.fill(slot == 0 ? S - 1 : slot - 1, tile + S - 1, first_tile);
      cute::cp_async_fence();

      const std::uint8_t* here = ring + slot * Cfg::slot;
      slot = slot + 1 == S ? 0 : slot + 1;
      uint4 words[R];
#pragma unroll
      for (int r = 0; r < R; ++r) words[r] = *reinterpret_cast<const uint4*>(here + r * w4_tile_bytes + lane * 16);

#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t a[R][2][4];
#pragma unroll
        for (int r = 0; r < R; ++r) {
          Mma::decode(half == 0 ? words[r].x : words[r].z, a[r][0]);
          Mma::decode(half == 0 ? words[r].y : words[r].w, a[r][1]);
        }
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          const uint4 b = x[half * p.x_tokens * 4 + nt * 32];
#pragma unroll
          for (int r = 0; r < R; ++r) Mma::mma(acc[r][nt], a[r][0], b.x, b.y);
#pragma unroll
          for (int r = 0; r < R; ++r) Mma::mma(acc[r][nt], a[r][1], b.z, b.w);
        }

        // The end of a span: its sums are scaled and added to the chunk's.
        // (in halves of a tile; where that is a group, the last may be padding, which has no scale)
        const int last = 2 * tile + half, spans = p.span / 32;
        if ((last & (spans - 1)) != spans - 1 && last + 1 != 2 * tiles) continue;
        if (p.span == 32 && 2 * first_tile + last >= p.groups) continue;
        const int span_at = (last - 2 * panel0) >> (spans >> 1);
        const float* sum = sums + span_at * p.x_tokens;
        const std::uint8_t* side = here + R * w4_tile_bytes + (p.span == 32 ? half * 64 : 0);
#pragma unroll
        for (int r = 0; r < R; ++r) {
          float scale[2], zero[2] = {8.0f, 8.0f}, minimum[2] = {};
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int row = g + 8 * h;
            const std::uint8_t* group = side + r * 128;
            scale[h] = load_scale(group, row, half_scales);
            if (p.w.zeros == W4Zeros::integer) zero[h] = group[32 + row];
            if (minima) {
              zero[h] = 0.0f;
              minimum[h] = load_scale(group + 32, row, half_scales);
            }
          }
#pragma unroll
          for (int nt = 0; nt < NT; ++nt) {
            const float x_sum[2] = {sum[nt * 8 + sum_token0], sum[nt * 8 + sum_token1]};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float u = acc[r][nt][i] * (i < 2 ? Mma::undo_low : Mma::undo_high);
              total[r][nt][i] = fmaf(scale[i / 2], fmaf(-zero[i / 2], x_sum[i % 2], u), total[r][nt][i]);
              if (minima) total[r][nt][i] = fmaf(minimum[i / 2], x_sum[i % 2], total[r][nt][i]);
              acc[r][nt][i] = 0.0f;
            }
          }
        }
      }
      x += 2 * p.x_tokens * 4;
    }
  }
  if (!works) return;

  const std::int64_t padded_n = w4_tiles_n(p.w.n) * w4_tile_n;
#pragma unroll
  for (int r = 0; r < R; ++r)
#pragma unroll
    for (int nt = 0; nt < NT; ++nt)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const std::int64_t n = (first_row + r) * w4_tile_n + g + i / 2 * 8;
        const int token = nt * 8 + 2 * t + i % 2;
        if (token >= tokens || n >= p.w.n) continue;
        if (p.splits > 1) {
          p.partial[(split * p.tokens + local_token0 + token) * padded_n + n] = total[r][nt][i];
        } else {
          store_output<T>(p, token0 + token, n, total[r][nt][i]);
        }
      }
}

}  // namespace rooftile::gpu
