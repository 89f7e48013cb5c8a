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

// body(row, thread) for every row. Rows go out in pieces that are worth waking a thread for; small work stays here.
template <class Body>
inline void for_rows(const Parallel& parallel, std::int64_t rows, std::int64_t row_elements, const Body& body) {
  constexpr std::int64_t worth_a_thread = 16384;  // elements: some 10 us
  const std::int64_t piece =
      row_elements >= worth_a_thread ? 1 : worth_a_thread / (row_elements > 0 ? row_elements : 1);
  if (rows <= piece) {
    for (std::int64_t row = 0; row < rows; ++row) body(row, 0);
    return;
  }
  parallel.run((rows + piece - 1) / piece, [&](std::int64_t task, int thread) {
    const std::int64_t end = (task + 1) * piece < rows ? (task + 1) * piece : rows;
    for (std::int64_t row = task * piece; row < end; ++row) body(row, thread);
  });
}

// `count` elements of a float tensor as contiguous fp32: in place where they lie so already, else converted into
// `room`.
inline const float* as_floats(const TensorView& t, std::int64_t offset, std::int64_t count, std::int64_t stride,
                              float* room) {
  if (t.dtype == DType::f32 && stride == 1) return t.as<float>() + offset;
  with_element(t.dtype, [&](auto e) {
    const auto* p = t.as<decltype(e)>() + offset;
    std::int64_t i = 0;
    if (stride == 1)
      for (; i + lanes <= count; i += lanes) store(room + i, load(p + i));
    for (; i < count; ++i) room[i] = to_float(p[i * stride]);
  });
  return room;
}

// Room for one row per thread of a tensor whose last dimension is strided; none where rows can be used in place.
template <class T>
class RowScratch {
 public:
  RowScratch(const TensorView& t, int threads) : width_(t.given() && t.last_stride() != 1 ? t.last() : 0) {
    if (width_ > 0) room_ = std::make_unique_for_overwrite<T[]>(static_cast<std::size_t>(width_ * threads));
  }

  // The row as contiguous memory to read.
  const T* read(const TensorView& t, std::int64_t row, int thread) const {
    T* p = t.as<T>() + t.row_offset(row);
    if (width_ == 0) return p;
    T* to = room_.get() + width_ * thread;
    for (std::int64_t i = 0; i < width_; ++i) to[i] = p[i * t.last_stride()];
    return to;
  }
  // Contiguous memory to write the row into; commit() puts it where it belongs.
  T* write(const TensorView& t, std::int64_t row, int thread) const {
    return width_ == 0 ? t.as<T>() + t.row_offset(row) : room_.get() + width_ * thread;
  }
  void commit(const TensorView& t, std::int64_t row, int thread) const {
    if (width_ == 0) return;
    T* p = t.as<T>() + t.row_offset(row);
    const T* from = room_.get() + width_ * thread;
    for (std::int64_t i = 0; i < width_; ++i) p[i * t.last_stride()] = from[i];
  }

 private:
  std::int64_t width_;
  std::unique_ptr<T[]> room_;
};

// ---- along a row ----

// How many of the sixteen lanes of a piece are real: all of them, known at compile time, or the rest of a row.
struct Whole {};
struct Part {
  int count;  // 1..15
};
// body(offset, Whole or Part) over [0, n) in pieces of sixteen.
template <class Body>
ROOFTILE_INLINE void for_pieces(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + lanes <= n; i += lanes) body(i, Whole{});
  if (i < n) body(i, Part{static_cast<int>(n - i)});
}

// The real lanes of a piece; the others are 0 and are not written.
template <class T>
ROOFTILE_INLINE F32 load(const T* p, Whole) {
  return load(p);
}
template <class T>
ROOFTILE_INLINE F32 load(const T* p, Part part) {
  T whole[lanes] = {};
  std::memcpy(whole, p, sizeof(T) * static_cast<std::size_t>(part.count));
  return load(whole);
}
template <class T>
ROOFTILE_INLINE void store(T* p, F32 v, Whole) {
  store(p, v);
}
template <class T>
ROOFTILE_INLINE void store(T* p, F32 v, Part part) {
  store_some(p, v, part.count);
}
// v with 0 in the other lanes.
ROOFTILE_INLINE F32 only(F32 v, Whole) { return v; }
ROOFTILE_INLINE F32 only(F32 v, Part part) {
  for (int i = part.count; i < lanes; ++i) v[i] = 0;
  return v;
}

// The sum over [0, n) of term(offset, Whole or Part), which gives 0 in the lanes that are not real. Eight at a time are
// added in float, the rest in double, in one fixed order: a long row loses no more digits than a short one.
template <class Term>
ROOFTILE_INLINE double sum_over(std::int64_t n, const Term& term) {
  constexpr int step = 8 * lanes;
  Wide total{};
  std::int64_t i = 0;
  for (; i + step <= n; i += step) {
    F32 part[4];
    for (int j = 0; j < 4; ++j) part[j] = term(i + j * lanes, Whole{});
    for (int j = 0; j < 4; ++j) part[j] += term(i + (4 + j) * lanes, Whole{});
    total = total + wide((part[0] + part[1]) + (part[2] + part[3]));
  }
  for_pieces(n - i, [&](std::int64_t j, auto lanes) { total = total + wide(term(i + j, lanes)); });
  return sum(total);
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
