// SPDX-License-Identifier: Apache-2.0
#include "ops/check.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>

namespace rooftile::check {
namespace {

// First and one-past-last byte that the tensor can touch.
std::pair<std::intptr_t, std::intptr_t> byte_range(const TensorView& t) {
  std::int64_t low = 0, high = 0;
  for (int i = 0; i < t.ndim; ++i) (t.stride[i] < 0 ? low : high) += (t.shape[i] - 1) * t.stride[i];
  const auto base = reinterpret_cast<std::intptr_t>(t.data);
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  return {base + low * size, base + (high + 1) * size};
}

bool same_memory(const TensorView& a, const TensorView& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) return false;
  for (int i = 0; i < a.ndim; ++i)
    if (a.stride[i] != b.stride[i] && a.shape[i] > 1) return false;
  return true;
}

// Rows of both are runs of bytes that repeat at multiples of one pitch: they lie apart if their runs do within a pitch.
bool apart_within_a_pitch(const TensorView& a, const TensorView& b) {
  std::int64_t pitch = 0;
  for (const TensorView* t : {&a, &b})
    for (int i = 0; i + 1 < t->ndim; ++i)
      if (t->shape[i] > 1 && (pitch == 0 || std::llabs(t->stride[i]) < pitch)) pitch = std::llabs(t->stride[i]);
  if (pitch == 0 || a.dtype != b.dtype || a.last_stride() < 0 || b.last_stride() < 0) return false;
  for (const TensorView* t : {&a, &b})
    for (int i = 0; i + 1 < t->ndim; ++i)
      if (t->shape[i] > 1 && t->stride[i] % pitch != 0) return false;
  const auto size = static_cast<std::int64_t>(size_of(a.dtype));
  const std::int64_t bytes = pitch * size;
  const std::int64_t run_a = ((a.last() - 1) * a.last_stride() + 1) * size, run_b = ((b.last() - 1) * b.last_stride() + 1) * size;
  const std::int64_t distance = reinterpret_cast<std::intptr_t>(b.data) - reinterpret_cast<std::intptr_t>(a.data);
  const std::int64_t from_a = ((distance % bytes) + bytes) % bytes;
  return from_a >= run_a && from_a + run_b <= bytes;
}

bool lie_apart(const TensorView& a, const TensorView& b) {
  if (a.numel() == 0 || b.numel() == 0) return true;
  const auto [a_begin, a_end] = byte_range(a);
  const auto [b_begin, b_end] = byte_range(b);
  return a_end <= b_begin || b_end <= a_begin || (a.ndim > 0 && b.ndim > 0 && apart_within_a_pitch(a, b));
}

}  // namespace

void check_apart(const char* op, const char* out_name, const TensorView& out, const char* other_name, const TensorView& other) {
  ROOFTILE_CHECK(lie_apart(out, other), op, ": ", out_name, " must not share memory with ", other_name);
}

void check_overlap(const char* op, const char* out_name, const TensorView& out, const char* in_name, const TensorView& in) {
  ROOFTILE_CHECK(same_memory(out, in) || lie_apart(out, in), op, ": ", out_name, " overlaps ", in_name,
                 " in memory; it must be ", in_name, " itself (same strides) or lie apart from it");
}

bool overlaps_itself(const TensorView& t) {
  if (t.numel() == 0) return false;
  // From the smallest stride up, each dimension must step over all that lies inside it. Doubles: products may be vast.
  double reach = 0;
  bool done[TensorView::max_ndim] = {};
  for (int round = 0; round < t.ndim; ++round) {
    int next = -1;
    for (int i = 0; i < t.ndim; ++i)
      if (!done[i] && t.shape[i] > 1 && (next < 0 || std::abs(t.stride[i]) < std::abs(t.stride[next]))) next = i;
    if (next < 0) break;
    done[next] = true;
    const double stride = std::abs(static_cast<double>(t.stride[next]));
    if (stride <= reach) return true;
    reach += static_cast<double>(t.shape[next] - 1) * stride;
  }
  return false;
}

KernelName kernel_name(const cpu::Kernels& k, std::initializer_list<const char*> parts) {
  KernelName result;
  int used = std::snprintf(result.text, sizeof result.text, "cpu_%s", k.variant);
  for (const char* part : parts)
    if (used < static_cast<int>(sizeof result.text))
      used += std::snprintf(result.text + used, sizeof result.text - static_cast<std::size_t>(used), "_%s", part);
  return result;
}

}  // namespace rooftile::check
