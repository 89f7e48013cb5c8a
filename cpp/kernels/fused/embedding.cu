// SPDX-License-Identifier: Apache-2.0
// embedding: rows of a table.  ids [tokens], weight [vocabulary, H] -> y [tokens, H] = scale * weight[ids]
// T is fp16 or bf16, strides are any, ids are int32 or int64. A thread copies a vector of eight elements; it multiplies
// in fp32 unless the scale is 1. The row of an id outside the vocabulary becomes NaN.
// Bytes: 4 an element, and the ids. Flops: at most one. Many tokens are bound by memory, few by latency: the id and
// then its row.
// Sync: PDL; nothing is read or written before wait_for_previous_kernel.
#include "core/kernel_name.h"
#include "kernels/backend.h"
#include "kernels/fused/traits.cuh"
#include "kernels/warmup.h"
#include "tile/cta_sync.cuh"
#include "tile/strided_rows.cuh"

namespace rooftile::gpu {
namespace {

using namespace rooftile::tile;

struct EmbeddingParams {
  Rows ids, weight, y;
  std::int64_t threads, n, vocabulary;  // n: H
  Divisor64 vecs;                       // of a row
  float scale;
  bool wide_ids;  // int64
};

template <class T, bool vector>
__global__ __launch_bounds__(cta_threads, EmbeddingTraits<vector>::ctas_per_sm) void embedding_rows(
    const __grid_constant__ EmbeddingParams p) {
  let_next_kernel_start();
  if (thread_index() >= p.threads) return;
  const Division64 at = divide(thread_index(), p.vecs);
  const std::int64_t first = at.remainder * vec_size, id_offset = row_offset(p.ids, at.quotient);
  const Row y = row_at(p.y, at.quotient);
  wait_for_previous_kernel();
  const std::int64_t id = load_integer(p.ids.data, id_offset, p.wide_ids);
  uint4 x = quiet_nans();
  if (id >= 0 && id < p.vocabulary) {
    x = load_vec<vector>(row_at(p.weight, id), first, p.n);
    if (p.scale != 1) {
      Floats scaled = to_floats<T>(x);
#pragma unroll
      for (int i = 0; i < vec_size; ++i) scaled.at[i] *= p.scale;
      x = from_floats<T>(scaled);
    }
  }
  store_vec<vector>(y, first, p.n, x);
}

}  // namespace

KernelName embedding(const Context& ctx, const EmbeddingArgs& a) {
  const DeviceScope scope("embedding", ctx);
  const std::int64_t n = a.y.last(), vecs = vecs_of(n);
  EmbeddingParams p = {.threads = a.y.numel() == 0 ? 0 : a.y.rows() * vecs};
  if (p.threads > 0)
    p = {.ids = rows_of(a.ids, a.ids.ndim),
         .weight = rows_of(a.weight),
         .y = rows_of(a.y),
         .threads = p.threads,
         .n = n,
         .vocabulary = a.weight.shape[0],
         .vecs = Divisor64(vecs),
         .scale = a.scale,
         .wide_ids = a.ids.dtype == DType::i64};
  with_element16(a.y.dtype, [&](auto e) {
    with_vector(
        n,
        [&](auto vector) {
          scope.launch(embedding_rows<decltype(e), vector>, ctas_for(p.threads), cta_threads, 0, p,
                       Overlap::with_previous);
        },
        p.weight, p.y);
  });
  return kernel_name("cuda_", name(a.y.dtype));
}

void load_embedding_kernels(const char* op) {
  for_all([op](auto e, auto vector) { load_kernel(op, embedding_rows<decltype(e), vector>); });
}

}  // namespace rooftile::gpu
