// SPDX-License-Identifier: Apache-2.0
// Strided tensors as rows of 16-bit elements, and 16-byte vectors: eight neighbouring elements of a row in one thread.
// A vector moves in one access if the strides of all tensors of the call allow it (`vector`), else element by element.
// The strides do not change which thread handles which vector, so they change no bit of a result.
#pragma once

#include <bit>
#include <cstdint>
#include <cute/pointer.hpp>
#include <type_traits>

#include "core/divisor.h"
#include "rooftile/tensor.h"
#include "tile/copy.cuh"
#include "tile/element.cuh"

namespace rooftile::tile {

// A tensor whose leading dimensions are flattened to one row index. Leading dimensions that nest without a gap are
// merged, so most tensors have at most one.
struct Rows {
  std::byte* data = nullptr;     // null: no tensor
  std::int64_t last_stride = 0;  // elements between neighbours of a row
  int dims = 0;
  bool vector = true;                              // every row is contiguous and starts at a multiple of 16 bytes
  std::int64_t stride[TensorView::max_ndim] = {};  // (dims), elements, outermost first
  Divisor64 size[TensorView::max_ndim];            // (dims); last: one dimension then costs one constant line
};

// The rows over the first `dims` dimensions of t.
inline Rows rows_of(const TensorView& t, int dims) {
  Rows r;
  if (!t.given()) return r;
  r.data = t.as<std::byte>();
  r.last_stride = dims < t.ndim ? t.last_stride() : 0;
  for (int i = 0; i < dims; ++i) {
    if (t.shape[i] == 1) continue;
    if (r.dims > 0 && r.stride[r.dims - 1] == t.stride[i] * t.shape[i]) {
      r.size[r.dims - 1] = Divisor64(r.size[r.dims - 1].value * t.shape[i]);
      r.stride[r.dims - 1] = t.stride[i];
    } else {
      r.size[r.dims] = Divisor64(t.shape[i]);
      r.stride[r.dims++] = t.stride[i];
    }
  }
  r.vector = r.last_stride == 1 && std::bit_cast<std::uintptr_t>(t.data) % 16 == 0;
  for (int i = 0; i < r.dims; ++i) r.vector &= r.stride[i] % 8 == 0;
  return r;
}
inline Rows rows_of(const TensorView& t) { return rows_of(t, t.ndim - 1); }

__device__ __forceinline__ std::int64_t row_offset(const Rows& r, std::int64_t row) {
  std::int64_t offset = 0;
#pragma unroll 1  // rarely more than one dimension: an unrolled loop is a thousand instructions to fetch
  for (int i = r.dims - 1; i > 0; --i) {
    const Division64 split = divide(row, r.size[i]);
    offset += split.remainder * r.stride[i];
    row = split.quotient;
  }
  return r.dims ? offset + row * r.stride[0] : 0;
}

struct Row {
  std::uint16_t* data;
  std::int64_t last_stride;
};
__device__ __forceinline__ Row row_at(const Rows& r, std::int64_t row) {
  return {cute::recast_ptr<std::uint16_t>(r.data) + row_offset(r, row), r.last_stride};
}

// Element `at` of integers such as positions: int64 if `wide`, else int32.
__device__ __forceinline__ std::int64_t load_integer(const void* integers, std::int64_t at, bool wide) {
  return wide ? static_cast<const std::int64_t*>(integers)[at] : static_cast<const std::int32_t*>(integers)[at];
}

constexpr int vec_size = 8;  // elements of a 16-byte vector

// Whether element i of a vector lies inside the row; `left` elements of the row remain from the vector's first one on.
template <bool vector, class Index>
__device__ __forceinline__ bool inside(int i, Index left) {
  return left > (vector ? 0 : i);
}

// Eight NaNs, of fp16 and of bf16.
__device__ __forceinline__ uint4 quiet_nans() { return {0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu}; }

// Loads elements [first, first + 8) of a row of n; elements past the row's end are `fill`. in_l1: as of load_once.
// Index: int where n is known to be small.
template <bool vector, bool in_l1 = false, class Index>
__device__ __forceinline__ uint4 load_vec(const Row& row, Index first, Index n, std::uint16_t fill = 0) {
  if constexpr (vector) {
    const std::uint32_t pair = fill | fill << 16;
    return first < n ? load_once<in_l1>(row.data + first) : uint4{pair, pair, pair, pair};
  } else {
    std::uint32_t x[vec_size];  // one element a register
#pragma unroll
    for (int i = 0; i < vec_size; ++i) x[i] = first + i < n ? row.data[(first + i) * row.last_stride] : fill;
    return {x[0] | x[1] << 16, x[2] | x[3] << 16, x[4] | x[5] << 16, x[6] | x[7] << 16};
  }
}

template <bool vector, class Index>
__device__ __forceinline__ void store_vec(const Row& row, Index first, Index n, uint4 values) {
  if constexpr (vector) {
    if (first < n) store(row.data + first, values);
  } else {
    const std::uint32_t x[] = {values.x, values.y, values.z, values.w};
#pragma unroll
    for (int i = 0; i < vec_size; ++i)
      if (first + i < n) row.data[(first + i) * row.last_stride] = static_cast<std::uint16_t>(x[i / 2] >> 16 * (i % 2));
  }
}

struct Floats {
  float at[vec_size];  // a vector in fp32
};
template <class T>
__device__ __forceinline__ Floats to_floats(uint4 x) {
  const float2 a = unpack<T>(x.x), b = unpack<T>(x.y), c = unpack<T>(x.z), d = unpack<T>(x.w);
  return {{a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y}};
}
template <class T>
__device__ __forceinline__ uint4 from_floats(const Floats& x) {
  return {pack<T>(x.at[0], x.at[1]), pack<T>(x.at[2], x.at[3]), pack<T>(x.at[4], x.at[5]), pack<T>(x.at[6], x.at[7])};
}

// Hides the origin of x from the compiler, which then unpacks x again at its next use. Otherwise the compiler would
// keep eight floats in registers in place of four words. CuTe's like, warpgroup_fence_operand, also orders memory.
__device__ __forceinline__ void keep_packed(uint4& x) { asm volatile("" : "+r"(x.x), "+r"(x.y), "+r"(x.z), "+r"(x.w)); }

// A tensor that every row reads and no thread of the launch writes (weights, RoPE tables): rows of T or of fp32. Loads
// are coherent ones: the previous kernel may write the table while CTAs of this one already wait (PDL).
struct Table {
  const std::byte* data = nullptr;           // null: no tensor
  std::int64_t last_stride = 0, stride = 0;  // elements between neighbours of a row, and between rows
  bool wide = false;                         // fp32
  bool vector = true, early = false;         // early: given, contiguous and not fp32
};
// The table of t, [n] or [rows, n].
inline Table table_of(const TensorView& t) {
  Table r;
  if (!t.given()) return r;
  r.data = t.as<std::byte>();
  r.last_stride = t.last_stride();
  r.stride = t.ndim == 2 && t.shape[0] > 1 ? t.stride[0] : 0;
  r.wide = t.dtype == DType::f32;
  r.vector = r.last_stride == 1 && std::bit_cast<std::uintptr_t>(t.data) % 16 == 0 && r.stride % (r.wide ? 4 : 8) == 0;
  r.early = r.vector && !r.wide;
  return r;
}

// Loads elements [first, first + 8) of row `row` of n elements, zero-filled past the row's end.
template <class T, bool vector, class Index>
__device__ __forceinline__ Floats load_table(const Table& t, std::int64_t row, Index first, Index n) {
  const std::int64_t start = row * t.stride;
  if constexpr (vector) {
    if (first >= n) return {};
    if (!t.wide) return to_floats<T>(*cute::recast_ptr<uint4>(cute::recast_ptr<T>(t.data) + start + first));
    const float* from = cute::recast_ptr<float>(t.data) + start + first;
    const float4 low = *cute::recast_ptr<float4>(from), high = *cute::recast_ptr<float4>(from + 4);
    return {{low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}};
  } else {
    Floats x;
#pragma unroll
    for (int i = 0; i < vec_size; ++i) {
      const std::int64_t offset = start + (first + i) * t.last_stride;
      x.at[i] = first + i >= n ? 0.0f
                : t.wide       ? cute::recast_ptr<float>(t.data)[offset]
                               : to_float(cute::recast_ptr<T>(t.data)[offset]);
    }
    return x;
  }
}

// load_table of a one-row table in two steps, so that the load's latency overlaps with other work: load_early loads a
// contiguous vector of T; table_vec unpacks it, or loads what load_early does not (strided tables and fp32).
template <bool vector, class Index>
__device__ __forceinline__ uint4 load_early(const Table& t, Index first, Index n) {
  if constexpr (!vector) return {};
  return t.early && first < n ? *cute::recast_ptr<uint4>(t.data + first * 2) : uint4{};
}
template <class T, bool vector, class Index>
__device__ __forceinline__ Floats table_vec(const Table& t, uint4 early, Index first, Index n) {
  return !vector || !t.early ? load_table<T, vector>(t, 0, first, n) : to_floats<T>(early);
}

// Prefetches element `first` of a one-row table into L2; in a contiguous table its line holds the whole vector. Allowed
// before wait_for_previous_kernel: L2 is where all SMs see writes.
template <class Index>
__device__ __forceinline__ void prefetch_table(const Table& t, Index first, Index n) {
  if (t.data && first < n) prefetch_l2(t.data + first * t.last_stride * (t.wide ? 4 : 2));
}

// Calls f(true_type) if all tensors of a call with rows of n elements allow 16-byte accesses, else f(false_type).
template <class F, class... Tensors>
void with_vector(std::int64_t n, F&& f, const Tensors&... tensors) {
  if (n % vec_size == 0 && (tensors.vector && ...)) f(std::true_type{});
  else f(std::false_type{});
}

// How threads divide a row that they reduce. The plan depends on the row's length alone, because it fixes the order of
// the sums. Up to 1024 elements a row has a warp or less, so that no barrier is needed: 512 elements are 32 lanes of
// two vectors, 64 are 4 lanes, 128 threads then take 32 rows. Longer rows have a CTA of up to 512 threads: 4096
// elements are 256 threads of two vectors, 16384 are 512 of four, 2 x 4 x 4 registers; longer ones are read twice.
struct RowPlan {
  int vecs;     // vectors of the row in each thread's registers; 0: the row does not fit and is read again
  int lanes;    // threads of a row: a power of two up to 32, or the whole CTA
  int threads;  // of a CTA
  int stride;   // vectors between two of a thread: lanes, before coarsened()
  int rows() const { return lanes <= 32 ? threads / lanes : 1; }  // of a CTA
  int coarsening() const { return stride > lanes ? 2 : 1; }       // threads before coarsened() for which one stands
};
inline RowPlan plan_row(std::int64_t n) {
  const auto lanes = [n](int vecs) { return static_cast<int>((n + vecs * vec_size - 1) / (vecs * vec_size)); };
  const auto in_cta = [&](int vecs) -> RowPlan {
    const int threads = (lanes(vecs) + 31) / 32 * 32;
    return {vecs, threads, threads, threads};
  };
  if (n <= 512) {
    const int power = static_cast<int>(std::bit_ceil(static_cast<unsigned>(lanes(2))));
    return {2, power, 128, power};
  }
  if (n <= 1024) return {4, 32, 128, 32};
  if (n <= 8192) return in_cta(2);
  if (n <= 16384) return in_cta(4);
  return {0, 512, 512, 512};
}

// The same plan with half the threads, each of which stands for two (thread coarsening), where a row has a CTA and a
// thread two vectors. The same sums, so the number of rows may choose: with many rows four vectors a thread keep more
// loads on their way, with few a thread more is faster. 4096 elements: 128 threads of four vectors.
inline RowPlan coarsened(const RowPlan& plan) {
  if (plan.vecs != 2 || plan.lanes <= 32) return plan;
  const int threads = (plan.threads / 2 + 31) / 32 * 32;
  return {4, threads, threads, plan.stride};
}

// The row this thread works on, and this thread's index among the threads of the row. cta: of those with rows.
struct RowThread {
  std::int64_t row;
  int thread;
};
__device__ __forceinline__ RowThread row_thread(int lanes, unsigned cta) {
  if (lanes > 32) return {static_cast<std::int64_t>(cta), static_cast<int>(threadIdx.x)};
  const int rows = blockDim.x / lanes;
  return {static_cast<std::int64_t>(cta) * rows + threadIdx.x / lanes, static_cast<int>(threadIdx.x) % lanes};
}

// The element at which vector k of a thread begins. With coarsening the vectors of the two threads for which it stands
// take turns; an odd number of warps leaves the last threads one, and a vector past any row.
template <int coarsening>
__host__ __device__ __forceinline__ int first_element(const RowThread& at, int lanes, int stride, int k) {
  if constexpr (coarsening == 1) return (at.thread + k * lanes) * vec_size;
  constexpr int past_rows = 1 << 20;
  const int second = at.thread + lanes < stride ? at.thread + lanes : past_rows;
  return ((k % 2 == 0 ? at.thread : second) + k / 2 * stride) * vec_size;
}

}  // namespace rooftile::tile
