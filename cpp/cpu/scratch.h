// SPDX-License-Identifier: Apache-2.0
// Uninitialised scratch memory of one call, cut into cache-line aligned arrays.
#pragma once

#include <cstddef>
#include <cstdint>

namespace rooftile::cpu {

// Not inline: instruction-set specific sources must not bring their own copy of shared functions.
class Scratch {
 public:
  explicit Scratch(std::size_t bytes);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::byte* data() const { return data_; }

 private:
  std::byte* data_;
};

}  // namespace rooftile::cpu
