// SPDX-License-Identifier: Apache-2.0
// What elementwise.cu and rope.cu share: a thread for each vector of eight elements, CTAs of 128 threads.
#pragma once

#include <cstdint>

#include "kernels/launch.h"
#include "tile/strided_rows.cuh"

namespace rooftile::gpu {

inline constexpr int cta_threads = 128;

inline std::int64_t ctas_for(std::int64_t threads) { return (threads + cta_threads - 1) / cta_threads; }
__device__ __forceinline__ std::int64_t thread_index() {
  return static_cast<std::int64_t>(blockIdx.x) * cta_threads + threadIdx.x;
}
inline std::int64_t vecs_of(std::int64_t n) { return (n + tile::vec_size - 1) / tile::vec_size; }

// Calls f(element, vector) for every dtype and access width, for warmup.
template <class F>
void for_all(F&& f) {
  f(tile::half{}, std::true_type{});
  f(tile::half{}, std::false_type{});
  f(tile::bf16{}, std::true_type{});
  f(tile::bf16{}, std::false_type{});
}

}  // namespace rooftile::gpu
