// SPDX-License-Identifier: Apache-2.0
// kv_append and rope_append on a GPU: store new tokens of k, v [B, T, Hkv, D] in pages, rings and codes. With cos
// given, k and q [B, T, Hq, D] are rotated (RoPE) first; q goes to q_out. The parts: params.h, traits.cuh,
// validate.cuh, token.cuh (four values of a token), rope.cuh, quantise.cuh, encode.cuh, warp.cuh (what a warp reads and
// where it writes), append.cuh (the kernel), plan.h (CTAs of an entry).
#include <bit>
#include <cstdint>
#include <type_traits>

#include "core/kv_layout.h"
#include "kernels/backend.h"
#include "kernels/kv_cache/append.cuh"
#include "kernels/kv_cache/params.h"
#include "kernels/kv_cache/plan.h"
#include "kernels/kv_cache/validate.cuh"
#include "kernels/launch.h"
#include "kernels/warmup.h"
#include "tile/cta_sync.cuh"
#include "tile/element.cuh"

namespace rooftile::gpu {
namespace {

// One CTA an entry. Launched after `append` where the CTAs of an entry are no cluster; writes faults and lengths.
__global__ __launch_bounds__(256) void commit_lengths(const __grid_constant__ AppendParams p) {
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();
  const int b = static_cast<int>(blockIdx.x);
  AppendEntry e = load_entry(p, b);
  validate(p, b, e);
  report_fault(p, e, b);
  if (!__syncthreads_or(e.fault != KvFault::none) && threadIdx.x == 0 && e.tokens > 0)
    p.c.lengths[e.row] = e.length + e.tokens;
}

bool is_aligned(const void* p, std::uintptr_t bytes) { return std::bit_cast<std::uintptr_t>(p) % bytes == 0; }

TokenTensor token_tensor(const TensorView& t) {
  if (!t.given()) return {};
  bool vec4 = is_aligned(t.data, 8) && t.shape[3] % 4 == 0 && t.stride[3] == 1;
  for (int i = 0; i < 3; ++i) vec4 = vec4 && (t.shape[i] <= 1 || t.stride[i] % 4 == 0);
  return {t.data, t.stride[0], t.stride[1], t.stride[2], t.stride[3], vec4};
}

RopeTables rope_tables(const AppendArgs& a) {
  if (!a.cos.given()) return {};
  RopeTables r{.cos = a.cos.data,
               .sin = a.sin.data,
               .positions = a.positions.data,
               .cos_row = a.cos.stride[0],
               .cos_column = a.cos.stride[1],
               .sin_row = a.sin.stride[0],
               .sin_column = a.sin.stride[1],
               .position_batch = a.positions.stride[0],
               .position_token = a.positions.stride[1],
               .max_position = a.cos.shape[0],
               .pairs = static_cast<int>(a.cos.shape[1]),
               .fp32 = a.cos.dtype == DType::f32,
               .int64_positions = a.positions.dtype == DType::i64};
  const std::uintptr_t vec = r.fp32 ? 16 : 8;  // bytes
  r.vec4 = r.pairs % 4 == 0 && r.cos_column == 1 && r.sin_column == 1 && is_aligned(r.cos, vec) &&
           is_aligned(r.sin, vec) && (r.max_position <= 1 || (r.cos_row % 4 == 0 && r.sin_row % 4 == 0));
  return r;
}

bool vec4_pool(const KvCacheView& c) {
  if (!is_element_format(c.format)) return false;
  bool vec4 = c.head_dim % 4 == 0;
  for (const KvCacheView::Plane* plane : {&c.k, &c.v})
    vec4 = vec4 && is_aligned(plane->codes, 8) && plane->page_stride % 8 == 0 && plane->head_stride % 8 == 0 &&
           plane->token_stride % 8 == 0;
  return vec4;
}

using Kernel = void (*)(AppendParams);

template <class T, bool rotate>
Kernel kernel_for(KvFormat f) {
  constexpr KvFormat element = std::is_same_v<T, tile::bf16> ? KvFormat::bf16 : KvFormat::fp16;
  Kernel kernel = nullptr;
  with_kv_format(f, [&](auto format) {
    constexpr KvFormat stored = is_element_format(format()) ? element : format();
    kernel = append<T, stored, rotate>;
  });
  return kernel;
}

template <class T>
Kernel kernel_for(KvFormat f, bool rotate) {
  return rotate ? kernel_for<T, true>(f) : kernel_for<T, false>(f);
}

AppendParams params_of(const AppendArgs& a, const AppendPlan& plan) {
  const KvCacheView& c = *a.cache;
  return {.c = c,
          .k = token_tensor(a.k),
          .v = token_tensor(a.v),
          .q = token_tensor(a.q),
          .q_out = token_tensor(a.q_out),
          .rope = rope_tables(a),
          .rows = a.rows,
          .counts = a.counts,
          .batch = static_cast<int>(a.k.shape[0]),
          .tokens = static_cast<int>(a.k.shape[1]),
          .q_heads = a.cos.given() ? static_cast<int>(a.q.shape[2]) : 0,
          .log2_page_size = std::countr_zero(static_cast<unsigned>(c.page_size)),
          .log2_entry_ctas = std::countr_zero(static_cast<unsigned>(plan.entry_ctas)),
          .one_cluster = plan.is_one_launch(),
          .vec4_pool = vec4_pool(c),
          .vec4_ring = c.head_dim % 4 == 0 && is_aligned(c.ring_k, 8) && is_aligned(c.ring_v, 8)};
}

}  // namespace

KernelName kv_append(const char* op, const Context& ctx, const AppendArgs& a) {
  const KvCacheView& c = *a.cache;
  const AppendProblem problem{.batch = a.k.shape[0],
                              .tokens = a.k.shape[1],
                              .kv_heads = c.kv_heads,
                              .q_heads = a.cos.given() ? a.q.shape[2] : 0,
                              .head_dim = c.head_dim,
                              .kivi = is_kivi(c.format)};
  const DeviceScope scope(op, ctx);
  const AppendPlan plan =
      plan_append(op, problem, {.sms = scope.sms(), .largest_cluster = scope.largest_cluster()}, ctx.variant);
  const KernelName ran = kernel_of(op, c.dtype, c.format);
  if (problem.batch == 0 || problem.tokens == 0) return ran;

  const AppendParams p = params_of(a, plan);
  const Kernel kernel =
      (c.dtype == DType::bf16 ? kernel_for<tile::bf16> : kernel_for<tile::half>)(c.format, p.rope.cos != nullptr);
  scope.launch(kernel, problem.batch * plan.entry_ctas, append_warps * 32, 0, p, Overlap::with_previous,
               plan.cluster_size);
  if (!plan.is_one_launch()) scope.launch(commit_lengths, problem.batch, 256, 0, p, Overlap::with_previous);
  return ran;
}

void load_append_kernels(const char* op) {
  for (int f = static_cast<int>(KvFormat::fp16); f < kv_format_count; ++f)
    for (const bool rotate : {false, true}) {
      load_kernel(op, kernel_for<tile::half>(static_cast<KvFormat>(f), rotate));
      load_kernel(op, kernel_for<tile::bf16>(static_cast<KvFormat>(f), rotate));
    }
  load_kernel(op, commit_lengths);
}

}  // namespace rooftile::gpu
