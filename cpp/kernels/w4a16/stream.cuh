// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 4 or 8 bits, on mma m16n8k16: the weight-streaming kernel for few
// tokens, and the only kernel of a GPU without wgmma.
// Gated: the rows of W are [gate | up], y = activation(gate) * up + residual.
//   x [M, K]   y, residual [M, N or N / 2]   bias [N]   W in tiles of 16 n x 64 k (core/w4_layout.h)
//
// W is the register A operand, tokens are the mma's N: 8 tokens an mma tile, so few tokens waste little. A CTA takes a
// work tile of up to 64 tokens x 8 tile rows of W (one a warp; gated: four of gate, four of up) x one K split. A step
// of the main loop is two tiles of W: 16 n x 128 k a warp.
//   codes, scales   global -> the warp's own ring in shared memory (cp.async, `stages` steps) -> registers. A lane
//                   reads back the 16 bytes of a fragment block that it copied itself; lanes share the warp's scales.
//   x               global -> shared memory in x's own order, double-buffered tiles of `x_tile_k` k (cp.async)
//                   -> ldmatrix, which gives the B fragments
// Codes become (u - zero) / unit in registers, exactly: zero = 8 or 128 (symmetric), the zero point (integer) or 0
// (minima); unit is a power of two. The sum over 64 k (32 k where groups are smaller than 128) is scaled in fp32:
//   acc += scale * sum of (u - zero) / unit * x  [+ minimum * sum of x / unit],   times unit in the epilogue
// so products of exactly representable data stay exact. The sum of x is one more mma, with A = 1 / unit. The warps'
// accumulators go through shared memory to the threads of the epilogue. Two K splits of up to 16 tokens are a cluster,
// each of whose CTAs reduces half of the rows. More K splits write partial sums to the workspace, which a second kernel
// (products/) reduces in order.
//
// Cost: N K (bits/8 + b/G) bytes of W, 2 M N K flop, some 150 instructions of a warp for 1 KB of codes (2 KB in 8 bits)
// up to 8 tokens. Bandwidth is the roof if the loads run ahead, with the issue slots close behind; beyond 32 tokens the
// rate of mma.sync is. Every CTA reads x from L2 once.
// Sync: ring: a lane waits for its own cp.async groups; __syncwarp makes the other lanes' scales visible, and after it
// the stage read before may be overwritten. x: one __syncthreads a tile: all threads' copies of this tile have landed,
// and all warps have read the tile before, whose buffer the next copies overwrite. Epilogue: without a cluster the
// sums overlay the ring, so all warps meet before they write; with one the sums lie behind the ring, and a CTA writes
// to its peer once the peer runs. All threads meet again before they read sums.
#pragma once

#include "core/w4_layout.h"
#include "kernels/products/epilogue.cuh"
#include "kernels/w4a16/params.h"
#include "tile/copy.cuh"
#include "tile/cta_sync.cuh"
#include "tile/mma.cuh"
#include "tile/w4.cuh"

namespace rooftile::gpu {

// small_groups: a step may hold several scale blocks. Minima take the same path.
template <class Element, int bits_, int config_, bool small_groups_, bool minima_>
struct W4StreamTraits {
  using T = Element;
  static constexpr int bits = bits_;
  static constexpr W4StreamConfig config = w4_stream_config(bits, config_);
  static constexpr int n_tiles = config.n_tiles, stages = config.stages, x_tile_k = config.x_tile_k;
  static constexpr int x_tile_steps = x_tile_k / w4_step_k, pitch = w4_x_tile_pitch(config);
  static constexpr bool minima = minima_, small_groups = small_groups_ || minima_;
  static constexpr int ctas_per_sm = minima && n_tiles == 8 ? 1 : 2;  // sums of x take 32 registers more
};

// ---- x ------------------------------------------------------------------------------------------

// Copies one tile of x into shared memory: (tokens, x_tile_k), row pitch `pitch` bytes, zero-filled past the end of K.
// The 16-byte path is asynchronous (cp.async); the caller commits the group.
template <class Traits>
__device__ __forceinline__ void load_x_tile(const W4MatmulParams& p, std::uint8_t* x_tile, std::int64_t token0,
                                            int tokens, std::int64_t k0) {
  using T = typename Traits::T;
  const T* x = static_cast<const T*>(p.x.data);
  if (p.x_in_vec16) {
    constexpr int vecs = Traits::x_tile_k / 8, tokens_at_once = w4_warps * 32 / vecs;
    const int first = threadIdx.x / vecs, vec = threadIdx.x % vecs;
    const bool in_k = k0 + vec * 8 < p.w.k;
    const T* from = x + (token0 + first) * p.x_stride + (in_k ? k0 + vec * 8 : 0);
    std::uint8_t* to = x_tile + first * Traits::pitch + vec * 16;
    for (int token = first; token < tokens; token += tokens_at_once) {
      cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<cute::uint128_t>::copy(*reinterpret_cast<const cute::uint128_t*>(from),
                                                                   *reinterpret_cast<cute::uint128_t*>(to), in_k);
      from += tokens_at_once * p.x_stride;
      to += tokens_at_once * Traits::pitch;
    }
    return;
  }
  for (int i = threadIdx.x; i < tokens * Traits::x_tile_k; i += w4_warps * 32) {
    const int token = i / Traits::x_tile_k, at = i % Traits::x_tile_k;
    T value = T(0.0f);
    if (k0 + at < p.w.k) {
      const std::int64_t column = p.w.perm ? p.w.perm[k0 + at] : k0 + at;
      const bool there = column >= 0 && column < p.w.k;  // a column number outside of [0, K) reads as NaN
      value = there ? x[p.x.offset(token0 + token) + column * p.x.last_stride] : tile::from_float<T>(NAN);
    }
    *reinterpret_cast<T*>(x_tile + token * Traits::pitch + at * 2) = value;
  }
}

// ---- codes and scales ---------------------------------------------------------------------------

// Copies a tile row's codes and quantisation parameters from global memory to a stage of the ring, a step at a time.
// A stage of one tile row: codes (fragment blocks, 32 lanes, 16 bytes), scales (up to 4 groups, 16 rows) of 2 bytes,
// offsets (up to 4 groups, 16 rows): zero points of 1 byte or minima of 2. Every lane copies 16 bytes of each fragment
// block; some lanes copy 16 bytes of scales or offsets as well. tile_rows = 2: a producer warp copies for two consumer
// warps, whose stages are neighbours. The argument `stage` is the lane's own 16 bytes of the first fragment block.
template <int bits, int tile_rows = 1>
struct CodeLoader {
  static constexpr int tile_bytes = w4_tile_bytes(bits), stage_bytes = w4_stage_bytes(bits);
  const std::uint8_t* codes;           // this lane's 16 bytes of the next step's first fragment block
  const std::byte* qparams = nullptr;  // this lane's 16 bytes of the next step's scales or offsets; null: no copy
  std::int64_t second_row_bytes = 0;   // from the first tile row's codes to the second's; 0: there is no second
  int qparams_offset = 0;              // from `stage` to where this lane puts its 16 bytes of scales or offsets
  int qparams_per_step = 0;            // bytes
  int group_bytes;                     // scales or offsets of one group: 16 rows
  int groups_left, groups_per_step;    // groups_left: from `qparams` to the end of K
  int tiles_left;                      // from the next step to the end of K

  // first: the first step of the K range. A tile row past the end of W loads row 0; a second tile row past the end
  // loads the first one again.
  __device__ __forceinline__ CodeLoader(const W4MatmulParams& p, int row, int first)
      : tiles_left(p.row_tiles - 2 * first) {
    if (row >= p.tile_rows) row = 0;
    const bool second = tile_rows == 2 && row + 1 < p.tile_rows;
    const int lane = threadIdx.x % 32, groups_in_step = 4 >> p.scale_k_shift, vec = lane % 8;
    codes = p.w.codes + (std::int64_t{row} * p.row_tiles + 2 * first) * tile_bytes + lane * 16;
    if (second) second_row_bytes = std::int64_t{p.row_tiles} * tile_bytes;
    const bool is_offset = lane % 16 >= 8, bytes = is_offset && p.w.zeros == W4Zeros::integer;
    const int shift = bytes ? 0 : 1;  // log2 of the 16-byte vectors of a group
    group_bytes = bytes ? 16 : 32;
    groups_per_step = p.scale_k < p.group && p.groups == 1 ? 0 : groups_in_step;  // 0: one group for all of K
    const int first_group = first * groups_per_step + (vec >> shift);
    groups_left = p.groups - first_group;
    qparams_per_step = groups_per_step * group_bytes;
    qparams_offset =
        lane / 16 * stage_bytes + 2 * tile_bytes + (is_offset ? w4_qparam_bytes : 0) + vec * 16 - lane * 16;
    if (lane >= 16 * tile_rows || vec >= groups_in_step << shift || (is_offset && p.w.zeros == W4Zeros::symmetric))
      return;
    qparams = (is_offset ? p.w.offsets : p.w.scales) +
              (std::int64_t{row + (second && lane >= 16 ? 1 : 0)} * p.groups + first_group) * group_bytes +
              (vec & shift) * 16;
  }

  // Prefetches the next `steps` steps into L2. Safe before the previous kernel has ended, which may still write them: a
  // prefetch reads nothing into the SM.
  __device__ __forceinline__ void prefetch(int steps) const {
    const int lane = threadIdx.x % 32;
    if (lane % 16 == 0 && lane < 16 * tile_rows)
      tile::prefetch_l2_bulk(codes + lane / 16 * second_row_bytes - lane * 16, min(2 * steps, tiles_left) * tile_bytes);
    if (qparams && lane % 8 == 0)
      tile::prefetch_l2_bulk(qparams, min(max(steps * groups_per_step, 1), groups_left) * group_bytes);
  }

  // Issues the cp.async copies of the next step and advances to the step after it.
  __device__ __forceinline__ void load(std::uint8_t* stage) {
#pragma unroll
    for (int row = 0; row < tile_rows; ++row) {
      const std::uint8_t* const from = codes + row * second_row_bytes;
      std::uint8_t* const to = stage + row * stage_bytes;
#pragma unroll
      for (int at = 0; at < tile_bytes; at += w4_fragment_bytes) tile::cp_async_16(to + at, from + at);
      if (tiles_left > 1)
#pragma unroll
        for (int at = tile_bytes; at < 2 * tile_bytes; at += w4_fragment_bytes) tile::cp_async_16(to + at, from + at);
    }
    if constexpr (tile_rows == 2) {  // zero-filled past the end of K
      if (qparams)
        cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<cute::uint128_t>::copy(
            *reinterpret_cast<const cute::uint128_t*>(qparams),
            *reinterpret_cast<cute::uint128_t*>(stage + qparams_offset), groups_left > 0);
    } else if (qparams && groups_left > 0) {
      cute::SM80_CP_ASYNC_CACHEALWAYS<cute::uint128_t>::copy(
          *reinterpret_cast<const cute::uint128_t*>(qparams),
          *reinterpret_cast<cute::uint128_t*>(stage + qparams_offset));
    }
    codes += 2 * tile_bytes;
    qparams += qparams ? qparams_per_step : 0;
    groups_left -= groups_per_step;
    tiles_left -= 2;
  }
};

// The 16-bit scale, or minimum, of row `row` of a group in shared memory: (16 rows).
__device__ __forceinline__ float load_scale(const std::uint8_t* shared, int row, bool is_half) {
  const std::uint32_t bits = reinterpret_cast<const std::uint16_t*>(shared)[row];
  return is_half ? __half2float(__ushort_as_half(static_cast<unsigned short>(bits))) : __uint_as_float(bits << 16);
}

// ---- the kernel ---------------------------------------------------------------------------------

// The work tile of a CTA. The CTAs of a cluster take the K splits of the same rows of W and of all tokens. Without
// clusters blockIdx runs over m-blocks first, then n-blocks, then splits: neighbours read the same rows of W.
struct W4StreamWorkTile {
  std::int64_t local_token0;  // first token, from the first one of this launch
  unsigned n_block, split;
  int row, tokens;  // row: this warp's tile row of W; tokens: up to 8 NT
};
template <int NT>
__device__ __forceinline__ W4StreamWorkTile w4_stream_work_tile(const W4MatmulParams& p, unsigned cta) {
  W4StreamWorkTile at;
  unsigned m_block = 0;
  if (p.cluster_shift > 0) {
    at.split = cta & ((1u << p.cluster_shift) - 1);
    at.n_block = cta >> p.cluster_shift;
  } else {
    const unsigned rest = divide(cta, p.by_m_blocks);
    m_block = cta - rest * p.m_blocks;
    at.split = divide(rest, p.by_n_blocks);
    at.n_block = rest - at.split * p.n_blocks;
  }
  at.local_token0 = std::int64_t{m_block} * w4_stream_block_m;
  at.row = p.tile_row<w4_warps>(at.n_block, threadIdx.x / 32);
  at.tokens = static_cast<int>(min(static_cast<std::int64_t>(8 * NT), p.tokens - at.local_token0));
  return at;
}

template <class Traits>
__global__ void __launch_bounds__(w4_warps * 32, Traits::ctas_per_sm)
    w4a16_stream(const __grid_constant__ W4MatmulParams p) {
  using T = typename Traits::T;
  using Decode = tile::CodeDecode<T, Traits::bits>;
  constexpr int NT = Traits::n_tiles, S = Traits::stages, stage_bytes = w4_stage_bytes(Traits::bits),
                zero_point = w4_zero_point(Traits::bits);
  extern __shared__ __align__(128) std::uint8_t shared[];
  tile::let_next_kernel_start();

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const W4StreamWorkTile work = w4_stream_work_tile<NT>(p, blockIdx.x);
  const int first = work.split * p.split_steps, steps = min(p.split_steps, p.steps - first);
  const bool active = work.row < p.tile_rows;  // warps of the last n-block may lie past the end of N

  std::uint8_t* const ring = shared + warp * (S * stage_bytes) + lane * 16;
  std::uint8_t* x_tile = shared + w4_warps * S * stage_bytes;
  const int x_tile_bytes = p.x_tile_tokens * Traits::pitch;
  if (p.cluster_shift > 0) tile::arrive_at_cluster();
  CodeLoader<Traits::bits> loader(p, work.row, first);
  loader.prefetch(S - 1);
  tile::wait_for_previous_kernel();
  load_x_tile<Traits>(p, x_tile, p.first_token + work.local_token0, work.tokens, std::int64_t{first} * w4_step_k);
#pragma unroll
  for (int s = 0; s < S - 1; ++s) {
    if (s < steps) loader.load(ring + s * stage_bytes);
    cute::cp_async_fence();
  }

  // A step is 4 k-blocks of 32 k. `sum` runs over this many of them before it is scaled.
  constexpr int k_blocks_per_scale = Traits::small_groups ? 1 : 2;
  float acc[NT][4] = {};  // (NT mma tiles of 8 tokens, 4): rows g, g, g + 8, g + 8 x tokens 2t, 2t + 1, ...
  const bool half_scales = p.w.scale_dtype == DType::f16;
  typename Decode::Zero zero = Traits::minima ? Decode::zero(0, 0) : Decode::zero(zero_point, zero_point);
  // Byte offset of this lane's ldmatrix row: token lane % 8 of an mma tile, k 8 (lane / 8) of a k-block. A tile of x
  // with fewer than 8 tokens repeats its last one in the other columns, which the epilogue drops.
  const int x_at = min(lane % 8, p.x_tile_tokens - 1) * Traits::pitch + lane / 8 * 16;
  std::uint8_t* stage = ring + (S - 1) * stage_bytes;  // the stage before the first

  for (int step = 0; step < steps;) {
    cute::cp_async_wait<S - 2>();
    __syncthreads();  // all copies of this tile of x have landed; all warps have read the tile before
    std::uint8_t* const next_x_tile =
        shared + w4_warps * S * stage_bytes + (x_tile == shared + w4_warps * S * stage_bytes ? x_tile_bytes : 0);
    const int x_tile_end = min(step + Traits::x_tile_steps, steps);
    if (x_tile_end < steps)
      load_x_tile<Traits>(p, next_x_tile, p.first_token + work.local_token0, work.tokens,
                          std::int64_t{first + x_tile_end} * w4_step_k);

    for (const std::uint8_t* x = x_tile + x_at; step < x_tile_end; ++step, x += 2 * w4_step_k) {
      cute::cp_async_wait<S - 2>();
      __syncwarp();  // all lanes' copies of this stage have landed; all lanes have read the stage before
      std::uint8_t* const free_stage = stage;
      stage = stage == ring + (S - 1) * stage_bytes ? ring : stage + stage_bytes;
      uint4 rCodes[Traits::bits / 2];  // (fragment blocks of 2 tiles): this lane's 16 bytes of each
#pragma unroll
      for (int f = 0; f < Traits::bits / 2; ++f)
        rCodes[f] = *reinterpret_cast<const uint4*>(stage + f * w4_fragment_bytes);
      const std::uint8_t* const stage_qparams = stage - lane * 16 + 2 * w4_tile_bytes(Traits::bits);
      if (step + S - 1 < steps) loader.load(free_stage);
      cute::cp_async_fence();

      [[maybe_unused]] const int k_left = p.k - (first + step) * w4_step_k;  // k from this step on to the end of K
      float sum[NT][4] = {};                                                 // as acc: of the current scale block
      float x_sums[Traits::minima ? NT : 1][4] = {};  // as acc: sums of x / unit, the same in every row
#pragma unroll
      for (int k_block = 0; k_block < 4; ++k_block) {
        const int group = Traits::small_groups ? k_block >> p.scale_k_shift : 0;
        if (p.w.zeros == W4Zeros::integer &&
            (Traits::small_groups ? (k_block & ((1 << p.scale_k_shift) - 1)) == 0 : k_block == 0)) {
          const std::uint8_t* const zeros = stage_qparams + w4_qparam_bytes + group * 16;
          zero = Decode::zero(zeros[g], zeros[g + 8]);
        }
        tile::FragmentA a[2];  // (2 k-steps of 16): (u - zero) / unit of 16 rows x 16 k
        Decode::decode(rCodes, k_block, zero, a);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt) {
          // b.r: (2 k-steps, 2): B fragments of 8 tokens x 32 k
          const tile::FragmentA b = tile::ldmatrix_x4(x + k_block * 64 + nt * (8 * Traits::pitch));
          tile::mma<T>(sum[nt], a[0], {{b.r[0], b.r[1]}});
          tile::mma<T>(sum[nt], a[1], {{b.r[2], b.r[3]}});
          if constexpr (Traits::minima) {
            constexpr std::uint32_t one = Decode::one;
            tile::mma<T>(x_sums[nt], {{one, one, one, one}}, {{b.r[0], b.r[1]}});
            tile::mma<T>(x_sums[nt], {{one, one, one, one}}, {{b.r[2], b.r[3]}});
          }
        }
        if (k_block % k_blocks_per_scale != k_blocks_per_scale - 1) continue;

        const bool in_k = !Traits::small_groups ||
                          k_left > (group << p.scale_k_shift) * 32;  // past the end of K the stage holds stale scales
        const auto load = [&](const std::uint8_t* qparams, int row) {
          return in_k ? load_scale(qparams + group * 32, row, half_scales) : 0.0f;
        };
        const float scale[2] = {load(stage_qparams, g), load(stage_qparams, g + 8)};
        float minimum[2] = {};  // rows g, g + 8
        if constexpr (Traits::minima)
          minimum[0] = load(stage_qparams + w4_qparam_bytes, g),
          minimum[1] = load(stage_qparams + w4_qparam_bytes, g + 8);
#pragma unroll
        for (int nt = 0; nt < NT; ++nt)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            acc[nt][i] = fmaf(scale[i / 2], sum[nt][i], acc[nt][i]);
            sum[nt][i] = 0.0f;
            if constexpr (Traits::minima) {
              acc[nt][i] = fmaf(minimum[i / 2], x_sums[nt][i], acc[nt][i]);
              x_sums[nt][i] = 0.0f;
            }
          }
      }
    }
    x_tile = next_x_tile;
  }

  // Recomputed, so that it takes no registers during the main loop; the asm keeps the compiler from merging the two.
  unsigned cta = blockIdx.x;
  asm volatile("" : "+r"(cta));
  const W4StreamWorkTile work_again = w4_stream_work_tile<NT>(p, cta);
  if (p.partial) {
    if (!active) return;
    const std::int64_t padded_n = std::int64_t{p.tile_rows} * w4_tile_n;
    float* to = p.partial + (work_again.split * p.tokens + work_again.local_token0 + 2 * t) * padded_n +
                std::int64_t{work_again.row} * w4_tile_n + g;
#pragma unroll
    for (int nt = 0; nt < NT; ++nt, to += 8 * padded_n)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (nt * 8 + 2 * t + i % 2 < work_again.tokens)
          to[i % 2 * padded_n + i / 2 * 8] = acc[nt][i] * Decode::unit;  // the workspace has room for the padding of N
    return;
  }

  // Sums in shared memory: (splits of the cluster, warps whose sums this CTA reduces, tokens, 16 rows). Each warp
  // writes its sums to the CTA of the cluster whose epilogue handles them.
  const bool gated = p.gate_tiles > 0;
  const int cta_rank = static_cast<int>(work_again.split) & ((1 << p.cluster_shift) - 1),
            out_tile = gated ? warp % (w4_warps / 2) : warp;
  const W4EpilogueTiles epilogue = w4_epilogue_tiles(gated, p.cluster_shift);
  constexpr int pitch = w4_sums_pitch, warp_floats = 8 * NT * pitch;
  float* const sums = reinterpret_cast<float*>(shared + p.sums_offset);
  const int sum_index = out_tile % epilogue.tiles + (gated && warp >= w4_warps / 2 ? epilogue.tiles : 0);
  float* to = sums + (cta_rank * epilogue.warps + sum_index) * warp_floats + 2 * t * pitch + g;
  if (p.cluster_shift > 0) {
    tile::wait_for_cluster();  // the peer CTA has started: its shared memory may be written
    to = tile::map_shared_rank(to, out_tile / epilogue.tiles);
  } else {
    __syncthreads();  // all warps have read their codes: the sums overlay the ring
  }
#pragma unroll
  for (int nt = 0; nt < NT; ++nt)
#pragma unroll
    for (int i = 0; i < 4; ++i) to[(nt * 8 + i % 2) * pitch + i / 2 * 8] = acc[nt][i] * Decode::unit;
  if (p.cluster_shift > 0) {
    tile::sync_cluster();  // all sums of this CTA have landed
  } else {
    __syncthreads();
  }
  for (int vec = threadIdx.x; vec < epilogue.tiles * 8 * NT * 4; vec += w4_warps * 32) {
    // A thread takes 4 neighbouring rows of W (columns of y) of one token.
    const int rows = vec % 4 * 4, token = vec / 4 % (8 * NT), at = vec / (4 * 8 * NT);
    if (token >= work_again.tokens || cta_rank * epilogue.tiles + at >= (gated ? w4_warps / 2 : w4_warps)) continue;
    const auto sum_of = [&](int sum_index) {
      float4 sum = {};
      for (int split = 0; split < 1 << p.cluster_shift; ++split) {
        const float4 x = *reinterpret_cast<const float4*>(sums + (split * epilogue.warps + sum_index) * warp_floats +
                                                          token * pitch + rows);
        sum.x += x.x, sum.y += x.y, sum.z += x.z, sum.w += x.w;
      }
      return sum;
    };
    const Epilogue<T> out(
        p, std::int64_t{p.tile_row<w4_warps>(work_again.n_block, cta_rank * epilogue.tiles + at)} * w4_tile_n + rows);
    out.store(p.first_token + work_again.local_token0 + token, sum_of(at),
              gated ? sum_of(epilogue.tiles + at) : float4{});
  }
}

// The instance of a tile config: `config` indexes w4_stream_configs (or w8_stream_configs).
template <class T, int bits, bool small_groups, bool minima>
W4Kernel w4a16_stream_variant(int config) {
  switch (config) {
    case 0:
      return w4a16_stream<W4StreamTraits<T, bits, 0, small_groups, minima>>;
    case 1:
      return w4a16_stream<W4StreamTraits<T, bits, 1, small_groups, minima>>;
    case 2:
      return w4a16_stream<W4StreamTraits<T, bits, 2, small_groups, minima>>;
    default:
      return w4a16_stream<W4StreamTraits<T, bits, 3, small_groups, minima>>;
  }
}
template <class T, int bits>
W4Kernel w4a16_stream_kernel(int config, int scale_k) {
  return scale_k < w4_step_k ? w4a16_stream_variant<T, bits, true, false>(config)
                             : w4a16_stream_variant<T, bits, false, false>(config);
}
template <class T>
W4Kernel w4a16_stream_kernel(int config, int scale_k, W4Zeros zeros) {
  return zeros == W4Zeros::minima ? w4a16_stream_variant<T, 4, true, true>(config)
                                  : w4a16_stream_kernel<T, 4>(config, scale_k);
}

}  // namespace rooftile::gpu
