// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 16 bits, on Hopper's wgmma: for up to 64 tokens, and for more where
// collective.cu cannot be used.
//   x [M, K]   W [N, K]   rows in 16-byte pieces, evenly spaced    y, residual [M, N]   bias [N]   any strides
//
// W's rows are the M of wgmma, tokens its N: 8, 16, 32 or 64. A CTA takes `rows` rows of W (16 to 128), that many
// tokens and one chunk of K.
// One thread brings boxes of 64 k of W and of x (TMA, swizzled, a ring of `stages` of two boxes each); four warps
// multiply 64 rows, both operands from shared memory. Two chunks of K are a cluster, whose CTAs finish half of the rows
// each, from the sums of both in order.
// There is no workspace.
//
// Cost: 2 N K bytes of W, read evenly by all multiprocessors: rows and chunks are chosen so that each has one CTA, or
// as many as all others. A step of 128 rows is 32 KB, 800 cycles of a multiprocessor's share of the bandwidth, in which
// the tensor cores work for 260; 256 bytes of x a token come from L2 beside them. The bytes of W are the roof as long
// as 40 KB a multiprocessor are on their way, of a ring of 90 KB and more.
// Sync: `full` (a stage's bytes have come) and `free` (all warps have read it), barriers in shared memory; the cluster:
// both have read their last stage, where the sums of the other are put, and the sums have come. W may start on its way
// to L2 while the kernel before still runs; nothing is read before that has ended. The next kernel is let in when all
// loads are under way.
#include <cuda.h>
#include <cute/arch/cluster_sm90.hpp>

#include <bit>

#include "kernels/linear/params.h"
#include "kernels/products/finish.cuh"
#include "kernels/tensor_map.h"
#include "kernels/warmup.h"
#include "tile/cta_sync.cuh"
#include "tile/tma.cuh"
#include "tile/wgmma.cuh"

namespace rooftile::gpu {
namespace {

struct LinearBoxParams {
  LinearParams product;
  int rows, stages;   // of the CTA; of its ring
  int cluster_shift;  // log2 of the chunks of K
  CUtensorMap w, x;
};

template <class Element, int form_>
struct LinearBox {
  using T = Element;
  static constexpr int tokens = linear_box_forms[form_];
};

template <class Cfg>
__global__ void __launch_bounds__(linear_box_threads(linear_box_rows), 2)
    linear_boxes_of([[maybe_unused]] const __grid_constant__ LinearBoxParams params) {
#ifdef ROOFTILE_WGMMA
  using T = typename Cfg::T;
  constexpr int N = Cfg::tokens, H = linear_boxes_a_step, x_bytes = linear_box_bytes(N);
  const LinearParams& p = params.product;
  const int R = params.rows, S = params.stages, w_bytes = linear_box_bytes(R),
            stage_bytes = H * linear_box_bytes(R + N);
  extern __shared__ __align__(1024) std::uint8_t shared[];
  tile::Barrier* const full = reinterpret_cast<tile::Barrier*>(shared + S * stage_bytes);
  tile::Barrier* const free = full + S;

  const int warps = static_cast<int>(blockDim.x) / 32 - 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32,
            g = lane / 4, t = lane % 4;
  const int shift = params.cluster_shift, cluster = 1 << shift, rank = static_cast<int>(blockIdx.x) & (cluster - 1);
  // neighbouring clusters share rows of W
  const unsigned at = blockIdx.x >> shift;
  const int row0 = static_cast<int>(at / p.token_blocks) * R, token0 = static_cast<int>(at % p.token_blocks) * N;
  const int first = rank * p.chunk_steps, steps = max(0, min(p.chunk_steps, p.steps - first));

  if (threadIdx.x == 0) {
    for (int s = 0; s < S; ++s) {
      full[s].init(1);
      free[s].init(warps);
    }
    tile::fence_barrier_init();
  }
  __syncthreads();  // the barriers are there

  float sum[N / 2] = {};  // rows g, g + 8 of the warp's 16 x tokens as in tile/wgmma.cuh
  if (warp == warps) {
    if (cute::elect_one_sync()) {
      // half a ring: more would compete with the kernel before
      for (int box = 0; box < H * min(S / 2, steps); ++box)
        tile::tma_prefetch(params.w, (first * H + box) * linear_box_columns, row0);
      tile::wait_for_previous_kernel();
#pragma unroll 1
      for (int step = 0, s = 0, parity = 1, k = first * linear_box_k; step < steps; ++step, k += linear_box_k) {
        free[s].wait(parity);
        full[s].arrive_and_expect_tx(stage_bytes);
        std::uint8_t* const to = shared + s * stage_bytes;
#pragma unroll
        for (int box = 0; box < H; ++box) {
          tile::tma_load(to + box * w_bytes, params.w, k + box * linear_box_columns, row0, full[s]);
          tile::tma_load(to + H * w_bytes + box * x_bytes, params.x, k + box * linear_box_columns, token0, full[s]);
        }
        if (++s == S) s = 0, parity ^= 1;
      }
      tile::let_next_kernel_start();
    }
    __syncwarp();
  } else {
    const std::uint64_t operands = tile::make_smem_desc(shared);
#pragma unroll 1
    for (int step = 0, s = 0, parity = 0; step < steps; ++step) {
      full[s].wait(parity);
      const std::uint64_t x = operands + (s * stage_bytes + H * w_bytes) / 16,
                          w = operands + (s * stage_bytes + warp / 4 * linear_box_bytes(64)) / 16;
      tile::warpgroup_fence_operand(sum);
      cute::warpgroup_arrive();
#pragma unroll
      for (int box = 0; box < H; ++box)
#pragma unroll
        for (int i = 0; i < linear_box_columns / 16; ++i)
          tile::wgmma<T>(sum, w + box * (w_bytes / 16) + 2 * i, x + box * (x_bytes / 16) + 2 * i);
      cute::warpgroup_commit_batch();
      cute::warpgroup_wait<0>();
      tile::warpgroup_fence_operand(sum);
      if (lane == 0) free[s].arrive();
      if (++s == S) s = 0, parity ^= 1;
    }
  }

  // fp32 [chunk][token][rows that this CTA finishes], where the ring was
  tile::arrive_at_cluster();
  const int rows = R >> shift, pitch = rows + 4;
  float* const sums = reinterpret_cast<float*>(shared);
  tile::wait_for_previous_kernel();  // bias and residual, and what y held, are of other kernels
  tile::wait_for_cluster();          // all of it have read their last stage
  if (warp < warps) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 16 + 8 * half;
      if (row >= R) break;  // a warp may have fewer
      float* const to = tile::map_shared_rank(sums, row / rows) + (rank * N + 2 * t) * pitch + row % rows + g;
#pragma unroll
      for (int i = 0; i < N / 4; ++i) to[(i / 2 * 8 + i % 2) * pitch] = sum[i / 2 * 4 + 2 * half + i % 2];
    }
  }
  tile::sync_cluster();  // the sums have come
  const int fours = rows / 4, tokens = static_cast<int>(min(std::int64_t{N}, p.tokens - token0));
  for (int item = threadIdx.x; item < tokens * fours; item += static_cast<int>(blockDim.x)) {
    const int token = item / fours, four = item % fours;
    float4 total = {};
    for (int chunk = 0; chunk < cluster; ++chunk) {
      const float4 part = *reinterpret_cast<const float4*>(sums + (chunk * N + token) * pitch + 4 * four);
      total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
    }
    Outputs<T>(p, row0 + rank * rows + 4 * four).store(token0 + token, total, {});
  }
#endif
}

template <class Cfg>
void launch_form(const DeviceScope& scope, const LinearParams& p, const LinearPlan& plan, DType dtype) {
  LinearBoxParams params{.product = p,
                         .rows = plan.box_rows,
                         .stages = plan.stages,
                         .cluster_shift = std::countr_zero(static_cast<unsigned>(plan.cluster)),
                         .w = {},
                         .x = {}};
  params.w = rows_map(scope.op(), p.w, dtype, {.rows = p.n, .columns = p.k, .stride = p.w_stride}, plan.box_rows,
                      linear_box_columns);
  params.x = rows_map(scope.op(), p.x.data, dtype, {.rows = p.tokens, .columns = p.k, .stride = p.x_stride},
                      Cfg::tokens, linear_box_columns);
  scope.launch(linear_boxes_of<Cfg>, plan.token_blocks * plan.row_blocks * plan.cluster,
               linear_box_threads(plan.box_rows), plan.shared_bytes, params, Overlap::with_previous, plan.cluster);
}

template <class T>
void launch(const DeviceScope& scope, const LinearParams& p, const LinearPlan& plan, DType dtype) {
  switch (plan.form) {
    case 0:
      return launch_form<LinearBox<T, 0>>(scope, p, plan, dtype);
    case 1:
      return launch_form<LinearBox<T, 1>>(scope, p, plan, dtype);
    case 2:
      return launch_form<LinearBox<T, 2>>(scope, p, plan, dtype);
    default:
      return launch_form<LinearBox<T, 3>>(scope, p, plan, dtype);
  }
}

template <class T>
void load(const char* op) {
  load_kernel(op, linear_boxes_of<LinearBox<T, 0>>);
  load_kernel(op, linear_boxes_of<LinearBox<T, 1>>);
  load_kernel(op, linear_boxes_of<LinearBox<T, 2>>);
  load_kernel(op, linear_boxes_of<LinearBox<T, 3>>);
}

}  // namespace

void linear_boxes(const DeviceScope& scope, const LinearParams& p, DType dtype, const LinearPlan& plan) {
  tile::with_element16(dtype, [&](auto e) { launch<decltype(e)>(scope, p, plan, dtype); });
}

void load_linear_boxes(const char* op) {
  load<tile::half>(op);
  load<tile::bf16>(op);
}

}  // namespace rooftile::gpu
