// SPDX-License-Identifier: Apache-2.0
// rope: x [tokens, heads, D] -> y, of q and k in one launch. cos, sin [max_position, R] rotate dims i and i + R; dims
// from 2 R on are copied. T is fp16 or bf16, arithmetic is fp32, strides are any. A thread rotates eight pairs or
// copies eight elements. Bound by memory: 4 bytes and 6 flops an element, and the tables; few tokens by latency.
// Sync: PDL; nothing is read or written before wait_for_previous_kernel. y may be x: a thread writes only elements that
// it alone reads, after it has read them.
#include "tile/rope.cuh"

#include "core/kernel_name.h"
#include "kernels/backend.h"
#include "kernels/fused/traits.cuh"
#include "kernels/warmup.h"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {
namespace {

using namespace rooftile::tile;

struct RopeTensor {
  Rows x, y;
  std::int64_t threads, n;  // n: D
  Divisor64 vecs, heads;    // vectors of a row: of pairs, then of what is copied
};
struct RopeParams {
  RopeTensor q, k;
  Table cos, sin;
  Rows positions;
  std::int64_t pairs, max_position;
  bool wide_positions;  // int64
  bool few;             // few_ctas()
};

template <class T, bool vector, bool many>
__global__ __launch_bounds__(cta_threads, RopeTraits<vector, many>::ctas_per_sm) void rope_rotate(
    const __grid_constant__ RopeParams p) {
  if (p.few) let_next_kernel_start();
  const bool is_k = thread_index() >= p.q.threads;
  const RopeTensor& t = is_k ? p.k : p.q;
  const std::int64_t index = thread_index() - (is_k ? p.q.threads : 0);
  if (index >= t.threads) return;
  const Division64 at = divide(index, t.vecs);
  const std::int64_t position_offset = row_offset(p.positions, divide(at.quotient, t.heads).quotient);

  const Row x = row_at(t.x, at.quotient);
  Row y;
  if constexpr (!many) y = row_at(t.y, at.quotient);
  const std::int64_t first = at.remainder * vec_size, pair_end = (p.pairs + vec_size - 1) / vec_size * vec_size;
  wait_for_previous_kernel();
  const std::int64_t position = load_integer(p.positions.data, position_offset, p.wide_positions);
  const bool known = position >= 0 && position < p.max_position;
  if (first >= pair_end) {  // past the pairs
    const std::int64_t copied = first - pair_end + 2 * p.pairs;
    if constexpr (many) y = row_at(t.y, at.quotient);
    store_vec<vector>(y, copied, t.n, known ? load_vec<vector>(x, copied, t.n) : quiet_nans());
    return;
  }
  const Row x_high = {x.data + p.pairs * x.last_stride, x.last_stride};
  uint4 low = load_vec<vector>(x, first, p.pairs), high = load_vec<vector>(x_high, first, p.pairs);
  if (!p.few) let_next_kernel_start();
  if (known) {
    const Floats c = load_table<T, vector>(p.cos, position, first, p.pairs),
                 s = load_table<T, vector>(p.sin, position, first, p.pairs);
    keep_packed(low);
    keep_packed(high);
    const Floats a = to_floats<T>(low), b = to_floats<T>(high);
    Floats rotated_low, rotated_high;
#pragma unroll
    for (int i = 0; i < vec_size; ++i) {
      const RotatedPair pair = rotate(a.at[i], b.at[i], c.at[i], s.at[i]);
      rotated_low.at[i] = pair.low;
      rotated_high.at[i] = pair.high;
    }
    low = from_floats<T>(rotated_low);
    high = from_floats<T>(rotated_high);
  } else {
    low = high = quiet_nans();
  }
  if constexpr (many) y = row_at(t.y, at.quotient);
  const Row y_high = {y.data + p.pairs * y.last_stride, y.last_stride};
  store_vec<vector>(y, first, p.pairs, low);
  store_vec<vector>(y_high, first, p.pairs, high);
}

RopeTensor rope_tensor(const TensorView& x, const TensorView& y, std::int64_t pairs) {
  const std::int64_t n = x.last(), vecs = vecs_of(pairs) + vecs_of(n - 2 * pairs);
  const std::int64_t heads = x.shape[x.ndim - 2];
  if (x.numel() == 0) return {.threads = 0};
  return {.x = rows_of(x),
          .y = rows_of(y),
          .threads = x.rows() * vecs,
          .n = n,
          .vecs = Divisor64(vecs),
          .heads = Divisor64(heads)};
}

}  // namespace

KernelName rope(const char* op, const Context& ctx, const TensorView& q, const TensorView& k, const TensorView& cos,
                const TensorView& sin, const TensorView& positions, const TensorView& q_out, const TensorView& k_out) {
  const DeviceScope scope(op, ctx);
  const std::int64_t pairs = cos.shape[1];
  RopeParams p = {.q = rope_tensor(q, q_out, pairs),
                  .k = rope_tensor(k, k_out, pairs),
                  .cos = table_of(cos),
                  .sin = table_of(sin),
                  .positions = rows_of(positions, positions.ndim),
                  .pairs = pairs,
                  .max_position = cos.shape[0],
                  .wide_positions = positions.dtype == DType::i64};
  const bool even = q.last() % vec_size == 0 && k.last() % vec_size == 0;
  with_element16(q.dtype, [&](auto e) {
    with_vector(
        even ? pairs : 1,  // 1: no vectors, for a head_dim that is no multiple of 8 lets no row begin at one
        [&](auto vector) {
          const std::int64_t ctas = ctas_for(p.q.threads + p.k.threads);
          p.few = few_ctas(ctas, scope.sms());
          const bool many = vector && ctas > std::int64_t{RopeTraits<true, false>::ctas_per_sm} * scope.sms();
          scope.launch(many ? rope_rotate<decltype(e), vector, vector> : rope_rotate<decltype(e), vector, false>, ctas,
                       cta_threads, 0, p, Overlap::with_previous);
        },
        p.q.x, p.q.y, p.k.x, p.k.y, p.cos, p.sin);
  });
  return kernel_name("cuda_", name(q.dtype));
}

void load_rope_kernels(const char* op) {
  for_all([op](auto e, auto vector) {
    using T = decltype(e);
    load_kernel(op, rope_rotate<T, vector, false>);
    if constexpr (vector) load_kernel(op, rope_rotate<T, true, true>);
  });
}

}  // namespace rooftile::gpu
