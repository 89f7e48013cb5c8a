// SPDX-License-Identifier: Apache-2.0
// TensorView: a non-owning view of somebody's strided array.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>

namespace rooftile {

enum class DType : std::uint8_t { f32, f16, bf16, f8_e4m3, i8, u8, i32, i64 };

constexpr std::size_t size_of(DType t) {
  switch (t) {
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::i64:
      return 8;
    case DType::f8_e4m3:
    case DType::i8:
    case DType::u8:
      return 1;
  }
  return 0;
}
constexpr bool is_activation(DType t) { return t == DType::f32 || t == DType::f16 || t == DType::bf16; }
const char* name(DType t);  // "float16", "bfloat16", ... as torch and NumPy say it

enum class DeviceType : std::uint8_t { cpu, cuda };

struct Device {
  DeviceType type = DeviceType::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};
std::string name(Device d);  // "cpu", "cuda:1"

struct TensorView {
  static constexpr int max_ndim = 6;

  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  int ndim = -1;  // -1: no tensor (an optional argument that was not given)
  bool read_only = false;
  std::int64_t shape[max_ndim] = {};
  std::int64_t stride[max_ndim] = {};  // in elements, as DLPack and torch count

  constexpr bool given() const { return ndim >= 0; }
  // Counts stop at the largest number: an expanded view may claim more elements than 64 bits count.
  constexpr std::int64_t numel() const { return ndim < 0 ? 0 : product(ndim); }
  // Rows are everything but the last dimension, flattened in order.
  constexpr std::int64_t rows() const { return product(ndim - 1); }
  constexpr std::int64_t last() const { return shape[ndim - 1]; }
  constexpr std::int64_t last_stride() const { return stride[ndim - 1]; }
  // Offset in elements of the first element of row `row`; any strides.
  constexpr std::int64_t row_offset(std::int64_t row) const {
    std::int64_t offset = 0;
    for (int i = ndim - 2; i >= 0; --i) {
      offset += (row % shape[i]) * stride[i];
      row /= shape[i];
    }
    return offset;
  }
  template <class T>
  constexpr T* as() const {
    return static_cast<T*>(data);
  }

 private:
  constexpr std::int64_t product(int dims) const {
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    std::int64_t n = 1;
    for (int i = 0; i < dims; ++i) {
      if (shape[i] == 0) return 0;
      n = n > most / shape[i] ? most : n * shape[i];
    }
    return n;
  }
};

std::string shape_text(const TensorView& t);  // "[2, 8, 128]"
std::string describe(const TensorView& t);    // "float16[2, 8, 128] on cpu"
bool same_shape(const TensorView& a, const TensorView& b);

}  // namespace rooftile
