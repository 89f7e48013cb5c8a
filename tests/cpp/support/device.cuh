// SPDX-License-Identifier: Apache-2.0
// What tests of device code share: a fixture that skips without a GPU, memory that host and device see, launches.
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <type_traits>

#include "core/half.h"
#include "tile/element.cuh"

namespace rooftile::tile {

class Tile : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  }
};

// Memory that host and device see, of n elements.
template <class T>
struct Shared {
  explicit Shared(std::size_t n) : n(n) { EXPECT_EQ(cudaMallocManaged(&data, n * sizeof(T)), cudaSuccess); }
  Shared(const Shared&) = delete;
  ~Shared() { cudaFree(data); }
  T& operator[](std::size_t i) const { return data[i]; }

  T* data = nullptr;
  std::size_t n;
};

// One launch, and the wait for its end. cluster: CTAs of a cluster, where the GPU has clusters; shared_bytes: dynamic
// shared memory.
struct Grid {
  int ctas = 1, threads = 32, cluster = 1, shared_bytes = 0;
};
inline int device_major() {
  int major = 0;
  EXPECT_EQ(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0), cudaSuccess);
  return major;
}
template <class... Args>
void enqueue(Grid grid, bool overlap, void (*kernel)(Args...), std::type_identity_t<Args>... args) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.ctas));
  config.blockDim = dim3(static_cast<unsigned>(grid.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(grid.shared_bytes);
  cudaLaunchAttribute attributes[2] = {};
  config.attrs = attributes;
  if (device_major() >= 9 && grid.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim.x = static_cast<unsigned>(grid.cluster);
    attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  }
  if (device_major() >= 9 && overlap) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  ASSERT_EQ(cudaLaunchKernelEx(&config, kernel, args...), cudaSuccess);
}
template <class... Args>
void launch(Grid grid, void (*kernel)(Args...), std::type_identity_t<Args>... args) {
  enqueue(grid, false, kernel, args...);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
}
// In CTAs of one warp.
template <class... Args>
void launch(void (*kernel)(Args...), int threads, std::type_identity_t<Args>... args) {
  launch({.ctas = threads / 32}, kernel, args...);
}
// The type of core/half.h with the bits of T, half or bf16.
template <class T>
using Stored = std::conditional_t<std::is_same_v<T, half>, Half, BFloat16>;

__device__ inline int thread_index() { return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x); }

}  // namespace rooftile::tile
