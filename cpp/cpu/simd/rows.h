// SPDX-License-Identifier: Apache-2.0
// Rows (the last dimension) of strided tensors as contiguous memory, the loop over them and the loops along one.
// Include isa.h and vec.h first.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "core/parallel.h"
#include "cpu/element.h"
#include "rooftile/tensor.h"

namespace rooftile::cpu::ROOFTILE_ISA {

// Calls body(row, thread) for every row. A task of the thread pool has enough rows to be worth waking a thread; smaller
// calls run on the calling thread.
template <class Body>
inline void for_rows(const Parallel& parallel, std::int64_t rows, std::int64_t row_elements, const Body& body) {
  constexpr std::int64_t worth_a_thread = 16384;  // elements: about 10 us
  const std::int64_t rows_per_task =
      row_elements >= worth_a_thread ? 1 : worth_a_thread / (row_elements > 0 ? row_elements : 1);
  if (rows <= rows_per_task) {
    for (std::int64_t row = 0; row < rows; ++row) body(row, 0);
    return;
  }
  parallel.run((rows + rows_per_task - 1) / rows_per_task, [&](std::int64_t task, int thread) {
    const std::int64_t end = (task + 1) * rows_per_task < rows ? (task + 1) * rows_per_task : rows;
    for (std::int64_t row = task * rows_per_task; row < end; ++row) body(row, thread);
  });
}

// Returns `count` elements of a float tensor as contiguous fp32: in place if they are stored so, else converted into
// `buffer`.
inline const float* as_floats(const TensorView& t, std::int64_t offset, std::int64_t count, std::int64_t stride,
                              float* buffer) {
  if (t.dtype == DType::f32 && stride == 1) return t.as<float>() + offset;
  with_element(t.dtype, [&](auto e) {
    const auto* p = t.as<decltype(e)>() + offset;
    std::int64_t i = 0;
    if (stride == 1)
      for (; i + lanes <= count; i += lanes) store(buffer + i, load(p + i));
    for (; i < count; ++i) buffer[i] = to_float(p[i * stride]);
  });
  return buffer;
}

// A contiguous buffer of one row per thread for tensors with a strided last dimension; empty if rows are contiguous.
template <class T>
class RowScratch {
 public:
  RowScratch(const TensorView& t, int threads) : width_(t.given() && t.last_stride() != 1 ? t.last() : 0) {
    if (width_ > 0) buffer_ = std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>(width_ * threads));
  }

  // Returns the row as contiguous memory to read.
  const T* read(const TensorView& t, std::int64_t row, int thread) const {
    T* p = t.as<T>() + t.row_offset(row);
    if (width_ == 0) return p;
    T* to = buffer_.get() + width_ * thread;
    for (std::int64_t i = 0; i < width_; ++i) to[i] = p[i * t.last_stride()];
    return to;
  }
  // Returns contiguous memory to write the row into; commit() copies it to the tensor.
  T* write(const TensorView& t, std::int64_t row, int thread) const {
    return width_ == 0 ? t.as<T>() + t.row_offset(row) : buffer_.get() + width_ * thread;
  }
  void commit(const TensorView& t, std::int64_t row, int thread) const {
    if (width_ == 0) return;
    T* p = t.as<T>() + t.row_offset(row);
    const T* from = buffer_.get() + width_ * thread;
    for (std::int64_t i = 0; i < width_; ++i) p[i * t.last_stride()] = from[i];
  }

 private:
  std::int64_t width_;
  std::unique_ptr<T[]> buffer_;
};

// ---- along a row ----

// How many of a vector's sixteen lanes hold elements: all, known at compile time, or the tail of a row.
struct FullVec {};
struct TailVec {
  int count;  // 1..15
};
// Calls body(offset, FullVec or TailVec) for the vectors of sixteen that cover [0, n).
template <class Body>
ROOFTILE_INLINE void for_vecs(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i, FullVec{});
  if (i < n) body(i, TailVec{static_cast<int>(n - i)});
}

// Loads and stores the lanes that hold elements; the other lanes are loaded as 0 and are not stored.
template <class T>
ROOFTILE_INLINE F32 load(const T* p, FullVec) {
  return load(p);
}
template <class T>
ROOFTILE_INLINE F32 load(const T* p, TailVec tail) {
  T whole[lanes] = {};
  std::memcpy(whole, p, sizeof(T) * static_cast<std::size_t>(tail.count));
  return load(whole);
}
template <class T>
ROOFTILE_INLINE void store(T* p, F32 v, FullVec) {
  store(p, v);
}
template <class T>
ROOFTILE_INLINE void store(T* p, F32 v, TailVec tail) {
  store_some(p, v, tail.count);
}
// v with 0 in the other lanes.
ROOFTILE_INLINE F32 only(F32 v, FullVec) { return v; }
ROOFTILE_INLINE F32 only(F32 v, TailVec tail) {
  for (int i = tail.count; i < lanes; ++i) v[i] = 0;
  return v;
}

// The sum over [0, n) of term(offset, FullVec or TailVec); term returns 0 in lanes past the row's end. Eight vectors at
// a time are added in fp32, these sums in fp64, in one fixed order: a long row loses no more digits than a short one.
template <class Term>
ROOFTILE_INLINE double sum_over(std::int64_t n, const Term& term) {
  constexpr int step = 8 * lanes;
  Wide total{};
  std::int64_t i = 0;
  for (; i + step <= n; i += step) {
    F32 tail[4];
    for (int j = 0; j < 4; ++j) tail[j] = term(i + j * lanes, FullVec{});
    for (int j = 0; j < 4; ++j) tail[j] += term(i + (4 + j) * lanes, FullVec{});
    total = total + wide((tail[0] + tail[1]) + (tail[2] + tail[3]));
  }
  for_vecs(n - i, [&](std::int64_t j, auto lanes) { total = total + wide(term(i + j, lanes)); });
  return sum(total);
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
