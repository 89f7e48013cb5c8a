// SPDX-License-Identifier: Apache-2.0
// Run-time dtype -> a C++ element type.
#pragma once

#include "core/half.h"
#include "rooftile/tensor.h"

namespace rooftile::cpu {

// Calls f(T{}) with T = float, Half or BFloat16.
template <class F>
inline __attribute__((always_inline)) void with_element(DType t, F&& f) {
  switch (t) {
    case DType::f16:
      return f(Half{});
    case DType::bf16:
      return f(BFloat16{});
    default:
      return f(float{});
  }
}

// One element of any activation dtype at `offset` elements, as float.
inline float read(const TensorView& t, std::int64_t offset) {
  switch (t.dtype) {
    case DType::f16:
      return to_float(static_cast<const Half*>(t.data)[offset]);
    case DType::bf16:
      return to_float(static_cast<const BFloat16*>(t.data)[offset]);
    default:
      return static_cast<const float*>(t.data)[offset];
  }
}
inline void write(const TensorView& t, std::int64_t offset, float x) {
  switch (t.dtype) {
    case DType::f16:
      static_cast<Half*>(t.data)[offset] = from_float<Half>(x);
      break;
    case DType::bf16:
      static_cast<BFloat16*>(t.data)[offset] = from_float<BFloat16>(x);
      break;
    default:
      static_cast<float*>(t.data)[offset] = x;
      break;
  }
}

// One element of an integer tensor (int32 or int64).
inline std::int64_t integer_at(const TensorView& t, std::int64_t offset) {
  return t.dtype == DType::i64 ? static_cast<const std::int64_t*>(t.data)[offset]
                               : static_cast<const std::int32_t*>(t.data)[offset];
}
// Offset in elements of element `index`, counted in row-major order; any strides.
inline std::int64_t element_offset(const TensorView& t, std::int64_t index) {
  std::int64_t offset = 0;
  for (int i = t.ndim - 1; i >= 0; --i) {
    offset += (index % t.shape[i]) * t.stride[i];
    index /= t.shape[i];
  }
  return offset;
}

}  // namespace rooftile::cpu
