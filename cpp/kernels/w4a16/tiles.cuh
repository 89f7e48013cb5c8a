// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 4 or 8 bits, on Hopper's wgmma: for more tokens than stream.cuh is
// fast for.
//   x [M, K]   y, residual [M, N]   bias [N]   W in tiles of 16 n x 64 k (core/w4_layout.h)
//
// W is the register A operand, tokens are wgmma's N. As many CTAs as there is room for take one item after another: 128
// rows of W,
// `tokens` tokens and K, or one chunk of it, or the part of it that is in the CTA's even share of all items. Two groups
// of four warps multiply, a warp one tile row of W; a third group brings what they need, `stages` steps of 128 k ahead
// and on from one item to the next:
//   codes, scales   global -> a slot for each warp (cp.async), as in stream.cuh; a warp of the third group brings those
//                   of two
//   x               global -> shared memory, by the copy engine, swizzled; the CTAs of a cluster have other rows of W
//                   and the same tokens: each brings a part of the tokens to all of them
// Codes become operands in registers, 32 k at a time as the tensor cores are done with the registers, while they work
// on the rest of the step before.
//   scale blocks of 128 k and more, no minima   operands (u - zero) / unit, exact; scales act in fp32 on the sum over a
//                                               step:
//                                               total += scale * sum of (u - zero) / unit * x,   times unit at the end
//   others (`rounded`)                          operands (u - zero) * scale + minimum, rounded to T; K is one sum.
//                                               Scaling four sums a step in fp32 would cost more issue slots than the
//                                               tensor cores have cycles.
//
// Cost of a step, 128 tokens: 4 Mflop, 1024 cycles of the tensor cores; 8 KB of codes of 4 bits, 32 KB of x of which
// the CTA brings 32 / cluster. A warp that multiplies spends some 200 issue slots, with rounded operands some 250;
// while one group does what cannot overlap with its own product the other one's runs. Tensor cores are the roof from
// 128 tokens on, the bytes of W below.
// Sync: `full` (a stage's bytes have come) and `free` (all warps of the cluster have read it), barriers in shared
// memory; the output's tile: a barrier of the warps that multiply. A CTA ends when all has come that the other one
// sends to it. Of even shares: `tickets`, words in global memory, by which a CTA tells a later one that the sums are
// there which it goes on with. It asks for them at its end, and they were written near the beginning.
#pragma once

#include <cute/arch/cluster_sm90.hpp>
#include <cutlass/arch/reg_reconfig.h>
#include <cutlass/cutlass.h>

#include "kernels/w4a16/stream.cuh"
#include "tile/tensor_copy.cuh"
#include "tile/wgmma.cuh"

namespace rooftile::gpu {

// Scale_: void: operands are exact, of scale blocks of 128 k or more, no minima. Else weights are rounded to T before
// the product, and their scales and minima have that type.
template <class Element, int bits_, int form_, class Scale_>
struct W4TilesConfig {
  using T = Element;
  using Scale = Scale_;
  static constexpr int bits = bits_;
  static constexpr W4TilesForm form = w4_tiles_form(bits, form_);
  static constexpr int tokens = form.tokens, warps = form.warps(), stages = form.stages, ctas = form.ctas;
  static constexpr bool rounded = !std::is_void_v<Scale_>, shares = w4_tiles_shares(form);
  static constexpr int registers = ctas == 1 ? 232 : 96,
                       registers_to_bring = 40;  // of a thread that multiplies, or that brings
  static_assert(128 * (form.groups * registers + registers_to_bring) <=
                    form.threads() * (65536 / (ctas * form.threads()) / 8 * 8),
                "setmaxnreg would wait forever");
};

// What a CTA works on, one after another: 128 rows of W, the same tokens for all of a cluster, and K, a chunk or a part
// of it.
struct W4TilesItem {
  unsigned split, row_block;
  int token0, first, steps;  // token0: of this launch; first: of the item's steps of 128 k
};

// The items of one cluster.
// Whole, or the chunks of several splits: a cluster takes one of as many as there are clusters. Neighbours have other
// tokens, of token_group blocks, whose x stays in L2 while all rows of W pass by.
// Even shares: the steps of all rows of W lie on a line, which is cut into shares, the same for every block of tokens.
// A share may end within rows. Its cluster begins with the steps that it has of these and hands their sums to the
// cluster of the next share, which ends with the rest of them and adds to what it was handed. So every sum is added up
// in the order of K, wherever shares end.
template <class Cfg>
class W4TilesWork {
 public:
  __device__ __forceinline__ W4TilesWork(const W4TilesParams& params, int rank) : params_(params), rank_(rank) {
    const W4MatmulParams& p = params.product;
    const unsigned cluster = blockIdx.x >> p.cluster_shift;
    if (in_shares()) {
      const unsigned share = divide(cluster, p.by_token_blocks);
      token_block_ = cluster - share * p.token_blocks;
      next_ = params.begin_of(share);
      end_ = params.begin_of(share + 1);
    } else {
      next_ = cluster;
      end_ = (p.row_blocks >> p.cluster_shift) * p.token_blocks * p.splits;
    }
  }
  __device__ __forceinline__ bool left() const { return next_ < end_; }
  __device__ __forceinline__ W4TilesItem take() {
    const W4MatmulParams& p = params_.product;
    W4TilesItem at;
    if (in_shares()) {
      const unsigned row_group = divide(end_ - 1, params_.by_steps), begin = max(row_group * p.steps, next_);
      at.split = 0;
      at.row_block = (row_group << p.cluster_shift) + rank_;
      at.token0 = static_cast<int>(token_block_) * Cfg::tokens;
      at.first = static_cast<int>(begin - row_group * p.steps);
      at.steps = static_cast<int>(end_ - begin);
      end_ = begin;
      return at;
    }
    at.split = divide(next_, params_.by_items);
    const unsigned item = next_ - at.split * params_.by_items.value;
    next_ += gridDim.x >> p.cluster_shift;
    unsigned row_group = divide(item, p.by_token_blocks), token_block = item - row_group * p.token_blocks;
    if (p.token_blocks > params_.token_group) {
      const unsigned width = params_.token_group, of_group = (p.row_blocks >> p.cluster_shift) * width,
                     group = item / of_group, in_group = item - group * of_group;
      const unsigned own_width = min(width, p.token_blocks - group * width);
      row_group = in_group / own_width;
      token_block = group * width + in_group - row_group * own_width;
    }
    at.row_block = (row_group << p.cluster_shift) + rank_;
    at.token0 = static_cast<int>(token_block) * Cfg::tokens;
    at.first = static_cast<int>(at.split) * p.chunk_steps;
    at.steps = min(p.chunk_steps, p.steps - at.first);
    return at;
  }
  // A part of K is handed on to the CTA that has the rest, or was handed over by the CTA that had what comes before it.
  __device__ __forceinline__ bool hands_on(const W4TilesItem& at) const {
    return in_shares() && at.first + at.steps < params_.product.steps;
  }
  __device__ __forceinline__ bool goes_on(const W4TilesItem& at) const { return in_shares() && at.first > 0; }
  __device__ __forceinline__ unsigned block_before() const {
    return blockIdx.x - (params_.product.token_blocks << params_.product.cluster_shift);
  }

 private:
  __device__ __forceinline__ bool in_shares() const { return Cfg::shares && params_.shares > 0; }

  const W4TilesParams& params_;
  int rank_;
  unsigned next_, end_, token_block_ = 0;  // items, or steps of the line, taken from its end
};

template <class Cfg>
__global__ void __launch_bounds__(Cfg::form.threads(), Cfg::ctas)
    w4a16_tiles([[maybe_unused]] const __grid_constant__ W4TilesParams params) {
#ifdef ROOFTILE_WGMMA
  using T = typename Cfg::T;
  using Decode = tile::CodeDecode<T, Cfg::bits>;
  constexpr int N = Cfg::tokens, warps = Cfg::warps, S = Cfg::stages, half_step = N * 128, x_bytes = 2 * half_step;
  constexpr int slot_bytes = w4_slot_bytes(Cfg::bits), sides_at = 2 * w4_tile_bytes(Cfg::bits),
                middle = w4_middle(Cfg::bits);
  const W4MatmulParams& p = params.product;
  extern __shared__ __align__(1024) std::uint8_t shared[];
  std::uint8_t* const x_ring = shared;
  std::uint8_t* const slots = shared + S * x_bytes;  // [stage][warp]
  float* const tile_out = reinterpret_cast<float*>(slots + S * warps * slot_bytes);
  tile::Barrier* const full = reinterpret_cast<tile::Barrier*>(tile_out + w4_tiles_out_bytes(Cfg::form) / 4);
  tile::Barrier* const free = full + S;

  const int warp = cutlass::canonical_warp_idx_sync(), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const int cluster = 1 << p.cluster_shift, rank = blockIdx.x & (cluster - 1);
  constexpr int bringers = Cfg::form.threads() / 32 - warps;  // warps, each of which brings the codes of two
  static_assert(warps == 2 * bringers);

  if (threadIdx.x == 0) {
    for (int s = 0; s < S; ++s) {
      full[s].init(1 + bringers * 32);
      free[s].init(warps * (32 + cluster - 1));  // the CTA's own lanes, and a lane for each warp of the others
    }
    tile::publish_barriers();
  }
  __syncwarp();
  tile::arrive_at_cluster();

  if (warp >= warps) {
    cutlass::arch::warpgroup_reg_dealloc<Cfg::registers_to_bring>();
    const bool brings_x = warp == warps && cute::elect_one_sync();
    const int of_warp = 2 * (warp - warps);
    if (brings_x) tile::prefetch_map(params.x);
    W4TilesWork<Cfg> work(params, rank);
    W4TilesItem here = work.take();
    const auto codes_of = [&](const W4TilesItem& item) {
      return CodeStream<Cfg::bits, 2>(p, p.tile_row<warps>(item.row_block, of_warp), item.first);
    };
    CodeStream<Cfg::bits, 2> codes = codes_of(here);
    codes.prefetch(S);
    tile::wait_for_cluster();  // the barriers are there
    tile::wait_for_previous_kernel();
    const int part = N / cluster;
    std::uint8_t* const x_part = x_ring + rank * part * 128;
    const auto all = static_cast<std::uint16_t>((1 << cluster) - 1);
    int s = 0, parity = 1;
    for (;;) {
      const int first_row = here.token0 + rank * part, end = (here.first + here.steps) * w4_step_k;
#pragma unroll 1  // copies of it would take registers
      for (int k = here.first * w4_step_k; k < end; k += w4_step_k) {
        free[s].wait(parity);
        if (brings_x) {
          full[s].arrive_and_expect(x_bytes);
          std::uint8_t* const to = x_part + s * x_bytes;
          if (cluster > 1) {
            tile::copy_box(to, params.x, k, first_row, full[s], all);
            tile::copy_box(to + half_step, params.x, k + 64, first_row, full[s], all);
          } else {
            tile::copy_box(to, params.x, k, first_row, full[s]);
            tile::copy_box(to + half_step, params.x, k + 64, first_row, full[s]);
          }
        }
        __syncwarp();
        codes.fill(slots + (s * warps + of_warp) * slot_bytes + lane * 16);
        full[s].arrive_with_copies();
        if (++s == S) s = 0, parity ^= 1;
      }
      if (!work.left()) break;
      here = work.take();
      codes = codes_of(here);
    }
    tile::let_next_kernel_start();
    // No CTA ends before all that the other one sends it has come: x, which its own warps wait for, and their arrivals.
    for (int i = 0; i < S; ++i) {
      free[s].wait(parity);
      if (++s == S) s = 0, parity ^= 1;
    }
    return;
  }
  cutlass::arch::warpgroup_reg_alloc<Cfg::registers>();
  tile::wait_for_cluster();  // the barriers are there
  tile::wait_for_previous_kernel();

  float total[N / 2];  // of the work range in K
  const bool half_scales = p.w.scale_dtype == DType::f16, integer = p.w.zeros == W4Zeros::integer,
             minima = Cfg::rounded && Cfg::bits == 4 && p.w.zeros == W4Zeros::minima;
  [[maybe_unused]] typename Decode::Zero zero = Decode::zero(middle, middle);
  [[maybe_unused]] float scale[2] = {};  // rows g, g + 8
  tile::FragmentA a[4][2];               // of a step: 32 k each
  int s = S - 1, parity = 1;             // of the stage that was taken last: none yet
  const std::uint8_t* slot = nullptr;    // this warp's, of that stage
  uint4 runs[Cfg::bits / 2];             // its codes: two tiles
  // Rounded operands: scales and minima of each k-block of the step, (row g, row g + 8). ldmatrix.trans of rows that
  // alternate between the two halves of a scale block gives every lane of a row of lanes the same block.
  [[maybe_unused]] tile::FragmentA scales, minimums = {};
  [[maybe_unused]] const int scales_at = sides_at + (lane / 8 >> p.span_shift) * 32 + lane % 2 * 16;
  // x and codes of the next step have come.
  const auto take_step = [&] {
    if (++s == S) s = 0, parity ^= 1;
    full[s].wait(parity);
    slot = slots + (s * warps + warp) * slot_bytes;
#pragma unroll
    for (int run = 0; run < Cfg::bits / 2; ++run)
      runs[run] = *reinterpret_cast<const uint4*>(slot + run * w4_run_bytes + lane * 16);
    if constexpr (Cfg::rounded) {
      scales = tile::ldmatrix_x4_trans(slot + scales_at);
      if (minima) minimums = tile::ldmatrix_x4_trans(slot + scales_at + w4_side_bytes);
    }
  };
  const auto load_scales = [&] {
    scale[0] = load_scale(slot + sides_at, g, half_scales);
    scale[1] = load_scale(slot + sides_at, g + 8, half_scales);
  };
  // k-block `quarter` of the step that was taken last -> operand A.
  const auto decode = [&](int quarter, tile::FragmentA(&to)[2]) {
    const std::uint8_t* const offsets = slot + sides_at + w4_side_bytes;
    if constexpr (Cfg::rounded) {
      std::uint32_t zeros[2] = {middle, middle};
      if (minima) zeros[0] = zeros[1] = 0;
      if (integer)
        zeros[0] = offsets[(quarter >> p.span_shift) * 16 + g],
        zeros[1] = offsets[(quarter >> p.span_shift) * 16 + g + 8];
      tile::WeightDecode<T, Cfg::bits, typename Cfg::Scale>(scales.r[quarter], minimums.r[quarter], zeros)
          .decode(runs, quarter, to);
    } else {
      if (integer && quarter == 0) zero = Decode::zero(offsets[g], offsets[g + 8]);
      Decode::decode(runs, quarter, zero, to);
    }
  };

  constexpr int rows = warps * w4_tile_n, pitch = rows + 4, out_tokens = w4_tiles_out_tokens(Cfg::form);
  const auto sync_readers = [] { asm volatile("bar.sync 1, %0;" ::"n"(warps * 32) : "memory"); };
  W4TilesWork<Cfg> work(params, rank);
  W4TilesItem here = work.take();
  take_step();
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) decode(quarter, a[quarter]);
  if constexpr (!Cfg::rounded) load_scales();
  for (;;) {
    const bool last = !work.left();
    if (work.goes_on(here)) {  // always the last; these loads may take until the first sum is added
      const unsigned block = work.block_before();
      if (lane == 0) tile::wait_for_ticket(params.tickets + block, params.ticket);
      __syncwarp();
      const auto* const from =
          reinterpret_cast<const float4*>(params.handed + std::int64_t{block} * (rows * N)) + threadIdx.x;
#pragma unroll
      for (int i = 0; i < N / 2; i += 4) {
        const float4 four = __ldcg(from + i / 4 * (warps * 32));
        total[i] = four.x, total[i + 1] = four.y, total[i + 2] = four.z, total[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (float& x : total) x = 0.0f;
    }
    for (int step = 0; step < here.steps; ++step) {
      const bool more = step + 1 < here.steps || !last;
      const int stage = s;
      const std::uint64_t x = tile::swizzled_operand(x_ring + s * x_bytes);
      // All products of the step; as one batch after another ends, its registers take the codes of the next step.
      const auto multiply_and_decode = [&](float (&sum)[N / 2], bool add) {
        tile::pin(sum);
        tile::begin_wgmma();
#pragma unroll
        for (int quarter = 0; quarter < 4; ++quarter) {
          const std::uint64_t k_block = x + (quarter / 2 * half_step + quarter % 2 * 64) / 16;
          tile::wgmma<T>(sum, a[quarter][0], k_block, add || quarter > 0);
          tile::wgmma<T>(sum, a[quarter][1], k_block + 2, true);
          tile::end_wgmma_batch();
        }
        if (more) {
          take_step();
          tile::wait_for_wgmma<3>();
          decode(0, a[0]);
          tile::wait_for_wgmma<2>();
          decode(1, a[1]);
          tile::wait_for_wgmma<1>();
          decode(2, a[2]);
        }
      };
      if constexpr (Cfg::rounded) {
        multiply_and_decode(total, true);
        tile::wait_for_wgmma<0>();
        tile::pin(total);
      } else {
        float sum[N / 2];  // of the step
        const float now[2] = {scale[0], scale[1]};
        multiply_and_decode(sum, false);
        if (more) load_scales();
        tile::wait_for_wgmma<0>();
        tile::pin(sum);
#pragma unroll
        for (int i = 0; i < N / 2; ++i) total[i] = fmaf(now[i / 2 % 2], sum[i], total[i]);
      }
      if (more) decode(3, a[3]);
      free[stage].arrive();  // this lane has read its codes and scales
      __syncwarp();          // and all have: x has been read, which the others send too
      if (lane < cluster && lane != rank) free[stage].arrive_in_block(lane);
    }

    if (last) tile::let_next_kernel_start();
    if (work.hands_on(here)) {  // always the first, and not the last
      auto* const to = reinterpret_cast<float4*>(params.handed + std::int64_t{blockIdx.x} * (rows * N)) + threadIdx.x;
#pragma unroll
      for (int i = 0; i < N / 2; i += 4)
        __stcg(to + i / 4 * (warps * 32), make_float4(total[i], total[i + 1], total[i + 2], total[i + 3]));
      sync_readers();
      if (threadIdx.x == 0) tile::publish(params.tickets + blockIdx.x, params.ticket);
    }
    // fp32 through shared memory: rows of tokens, so that neighbours of N are stored together.
    // A thread has four neighbouring rows of W, or of a pair of gates and ups; a warp stores 1 << shift tokens at once.
    static_assert(rows == 128);
    const int shift = p.gate_tiles > 0 && !p.partial ? 1 : 0, at_once = 1 << shift;
    const int first_token = warp * at_once + (shift ? lane / 16 : 0), column = (shift ? lane % 16 : lane) * 4;
    const std::int64_t n =
        std::int64_t{p.tile_row<warps>(here.row_block, column / w4_tile_n)} * w4_tile_n + column % w4_tile_n;
    const std::int64_t padded_n = std::int64_t{p.tile_rows} * w4_tile_n;
    const Outputs<T> out(p, n);
#pragma unroll 1  // many copies of what finishes an output would not fit into the instruction cache
    for (int pass = work.hands_on(here) ? N / out_tokens : 0; pass < N / out_tokens; ++pass) {
      sync_readers();  // the tile before it has been read
#pragma unroll
      for (int i = 0; i < out_tokens / 2; ++i) {
        float own = total[i];
        if constexpr (out_tokens < N) own = pass == 0 ? own : total[out_tokens / 2 + i];
        tile_out[(i / 4 * 8 + 2 * t + i % 2) * pitch + warp * w4_tile_n + g + i / 2 % 2 * 8] =
            Cfg::rounded ? own : own * Decode::unit;
      }
      sync_readers();
      const std::int64_t token0 = here.token0 + pass * out_tokens;
      const int tokens = static_cast<int>(min(std::int64_t{out_tokens}, p.tokens - token0));
      const float* from = tile_out + first_token * pitch + column;
      if (p.partial) {
        if (n >= padded_n) continue;
        float* to = p.partial + (here.split * p.tokens + token0 + first_token) * padded_n + n;
        for (int token = first_token; token < tokens;
             token += warps * at_once, from += warps * at_once * pitch, to += warps * at_once * padded_n)
          *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from);
      } else {
        for (int token = first_token; token < tokens; token += warps * at_once, from += warps * at_once * pitch)
          out.store(p.first_token + token0 + token, *reinterpret_cast<const float4*>(from),
                    *reinterpret_cast<const float4*>(from + shift * (rows / 2)));
      }
    }
    if (last) break;
    here = work.take();
  }
  // Every warp has found it: before a replay of this launch, with this ticket, nobody may.
  if (work.goes_on(here) && threadIdx.x == 0) params.tickets[work.block_before()] = 0;
#endif
}

template <class T, int bits, class Scale>
W4TilesKernel w4a16_tiles_kernel(int form) {
  switch (form) {
    case 0:
      return w4a16_tiles<W4TilesConfig<T, bits, 0, Scale>>;
    case 1:
      return w4a16_tiles<W4TilesConfig<T, bits, 1, Scale>>;
    default:
      return w4a16_tiles<W4TilesConfig<T, bits, 2, Scale>>;
  }
}
template <class T, int bits>
W4TilesKernel w4a16_tiles_kernel(int form, W4Operand operand) {
  switch (operand) {
    case W4Operand::codes:
      return w4a16_tiles_kernel<T, bits, void>(form);
    case W4Operand::f16_scales:
      return w4a16_tiles_kernel<T, bits, tile::half>(form);
    default:
      return w4a16_tiles_kernel<T, bits, tile::bf16>(form);
  }
}

}  // namespace rooftile::gpu
