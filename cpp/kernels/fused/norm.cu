// SPDX-License-Identifier: Apache-2.0
// rms_norm, layer_norm and their add_ variants over the last dimension, and the pair of rms_norms of qk_rms_norm.
//   x, residual, y, res [rows, N] of T, any strides   weight, bias [N] of T or fp32
//   residual, res, weight and bias are optional
//   s = x (+ residual, rounded to T and stored to res)   y = (s - mean) * rsqrt(var + eps) * weight + bias
// rms_norm has no mean and no bias, and adds weight_offset to the weight. A pair has heads of q as rows of the first
// CTAs and heads of k as rows of the others.
// 1 to 32 lanes of a warp reduce a row up to N = 1024 (a CTA holds several rows); a CTA reduces a longer row. A thread
// keeps its 16 or 32 elements packed in registers, so up to N = 16384 a row is read once; longer rows are read again,
// from L2. With many rows a thread does the work of two (coarsening); the sums stay the same. All loads of a row are
// issued before the first value is used. With few rows (at most a CTA an SM) those of weights and biases are issued
// with them; else their registers would cost a CTA an SM: rms_norm loads its weights while the row is reduced,
// layer_norm afterwards.
// Bytes: 4 an element, 8 with the residual. Flops: 4 to 9 an element. Many rows are bound by memory: rms_norm and
// layer_norm are separate kernels, because the instructions of the mean would keep rows of 4096 elements below that
// bound.
// Below some 64 rows latency bounds: the kernel's start, one load, one barrier (layer_norm two), one store. With PDL a
// kernel starts, computes its addresses and prefetches its weights into L2 while the previous one ends; it reads and
// writes nothing before wait_for_previous_kernel.
// Statistics are fp32: the sum of squares is of deviations from the mean, and the sum of the deviations corrects the
// mean, so rows far from zero keep their digits. N alone fixes the order of every sum.
// Sync: warps' partial sums -> shared memory -> all warps, once for the mean and once for both sums of deviations. y
// and res may alias x or residual: a thread writes only elements that it alone reads, after it has read them.
#include <tuple>

#include "core/kernel_name.h"
#include "kernels/backend.h"
#include "kernels/fused/traits.cuh"
#include "kernels/launch.h"
#include "kernels/warmup.h"
#include "tile/cta_sync.cuh"
#include "tile/reduce.cuh"
#include "tile/strided_rows.cuh"

namespace rooftile::gpu {
namespace {

using namespace rooftile::tile;

struct NormParams {
  Rows x, residual, y, res;
  Table weight, bias;
  std::int64_t rows, n;
  float eps, weight_offset;
  int lanes, stride;  // of the RowPlan
  bool few;           // few_ctas()
};

struct Moments {
  float mean, error;  // mean + error: the mean in more digits than one float holds; both 0 without a mean
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

// This thread's sums of the squares of the deviations from the mean and, with a mean, of the deviations.
template <bool subtract_mean, int coarsening = 1>
struct Deviations {
  float sums[coarsening][1 + subtract_mean] = {};  // squares; deviations

  // x: vector k of the thread, of which `left` elements lie inside the row; the others are zero.
  template <bool vector, class Index>
  __device__ __forceinline__ void add(const Floats& x, float mean, Index left, int k = 0) {
    float deviations = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < vec_size; ++i) {
      const float d = subtract_mean ? x.at[i] - (inside<vector>(i, left) ? mean : 0.0f) : x.at[i];
      deviations += d;
      squares = fmaf(d, d, squares);
    }
    sums[k % coarsening][0] += squares;
    if constexpr (subtract_mean) sums[k % coarsening][1] += deviations;
  }
  // After the sums of all threads of the row are reduced.
  __device__ __forceinline__ Moments moments(const NormParams& p, float mean) const {
    const float n = static_cast<float>(p.n);
    float error = 0;
    if constexpr (subtract_mean) error = sums[0][1] / n;
    const float variance = sums[0][0] / n - error * error;
    return {mean, error, rsqrtf((variance < 0 ? 0.0f : variance) + p.eps)};  // unlike fmaxf, the comparison keeps a NaN
  }
};

// y of 8 elements of s. weight and bias: functions that return the same elements of the tables; not called if the call
// has no such table.
template <class T, bool subtract_mean, class Weight, class Bias>
__device__ __forceinline__ uint4 normalized(const NormParams& p, uint4 s, const Moments& m, Weight&& weight,
                                            Bias&& bias) {
  Floats v = to_floats<T>(s);
#pragma unroll
  for (int i = 0; i < vec_size; ++i) {
    if constexpr (subtract_mean) v.at[i] = v.at[i] - m.mean - m.error;
    v.at[i] *= m.scale;
  }
  if (p.weight.data) {
    Floats w = weight();
    if (!subtract_mean && p.weight_offset != 0)  // an addition more costs 1 to 2 % with many rows
#pragma unroll
      for (int i = 0; i < vec_size; ++i) w.at[i] += p.weight_offset;
#pragma unroll
    for (int i = 0; i < vec_size; ++i) v.at[i] = __fmul_rn(v.at[i], w.at[i]);
  }
  if (p.bias.data) {
    const Floats b = bias();
#pragma unroll
    for (int i = 0; i < vec_size; ++i) v.at[i] = __fadd_rn(v.at[i], b.at[i]);
  }
  return from_floats<T>(v);
}

// The rows of CTA `cta` of the norm.
template <class T, int vecs, int coarsening, bool subtract_mean, Tables tables, bool vector, bool in_l1>
__device__ __forceinline__ void norm_rows_of(const NormParams& p, unsigned cta) {
  __shared__ WarpPartials of_mean[1], of_deviations[1 + subtract_mean];
  if (p.few) let_next_kernel_start();
  const RowThread at = row_thread(p.lanes, cta);
  const std::int64_t row = at.row < p.rows ? at.row : 0;  // lanes without a row reduce with the others
  const int n = at.row < p.rows ? static_cast<int>(p.n) : 0;
  const auto first = [&](int k) { return first_element<coarsening>(at, p.lanes, p.stride, k); };
  if (cta == 0) {
#pragma unroll
    for (int k = 0; k < vecs; ++k) {
      prefetch_table(p.weight, first(k), n);
      prefetch_table(p.bias, first(k), n);
    }
  }
  const Row x = row_at(p.x, row), residual = row_at(p.residual, row), res = row_at(p.res, row), y = row_at(p.y, row);
  wait_for_previous_kernel();

  uint4 s[vecs], r[vecs];          // (vecs) vectors of 8 elements: x, then x + residual; residual
  uint4 weight[vecs], bias[vecs];  // (vecs) vectors of 8 elements, where loaded before their use
#pragma unroll
  for (int k = 0; k < vecs; ++k) s[k] = load_vec<vector, in_l1>(x, first(k), n);
  const auto load_weights = [&] {
#pragma unroll
    for (int k = 0; k < vecs; ++k) weight[k] = load_early<vector>(p.weight, first(k), n);
  };
  if constexpr (tables == Tables::with_row) {
    load_weights();
#pragma unroll
    for (int k = 0; k < vecs; ++k) bias[k] = load_early<vector>(p.bias, first(k), n);
  }
  if (p.residual.data) {
#pragma unroll
    for (int k = 0; k < vecs; ++k) r[k] = load_vec<vector, in_l1>(residual, first(k), n);
#pragma unroll
    for (int k = 0; k < vecs; ++k) {
      s[k] = add<T>(s[k], r[k]);
      if (coarsening == 1) store_vec<vector>(res, first(k), n, s[k]);
    }
  }
  if (!p.few) let_next_kernel_start();

  float mean = 0;
  if constexpr (subtract_mean) {
    float total[coarsening][1] = {};  // as reduce_row takes it
#pragma unroll
    for (int k = 0; k < vecs; ++k) {
      total[k % coarsening][0] += sum(to_floats<T>(s[k]));
      keep_packed(s[k]);
    }
    reduce_row(total, p.lanes, of_mean, Sum{});
    mean = total[0][0] / static_cast<float>(p.n);
  }
  Deviations<subtract_mean, coarsening> d;
#pragma unroll
  for (int k = 0; k < vecs; ++k) {
    d.template add<vector>(to_floats<T>(s[k]), mean, n - first(k), k);
    keep_packed(s[k]);
  }
  if constexpr (tables == Tables::while_reducing) load_weights();
  // Unpacks a vector here, not where it was loaded: the thread would wait for the load there.
  const auto early_vec = [&](const Table& table, uint4& vec, int k) {
    if constexpr (vector) keep_packed(vec);
    return table_vec<T, vector>(table, vec, first(k), n);
  };
  const auto weight_of = [&](int k) {
    if constexpr (tables == Tables::after_reducing) return load_table<T, vector>(p.weight, 0, first(k), n);
    else return early_vec(p.weight, weight[k], k);
  };
  const auto bias_of = [&](int k) {
    if constexpr (tables == Tables::with_row) return early_vec(p.bias, bias[k], k);
    else return load_table<T, vector>(p.bias, 0, first(k), n);
  };
  reduce_row(d.sums, p.lanes, of_deviations, Sum{});
  const Moments m = d.moments(p, mean);
  if (coarsening == 2 && p.residual.data)
#pragma unroll
    for (int k = 0; k < vecs; ++k) store_vec<vector>(res, first(k), n, s[k]);
#pragma unroll
  for (int k = 0; k < vecs; ++k)
    store_vec<vector>(
        y, first(k), n,
        normalized<T, subtract_mean>(p, s[k], m, [&] { return weight_of(k); }, [&] { return bias_of(k); }));
}

template <class T, int vecs, int coarsening, bool subtract_mean, Tables tables, bool vector, bool in_l1>
__global__ __launch_bounds__(row_threads, NormTraits<vecs, tables, vector>::ctas_per_sm) void norm_rows(
    const __grid_constant__ NormParams p) {
  norm_rows_of<T, vecs, coarsening, subtract_mean, tables, vector, in_l1>(p, blockIdx.x);
}

struct NormPairParams {
  NormParams first, second;
  unsigned first_ctas;
};
template <class T, int vecs, Tables tables, bool vector>
__global__ __launch_bounds__(pair_threads, NormPairTraits<vecs, tables, vector>::ctas_per_sm) void norm_row_pair(
    const __grid_constant__ NormPairParams p) {
  const bool is_second = blockIdx.x >= p.first_ctas;
  norm_rows_of<T, vecs, 1, false, tables, vector, false>(is_second ? p.second : p.first,
                                                         blockIdx.x - (is_second ? p.first_ctas : 0));
}

// One CTA a row that does not fit in registers: one pass over the row for each statistic, and one to write.
template <class T, bool subtract_mean, bool vector>
__global__ __launch_bounds__(row_threads) void norm_long_rows(const __grid_constant__ NormParams p) {
  __shared__ WarpPartials of_mean[1], of_deviations[1 + subtract_mean];
  let_next_kernel_start();
  const std::int64_t row = blockIdx.x, begin = threadIdx.x * vec_size, step = blockDim.x * vec_size;
  const Row y = row_at(p.y, row);
  Row s = row_at(p.x, row);
  wait_for_previous_kernel();
  if (p.residual.data) {
    const Row residual = row_at(p.residual, row), res = row_at(p.res, row);
#pragma unroll 4
    for (std::int64_t i = begin; i < p.n; i += step)
      store_vec<vector>(res, i, p.n, add<T>(load_vec<vector>(s, i, p.n), load_vec<vector>(residual, i, p.n)));
    s = res;
  }
  float mean = 0;
  if constexpr (subtract_mean) {
    float total[1][1] = {};  // as reduce_row takes it
#pragma unroll 4
    for (std::int64_t i = begin; i < p.n; i += step) total[0][0] += sum(to_floats<T>(load_vec<vector>(s, i, p.n)));
    reduce_row(total, p.lanes, of_mean, Sum{});
    mean = total[0][0] / static_cast<float>(p.n);
  }
  Deviations<subtract_mean> d;
#pragma unroll 4
  for (std::int64_t i = begin; i < p.n; i += step)
    d.template add<vector>(to_floats<T>(load_vec<vector>(s, i, p.n)), mean, p.n - i);
  reduce_row(d.sums, p.lanes, of_deviations, Sum{});
  const Moments m = d.moments(p, mean);
  for (std::int64_t i = begin; i < p.n; i += step)
    store_vec<vector>(y, i, p.n,
                      normalized<T, subtract_mean>(
                          p, load_vec<vector>(s, i, p.n), m, [&] { return load_table<T, vector>(p.weight, 0, i, p.n); },
                          [&] { return load_table<T, vector>(p.bias, 0, i, p.n); }));
}

// Calls f(kernel) for one dtype: the kernel whose threads hold `vecs` vectors of a row in registers. Rows that are
// loaded element by element have no kernels of their own for few rows, and none with coarsening. in_l1: of many rows.
template <class T, bool vector, class F>
void with_kernel(int vecs, int coarsening, bool subtract_mean, bool few_rows, bool in_l1, F&& f) {
  const auto with_tables = [&](auto mean, auto tables) {
    constexpr int coarse = vector ? 2 : 1;
    constexpr bool through_l1 = vector && tables != Tables::with_row;
    if (vecs == 2) f(norm_rows<T, 2, 1, mean, tables, vector, false>);
    else if (coarsening == 1) f(norm_rows<T, 4, 1, mean, tables, vector, false>);
    else if (in_l1) f(norm_rows<T, 4, coarse, mean, tables, vector, through_l1>);
    else f(norm_rows<T, 4, coarse, mean, tables, vector, false>);
  };
  const auto choose = [&](auto mean) {
    using Early = std::integral_constant<Tables, Tables::with_row>;
    using Late = std::integral_constant<Tables, mean ? Tables::after_reducing : Tables::while_reducing>;
    if (vecs == 0) f(norm_long_rows<T, mean, vector>);
    else if (vector && few_rows) with_tables(mean, std::conditional_t<vector, Early, Late>{});
    else with_tables(mean, Late{});
  };
  if (subtract_mean) choose(std::true_type{});
  else choose(std::false_type{});
}

// The same of a pair.
template <class T, bool vector, class F>
void with_pair_kernel(int vecs, bool few_rows, F&& f) {
  const auto with_tables = [&](auto tables) {
    if (vecs == 2) f(norm_row_pair<T, 2, tables, vector>);
    else f(norm_row_pair<T, 4, tables, vector>);
  };
  using Late = std::integral_constant<Tables, Tables::while_reducing>;
  using Early = std::conditional_t<vector, std::integral_constant<Tables, Tables::with_row>, Late>;
  if (few_rows) with_tables(Early{});
  else with_tables(Late{});
}

NormParams norm_params(const NormArgs& a) {
  if (a.x.numel() == 0) return {.rows = 0};
  return {.x = rows_of(a.x),
          .residual = rows_of(a.residual),
          .y = rows_of(a.y),
          .res = rows_of(a.res),
          .weight = table_of(a.weight),
          .bias = table_of(a.bias),
          .rows = a.x.rows(),
          .n = a.x.last(),
          .eps = a.eps,
          .weight_offset = a.weight_offset};
}
// Divides the rows by a plan, and returns their CTAs.
std::int64_t divide_rows(NormParams& p, const RowPlan& plan, int sms) {
  const std::int64_t ctas = (p.rows + plan.rows() - 1) / plan.rows();
  p.lanes = plan.lanes, p.stride = plan.stride, p.few = few_ctas(ctas, sms);
  return ctas;
}

}  // namespace

KernelName norm(const char* op, const Context& ctx, const NormArgs& a) {
  const DeviceScope scope(op, ctx);
  NormParams p = norm_params(a);
  with_element16(a.x.dtype, [&](auto e) {
    with_vector(
        p.n,
        [&](auto vector) {
          const RowPlan plan = plan_rows<vector>(a.x.last(), p.rows, scope.sms());
          const std::int64_t ctas = divide_rows(p, plan, scope.sms());
          with_kernel<decltype(e), vector>(
              plan.vecs, plan.coarsening(), a.subtract_mean, ctas <= scope.sms(),
              reads_past_l2((a.x.numel() + (a.residual.given() ? a.x.numel() : 0)) * 2),
              [&](auto kernel) { scope.launch(kernel, ctas, plan.threads, 0, p, Overlap::with_previous); });
        },
        p.x, p.residual, p.y, p.res, p.weight, p.bias);
  });
  return kernel_name("cuda_", name(a.x.dtype));
}

KernelName norm_pair(const char* op, const Context& ctx, const NormArgs& first, const NormArgs& second) {
  const DeviceScope scope(op, ctx);
  const RowPlan plan = plan_row(first.x.last());
  NormPairParams p = {.first = norm_params(first), .second = norm_params(second)};
  const std::int64_t first_ctas = divide_rows(p.first, plan, scope.sms()),
                     ctas = first_ctas + divide_rows(p.second, plan, scope.sms());
  p.first_ctas = static_cast<unsigned>(first_ctas);
  with_element16(first.x.dtype, [&](auto e) {
    with_vector(
        first.x.last(),
        [&](auto vector) {
          with_pair_kernel<decltype(e), vector>(plan.vecs, ctas <= scope.sms(), [&](auto kernel) {
            scope.launch(kernel, ctas, plan.threads, 0, p, Overlap::with_previous);
          });
        },
        p.first.x, p.first.y, p.first.weight, p.second.x, p.second.y, p.second.weight);
  });
  return kernel_name("cuda_", name(first.x.dtype));
}

void load_norm_kernels(const char* op) {
  const auto load = [op](auto kernel) { load_kernel(op, kernel); };
  for (int vecs : {2, 4})
    for (bool few_rows : {false, true}) {
      with_pair_kernel<half, true>(vecs, few_rows, load);
      with_pair_kernel<half, false>(vecs, few_rows, load);
      with_pair_kernel<bf16, true>(vecs, few_rows, load);
      with_pair_kernel<bf16, false>(vecs, few_rows, load);
    }
  for (bool subtract_mean : {false, true})
    for (bool few_rows : {false, true})
      for (const auto& [vecs, coarsening, in_l1] :
           {std::tuple(0, 1, false), {2, 1, false}, {4, 1, false}, {4, 2, false}, {4, 2, true}}) {
        with_kernel<half, true>(vecs, coarsening, subtract_mean, few_rows, in_l1, load);
        with_kernel<half, false>(vecs, coarsening, subtract_mean, few_rows, in_l1, load);
        with_kernel<bf16, true>(vecs, coarsening, subtract_mean, few_rows, in_l1, load);
        with_kernel<bf16, false>(vecs, coarsening, subtract_mean, few_rows, in_l1, load);
      }
}

}  // namespace rooftile::gpu
