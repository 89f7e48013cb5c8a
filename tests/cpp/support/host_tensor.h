// SPDX-License-Identifier: Apache-2.0
// Host tensors in buffers of exactly the size needed, so that the address sanitizer sees a read or write past an end.
#pragma once

#include <sstream>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "support/tensors.h"

namespace rooftile {

struct Tensor {
  std::vector<std::byte> bytes;
  TensorView view;
  Tensor() = default;
  Tensor(DType dtype, const Shape& shape) : view(contiguous_view(nullptr, dtype, {}, shape)) {
    bytes.resize(bytes_of(view));
    view.data = bytes.data();
  }
  Tensor(Tensor&&) = default;
  Tensor& operator=(Tensor&&) = default;

  void set(std::int64_t i, float x) { cpu::write(view, i, x); }
  float get(std::int64_t i) const { return cpu::read(view, i); }
};

// The CPU variants that this machine runs.
inline std::vector<std::string> variants() {
  std::vector<std::string> names;
  std::istringstream text(cpu::runnable_variants());
  for (std::string name; std::getline(text, name, ',');) names.push_back(name.substr(name.find_first_not_of(' ')));
  return names;
}

}  // namespace rooftile
