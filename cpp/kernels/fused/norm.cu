// SPDX-License-Identifier: Apache-2.0
// rms_norm, layer_norm and their add_ variants over the last dimension.
//   x, residual, y, res [rows, N] of T, any strides   weight, bias [N] of T or fp32
//   residual, res, weight and bias are optional
//   s = x (+ residual, rounded to T and stored to res)   y = (s - mean) * rsqrt(var + eps) * weight + bias
// 1 to 32 lanes of a warp reduce a row up to N = 1024 (a CTA holds several rows); a CTA reduces a longer row. A thread
// keeps its 16 or 32 elements packed in registers, so up to N = 16384 a row is read once; longer rows are read again,
// from L2. All loads are issued before the first value is used.
// Bytes: 4 an element, 8 with the residual. Flops: 4 to 9 an element. Memory is the roof; below some 64 rows, latency.
// Statistics are fp32: the sum of squares is of deviations from the mean, and the sum of the deviations corrects the
// mean, so rows far from zero keep their digits. N alone fixes the order of every sum.
// Sync: warps' partial sums -> shared memory -> all warps, once a sum. y and res may alias x or residual: a thread
// writes only elements that it alone reads, after it has read them.
#include "core/kernel_name.h"
#include "kernels/backend.h"
#include "kernels/launch.h"
#include "kernels/warmup.h"
#include "tile/reduce.cuh"
#include "tile/strided_rows.cuh"

namespace rooftile::gpu {
namespace {

using namespace rooftile::tile;

struct NormParams {
  Rows x, residual, y, res;
  Table weight, bias;
  std::int64_t rows, n;
  int lanes;
  float eps;
  bool subtract_mean;
};

struct Moments {
  float mean, error;  // mean + error: the mean in more digits than one float holds
  float scale;
};

template <class T>
__device__ __forceinline__ uint4 add(uint4 a, uint4 b) {
  const Floats x = to_floats<T>(a), r = to_floats<T>(b);
  Floats s;
#pragma unroll
  for (int i = 0; i < vec_size; ++i) s.at[i] = x.at[i] + r.at[i];
  return from_floats<T>(s);
}

__device__ __forceinline__ float sum(const Floats& x) {  // elements past the row's end are zero
  float total = 0;
#pragma unroll
  for (int i = 0; i < vec_size; ++i) total += x.at[i];
  return total;
}

// Sums of the deviations from the mean and of their squares, over the elements before the row's end.
struct Deviations {
  float sum = 0, squares = 0;
  template <bool vector, class Index>
  __device__ __forceinline__ void add(const Floats& x, float mean, Index left) {
    float a = 0, b = 0;
#pragma unroll
    for (int i = 0; i < vec_size; ++i) {
      const float d = inside<vector>(i, left) ? x.at[i] - mean : 0.0f;
      a += d;
      b = fmaf(d, d, b);
    }
    sum += a;
    squares += b;
  }
};

__device__ __forceinline__ Moments moments(const NormParams& p, float mean, float sum, float squares) {
  const float n = static_cast<float>(p.n), error = p.subtract_mean ? sum / n : 0.0f;
  const float variance = squares / n - error * error;
  return {mean, error, rsqrtf((variance < 0 ? 0.0f : variance) + p.eps)};  // unlike fmaxf, the comparison keeps a NaN
}

// Writes y for elements [first, first + 8) of s.
template <class T, bool vector, class Index>
__device__ __forceinline__ void write(const NormParams& p, const Row& y, uint4 s, const Moments& m, Index first,
                                      Index n) {
  Floats v = to_floats<T>(s);
#pragma unroll
  for (int i = 0; i < vec_size; ++i) v.at[i] = (v.at[i] - m.mean - m.error) * m.scale;
  if (p.weight.data) {
    const Floats w = load_table<T, vector>(p.weight, 0, first, n);
#pragma unroll
    for (int i = 0; i < vec_size; ++i) v.at[i] *= w.at[i];
  }
  if (p.bias.data) {
    const Floats b = load_table<T, vector>(p.bias, 0, first, n);
#pragma unroll
    for (int i = 0; i < vec_size; ++i) v.at[i] += b.at[i];
  }
  store_vec<vector>(y, first, n, from_floats<T>(v));
}

template <class T, int vecs, bool vector>
__global__ __launch_bounds__(512,
                             vector ? (vecs == 2 ? 3 : 2) : 1) void norm_rows(const __grid_constant__ NormParams p) {
  __shared__ float shared[3][32];  // (mean, its correction, squares; warps)
  const RowThread at = row_thread(p.lanes);
  const std::int64_t row = at.row < p.rows ? at.row : 0;  // lanes without a row reduce with the others
  const int n = at.row < p.rows ? static_cast<int>(p.n) : 0;
  const auto first = [&](int k) { return (at.thread + k * p.lanes) * vec_size; };

  uint4 s[vecs], r[vecs];  // (vecs) vectors of 8 elements: x, then x + residual; residual
  const Row x = row_at(p.x, row);
#pragma unroll
  for (int k = 0; k < vecs; ++k) s[k] = load_vec<vector>(x, first(k), n);
  if (p.residual.data) {
    const Row residual = row_at(p.residual, row);
#pragma unroll
    for (int k = 0; k < vecs; ++k) r[k] = load_vec<vector>(residual, first(k), n);
  }
#pragma unroll
  for (int k = 0; k < vecs; ++k) {
    prefetch_table(p.weight, first(k), n);
    prefetch_table(p.bias, first(k), n);
  }
  if (p.residual.data) {
    const Row res = row_at(p.res, row);
#pragma unroll
    for (int k = 0; k < vecs; ++k) store_vec<vector>(res, first(k), n, s[k] = add<T>(s[k], r[k]));
  }

  float mean = 0;
  if (p.subtract_mean) {
#pragma unroll
    for (int k = 0; k < vecs; ++k) {
      mean += sum(to_floats<T>(s[k]));
      keep_packed(s[k]);
    }
    mean = reduce_row(mean, p.lanes, shared[0], Sum{}) / static_cast<float>(p.n);
  }
  Deviations d;
#pragma unroll
  for (int k = 0; k < vecs; ++k) {
    d.add<vector>(to_floats<T>(s[k]), mean, n - first(k));
    keep_packed(s[k]);
  }
  if (p.subtract_mean) d.sum = reduce_row(d.sum, p.lanes, shared[1], Sum{});
  const Moments m = moments(p, mean, d.sum, reduce_row(d.squares, p.lanes, shared[2], Sum{}));
  const Row y = row_at(p.y, row);
#pragma unroll
  for (int k = 0; k < vecs; ++k) write<T, vector>(p, y, s[k], m, first(k), n);
}

// One CTA a row that does not fit in registers: one pass over the row for each statistic, and one to write.
template <class T, bool vector>
__global__ __launch_bounds__(512) void norm_long_rows(const __grid_constant__ NormParams p) {
  __shared__ float shared[3][32];  // (mean, its correction, squares; warps)
  const std::int64_t row = blockIdx.x, begin = threadIdx.x * vec_size, step = blockDim.x * vec_size;
  const Row y = row_at(p.y, row);
  Row s = row_at(p.x, row);
  if (p.residual.data) {
    const Row residual = row_at(p.residual, row), res = row_at(p.res, row);
#pragma unroll 4
    for (std::int64_t i = begin; i < p.n; i += step)
      store_vec<vector>(res, i, p.n, add<T>(load_vec<vector>(s, i, p.n), load_vec<vector>(residual, i, p.n)));
    s = res;
  }
  float mean = 0;
  if (p.subtract_mean) {
#pragma unroll 4
    for (std::int64_t i = begin; i < p.n; i += step) mean += sum(to_floats<T>(load_vec<vector>(s, i, p.n)));
    mean = reduce_row(mean, p.lanes, shared[0], Sum{}) / static_cast<float>(p.n);
  }
  Deviations d;
#pragma unroll 4
  for (std::int64_t i = begin; i < p.n; i += step)
    d.add<vector>(to_floats<T>(load_vec<vector>(s, i, p.n)), mean, p.n - i);
  if (p.subtract_mean) d.sum = reduce_row(d.sum, p.lanes, shared[1], Sum{});
  const Moments m = moments(p, mean, d.sum, reduce_row(d.squares, p.lanes, shared[2], Sum{}));
  for (std::int64_t i = begin; i < p.n; i += step) write<T, vector>(p, y, load_vec<vector>(s, i, p.n), m, i, p.n);
}

// f(kernel) for one dtype: the kernel that holds `vecs` vectors of a row in each thread's registers.
template <class T, bool vector, class F>
void with_kernel(int vecs, F&& f) {
  if (vecs == 2) f(norm_rows<T, 2, vector>);
  else if (vecs == 4) f(norm_rows<T, 4, vector>);
  else f(norm_long_rows<T, vector>);
}

}  // namespace

KernelName norm(const char* op, const Context& ctx, const NormArgs& a) {
  const DeviceScope scope(op, ctx);
  const RowPlan plan = plan_row(a.x.last());
  const NormParams p = {.x = rows_of(a.x),
                        .residual = rows_of(a.residual),
                        .y = rows_of(a.y),
                        .res = rows_of(a.res),
                        .weight = table_of(a.weight),
                        .bias = table_of(a.bias),
                        .rows = a.x.rows(),
                        .n = a.x.last(),
                        .lanes = plan.lanes,
                        .eps = a.eps,
                        .subtract_mean = a.subtract_mean};
  with_element16(a.x.dtype, [&](auto e) {
    with_vector(
        p.n,
        [&](auto vector) {
          with_kernel<decltype(e), vector>(plan.vecs, [&](auto kernel) {
            scope.launch(kernel, (p.rows + plan.rows() - 1) / plan.rows(), plan.threads, 0, p);
          });
        },
        p.x, p.residual, p.y, p.res, p.weight, p.bias);
  });
  return kernel_name("cuda_", name(a.x.dtype));
}

void load_norm_kernels(const char* op) {
  const auto load = [op](auto kernel) { load_kernel(op, kernel); };
  for (int vecs : {0, 2, 4}) {
    with_kernel<half, true>(vecs, load);
    with_kernel<half, false>(vecs, load);
    with_kernel<bf16, true>(vecs, load);
    with_kernel<bf16, false>(vecs, load);
  }
}

}  // namespace rooftile::gpu
