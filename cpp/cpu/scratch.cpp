// SPDX-License-Identifier: Apache-2.0
#include "cpu/scratch.h"

#include <new>

namespace rooftile::cpu {

constexpr std::align_val_t cache_line{64};

Scratch::Scratch(std::size_t bytes) : data_(static_cast<std::byte*>(::operator new(bytes, cache_line))) {}
Scratch::~Scratch() { ::operator delete(data_, cache_line); }

}  // namespace rooftile::cpu
