// SPDX-License-Identifier: Apache-2.0
// The gated activations, softmax and merge_attention. Memory bounds all of them: every element is read once and
// written once (a softmax row past 16384 elements is read twice). T is fp16 or bf16, arithmetic is fp32, strides are
// any; strided_rows.cuh says how a row divides into 16-byte vectors and why the strides change no bit of a result.
//   gated    x [rows, 2H] = [gate | up] -> h [rows, H]          a thread computes a vector of h
//            6 bytes, some 15 flops an element
//   softmax  x [rows, N] -> y                                   1 to 32 lanes or a CTA reduce a row, as in norm.cu
//            4 bytes, some 12 flops an element
//   merge    out_a, out_b [rows, D], lse_a, lse_b [rows]        up to 32 lanes a row
//            6 bytes, 4 flops an element
// Few rows are bound by latency. With PDL a kernel starts and computes its addresses while the previous one ends; it
// reads and writes nothing before wait_for_previous_kernel.
// Sync: softmax: warps' partial results -> shared memory -> all warps. Outputs may alias inputs: a thread writes only
// elements that it alone reads, after it has read them. All lanes of a row read merge's lse, so it is written after a
// __syncwarp.
#include <utility>

#include "core/kernel_name.h"
#include "kernels/backend.h"
#include "kernels/fused/traits.cuh"
#include "kernels/launch.h"
#include "kernels/warmup.h"
#include "tile/activation.cuh"
#include "tile/cta_sync.cuh"
#include "tile/reduce.cuh"
#include "tile/strided_rows.cuh"

namespace rooftile::gpu {
namespace {

using namespace rooftile::tile;

// ---------------------------------------------------------------- gated activations

struct GatedParams {
  Rows gate, up, h;
  std::int64_t rows, n;
  Divisor64 vecs;  // of a row
  bool few;        // few_ctas()
};

template <class T, class Activation, bool vector, bool in_l1>
__global__ __launch_bounds__(cta_threads, GatedTraits<vector>::ctas_per_sm) void gated_activation(
    const __grid_constant__ GatedParams p) {
  if (p.few) let_next_kernel_start();
  const Division64 at = divide(thread_index(), p.vecs);
  if (at.quotient >= p.rows) return;
  const std::int64_t first = at.remainder * vec_size;
  const Row gate = row_at(p.gate, at.quotient), up_row = row_at(p.up, at.quotient);
  wait_for_previous_kernel();
  const uint4 g = load_vec<vector, in_l1>(gate, first, p.n), u = load_vec<vector, in_l1>(up_row, first, p.n);
  if (!p.few) let_next_kernel_start();
  Floats h = to_floats<T>(g);
  const Floats up = to_floats<T>(u);
#pragma unroll
  for (int i = 0; i < vec_size; ++i) h.at[i] = Activation::of(h.at[i]) * up.at[i];
  store_vec<vector>(row_at(p.h, at.quotient), first, p.n, from_floats<T>(h));
}

template <class T, bool vector, class F>
void with_gated(Gate gate, bool in_l1, F&& f) {
  const auto with_activation = [&](auto activation) {
    using Activation = decltype(activation);
    if (vector && in_l1) f(gated_activation<T, Activation, vector, vector>);
    else f(gated_activation<T, Activation, vector, false>);
  };
  if (gate == Gate::silu) with_activation(Silu{});
  else if (gate == Gate::gelu_tanh) with_activation(GeluTanh{});
  else with_activation(GeluErf{});
}

// ---------------------------------------------------------------- softmax

struct SoftmaxParams {
  Rows x, y;
  std::int64_t rows, n;
  int lanes, stride;  // of the RowPlan
  bool few;           // few_ctas()
};

template <class T>
constexpr std::uint16_t minus_infinity = std::is_same_v<T, half> ? 0xfc00 : 0xff80;

template <class T, int vecs, int coarsening, bool vector>
__global__ __launch_bounds__(row_threads, SoftmaxTraits<vecs, vector>::ctas_per_sm) void softmax_rows(
    const __grid_constant__ SoftmaxParams p) {
  __shared__ WarpPartials maxima[1], sums[1];
  if (p.few) let_next_kernel_start();
  const RowThread at = row_thread(p.lanes, blockIdx.x);
  const std::int64_t row = at.row < p.rows ? at.row : 0;  // lanes without a row reduce with the others
  const int n = at.row < p.rows ? static_cast<int>(p.n) : 0;
  const auto first = [&](int k) { return first_element<coarsening>(at, p.lanes, p.stride, k); };
  const Row x = row_at(p.x, row), y = row_at(p.y, row);
  wait_for_previous_kernel();
  uint4 raw[vecs];  // (vecs) vectors of 8 elements; elements past the row's end are -inf, their exponentials 0
#pragma unroll
  for (int k = 0; k < vecs; ++k) raw[k] = load_vec<vector>(x, first(k), n, minus_infinity<T>);
  if (!p.few) let_next_kernel_start();
  float highest[coarsening][1], total[coarsening][1] = {};  // as reduce_row takes them
#pragma unroll
  for (int c = 0; c < coarsening; ++c) highest[c][0] = Max::identity;
#pragma unroll
  for (int k = 0; k < vecs; ++k) {
    const Floats x_k = to_floats<T>(raw[k]);
#pragma unroll
    for (int i = 0; i < vec_size; ++i) highest[k % coarsening][0] = fmaxf(highest[k % coarsening][0], x_k.at[i]);
    keep_packed(raw[k]);
  }
  reduce_row(highest, p.lanes, maxima, Max{});
  Floats e[vecs];  // (vecs, 8) exp(x - max)
#pragma unroll
  for (int k = 0; k < vecs; ++k) {
    e[k] = to_floats<T>(raw[k]);
    float part = 0;
#pragma unroll
    for (int i = 0; i < vec_size; ++i) part += e[k].at[i] = expf(e[k].at[i] - highest[0][0]);
    total[k % coarsening][0] += part;
  }
  reduce_row(total, p.lanes, sums, Sum{});
  const float scale = 1.0f / total[0][0];
#pragma unroll
  for (int k = 0; k < vecs; ++k) {
#pragma unroll
    for (int i = 0; i < vec_size; ++i) e[k].at[i] *= scale;
    store_vec<vector>(y, first(k), n, from_floats<T>(e[k]));
  }
}

// One CTA a row that does not fit in registers: one pass for the maximum and the sum (online softmax), one to write.
template <class T, bool vector>
__global__ __launch_bounds__(row_threads) void softmax_long_rows(const __grid_constant__ SoftmaxParams p) {
  __shared__ WarpPartials maxima[1], sums[1];
  let_next_kernel_start();
  const std::int64_t begin = threadIdx.x * vec_size, step = blockDim.x * vec_size;
  const Row x = row_at(p.x, blockIdx.x), y = row_at(p.y, blockIdx.x);
  wait_for_previous_kernel();
  float highest = Max::identity, total = 0;  // of this thread's elements so far
  for (std::int64_t first = begin; first < p.n; first += step) {
    const Floats v = to_floats<T>(load_vec<vector>(x, first, p.n));
    float top = highest;
#pragma unroll
    for (int i = 0; i < vec_size; ++i)
      if (inside<vector>(i, p.n - first)) top = fmaxf(top, v.at[i]);
    const float base = top == Max::identity ? 0.0f : top;  // -inf so far: exp(-inf - 0) is 0; a NaN still goes through
    float part = 0;
#pragma unroll
    for (int i = 0; i < vec_size; ++i) part += inside<vector>(i, p.n - first) ? expf(v.at[i] - base) : 0.0f;
    total = fmaf(total, expf(highest - base), part);
    highest = top;
  }
  float maximum[1][1] = {{highest}};  // as reduce_row takes it
  reduce_row(maximum, p.lanes, maxima, Max{});
  const float top = maximum[0][0];
  // A thread that saw only -inf keeps its total (0 or NaN) unscaled. A row of only -inf must become NaN.
  float sum[1][1] = {{highest == Max::identity && top != Max::identity ? total : total * expf(highest - top)}};
  reduce_row(sum, p.lanes, sums, Sum{});
  const float scale = 1.0f / sum[0][0];
  for (std::int64_t first = begin; first < p.n; first += step) {
    Floats v = to_floats<T>(load_vec<vector>(x, first, p.n));
#pragma unroll
    for (int i = 0; i < vec_size; ++i) v.at[i] = expf(v.at[i] - top) * scale;
    store_vec<vector>(y, first, p.n, from_floats<T>(v));
  }
}

template <class T, bool vector, class F>
void with_softmax(int vecs, int coarsening, F&& f) {
  constexpr int coarse = vector ? 2 : 1;
  if (vecs == 2) f(softmax_rows<T, 2, 1, vector>);
  else if (vecs == 0) f(softmax_long_rows<T, vector>);
  else if (coarsening == 1) f(softmax_rows<T, 4, 1, vector>);
  else f(softmax_rows<T, 4, coarse, vector>);
}

// ---------------------------------------------------------------- merge

struct MergeParams {
  Rows out_a, out_b, out, lse_a, lse_b, lse;  // lse may be absent
  std::int64_t rows, n;
  int lanes;
  bool few;  // few_ctas()
};

__device__ __forceinline__ float* lse_at(const Rows& r, std::int64_t row) {
  return cute::recast_ptr<float>(r.data) + row_offset(r, row);
}

template <class T, bool vector>
__global__ __launch_bounds__(cta_threads,
                             MergeTraits<vector>::ctas_per_sm) void merge_rows(const __grid_constant__ MergeParams p) {
  if (p.few) let_next_kernel_start();
  const RowThread at = row_thread(p.lanes, blockIdx.x);
  const std::int64_t row = at.row < p.rows ? at.row : 0;
  const std::int64_t n = at.row < p.rows ? p.n : 0, begin = at.thread * vec_size, step = p.lanes * vec_size;
  const Row out_a = row_at(p.out_a, row), out_b = row_at(p.out_b, row);
  const float *const lse_a = lse_at(p.lse_a, row), *const lse_b = lse_at(p.lse_b, row);
  wait_for_previous_kernel();
  uint4 raw_a = load_vec<vector>(out_a, begin, n), raw_b = load_vec<vector>(out_b, begin, n);
  const float a = *lse_a, b = *lse_b;
  if (!p.few) let_next_kernel_start();
  const Row out = row_at(p.out, row);
  const bool only_a = b == Max::identity, only_b = a == Max::identity;  // the lse of a side without keys is -inf
  const float top = a > b ? a : b, weight_a = expf(a - top), weight_b = expf(b - top), total = weight_a + weight_b;
#pragma unroll 1
  for (std::int64_t first = begin; first < n; first += step) {
    if (first != begin) raw_a = load_vec<vector>(out_a, first, n), raw_b = load_vec<vector>(out_b, first, n);
    Floats x = to_floats<T>(raw_a);
    const Floats y = to_floats<T>(raw_b);
#pragma unroll
    for (int i = 0; i < vec_size; ++i) x.at[i] = __fdividef(fmaf(y.at[i], weight_b, x.at[i] * weight_a), total);
    const uint4 merged = only_a && only_b ? uint4{} : only_a ? raw_a : only_b ? raw_b : from_floats<T>(x);
    store_vec<vector>(out, first, n, merged);
  }
  __syncwarp();  // all lanes -> lane 0: lse_a and lse_b are read; lse may alias them
  if (p.lse.data && at.row < p.rows && at.thread == 0)
    *lse_at(p.lse, row) = only_a ? a : only_b ? b : top + logf(total);
}

}  // namespace

KernelName gated(const char* op, const Context& ctx, const TensorView& x, const TensorView& h, Gate gate) {
  const DeviceScope scope(op, ctx);
  TensorView up = x;
  up.data = x.as<std::uint16_t>() + h.last() * x.last_stride();
  const std::int64_t vecs = vecs_of(h.last()), ctas = ctas_for(h.rows() * vecs);
  const GatedParams p = {.gate = rows_of(x),
                         .up = rows_of(up),
                         .h = rows_of(h),
                         .rows = h.rows(),
                         .n = h.last(),
                         .vecs = Divisor64(vecs),
                         .few = few_ctas(ctas, scope.sms())};
  with_element16(x.dtype, [&](auto e) {
    with_vector(
        p.n,
        [&](auto vector) {
          with_gated<decltype(e), vector>(gate, reads_past_l2(x.numel() * 2), [&](auto kernel) {
            scope.launch(kernel, ctas, cta_threads, 0, p, Overlap::with_previous);
          });
        },
        p.gate, p.up, p.h);
  });
  return kernel_name("cuda_", name(x.dtype));
}

KernelName softmax(const Context& ctx, const TensorView& x, const TensorView& y) {
  const DeviceScope scope("softmax", ctx);
  SoftmaxParams p = {.x = rows_of(x), .y = rows_of(y), .rows = x.numel() == 0 ? 0 : x.rows(), .n = x.last()};
  with_element16(x.dtype, [&](auto e) {
    with_vector(
        p.n,
        [&](auto vector) {
          const RowPlan plan = plan_rows<vector>(p.n, p.rows, scope.sms());
          const std::int64_t ctas = (p.rows + plan.rows() - 1) / plan.rows();
          p.lanes = plan.lanes, p.stride = plan.stride, p.few = few_ctas(ctas, scope.sms());
          with_softmax<decltype(e), vector>(plan.vecs, plan.coarsening(), [&](auto kernel) {
            scope.launch(kernel, ctas, plan.threads, 0, p, Overlap::with_previous);
          });
        },
        p.x, p.y);
  });
  return kernel_name("cuda_", name(x.dtype));
}

KernelName merge_attention(const Context& ctx, const TensorView& out_a, const TensorView& lse_a,
                           const TensorView& out_b, const TensorView& lse_b, const TensorView& out,
                           const TensorView& lse) {
  const DeviceScope scope("merge_attention", ctx);
  const auto scalars = [](const TensorView& t) { return rows_of(t, t.ndim); };
  const std::int64_t n = out.last();
  const int lanes =
      n >= 32 * vec_size ? 32 : static_cast<int>(std::bit_ceil(static_cast<unsigned>(n > 0 ? vecs_of(n) : 1)));
  const MergeParams p = {.out_a = rows_of(out_a),
                         .out_b = rows_of(out_b),
                         .out = rows_of(out),
                         .lse_a = scalars(lse_a),
                         .lse_b = scalars(lse_b),
                         .lse = scalars(lse),
                         .rows = out.rows(),
                         .n = n,
                         .lanes = lanes,
                         .few = few_ctas(ctas_for(out.rows() * lanes), scope.sms())};
  with_element16(out.dtype, [&](auto e) {
    with_vector(
        n,
        [&](auto vector) {
          scope.launch(merge_rows<decltype(e), vector>, ctas_for(p.rows * lanes), cta_threads, 0, p,
                       Overlap::with_previous);
        },
        p.out_a, p.out_b, p.out);
  });
  return kernel_name("cuda_", name(out.dtype));
}

void load_elementwise_kernels(const char* op) {
  const auto load = [op](auto kernel) { load_kernel(op, kernel); };
  for_all([&](auto e, auto vector) {
    using T = decltype(e);
    for (Gate gate : {Gate::silu, Gate::gelu_tanh, Gate::gelu_erf}) {
      with_gated<T, vector>(gate, false, load);
      if (vector) with_gated<T, vector>(gate, true, load);
    }
    for (const auto& [vecs, coarsening] : {std::pair(0, 1), {2, 1}, {4, 1}, {4, 2}})
      with_softmax<T, vector>(vecs, coarsening, load);
    load(merge_rows<T, vector>);
  });
}

}  // namespace rooftile::gpu
