// SPDX-License-Identifier: Apache-2.0
// How a family launches: on the call's device and stream, with every error typed.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "kernels/backend.h"
#include "kernels/targets.h"
#include "rooftile/context.h"
#include "rooftile/error.h"

namespace rooftile::gpu {

#define ROOFTILE_CUDA_CHECK(op, call)                                                                         \
  do {                                                                                                        \
    if (const cudaError_t rooftile_status = (call); rooftile_status != cudaSuccess)                           \
      ::rooftile::gpu::fail_cuda(op, #call, rooftile_status);                                                 \
  } while (0)

// Throws a device error with CUDA's own words, after taking the error off the runtime's record.
[[noreturn]] inline void fail_cuda(const char* op, const char* what, cudaError_t status) {
  (void)cudaGetLastError();
  fail(ErrorKind::device, op, ": ", what, " failed: ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")");
}

// with_previous: a kernel that waits in its own code (tile/grid.cuh) for the launch before it, and may start while that
// one still runs. On other devices than Hopper, whose code does not wait, it starts behind it.
enum class Overlap { none, with_previous };

// The device of one call: current while this lives, the caller's current device again afterwards.
class DeviceScope {
 public:
  DeviceScope(const char* op, const Context& ctx)
      : op_(op), stream_(static_cast<cudaStream_t>(ctx.stream)), device_(ctx.device.index) {
    const int device = device_;
    int major = 0, minor = 0;
    ROOFTILE_CUDA_CHECK(op, cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    ROOFTILE_CUDA_CHECK(op, cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    if (const auto why = refusal(backend(), major, minor)) fail(ErrorKind::not_supported, op, ": ", name(ctx.device), " ", *why);
    hopper_ = major == 9 && built_for_hopper(backend());
    ROOFTILE_CUDA_CHECK(op, cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, device));
    ROOFTILE_CUDA_CHECK(op, cudaGetDevice(&before_));
    if (device != before_) ROOFTILE_CUDA_CHECK(op, cudaSetDevice(device));   // last: nothing throws once it is changed
    changed_ = device != before_;
  }
  DeviceScope(const DeviceScope&) = delete;
  ~DeviceScope() {
    if (changed_) (void)cudaSetDevice(before_);
  }

  int sms() const { return sms_; }
  bool has_wgmma() const { return hopper_; }
  int largest_cluster() const { return hopper_ ? 8 : 1; }   // blocks; where Hopper's code does not run a block is alone
  // How many blocks with that much shared memory (and what the system adds to each) a multiprocessor holds at once; at
  // least one is asked for.
  int blocks_that_fit(std::size_t shared_bytes) const {
    int of_block = 0, all = 0, reserved = 0;
    ROOFTILE_CUDA_CHECK(op_, cudaDeviceGetAttribute(&of_block, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_));
    ROOFTILE_CUDA_CHECK(op_, cudaDeviceGetAttribute(&all, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device_));
    ROOFTILE_CUDA_CHECK(op_, cudaDeviceGetAttribute(&reserved, cudaDevAttrReservedSharedMemoryPerBlock, device_));
    ROOFTILE_CHECK_KIND(not_supported, shared_bytes <= static_cast<std::size_t>(of_block), op_, ": the kernel needs ", shared_bytes,
                        " bytes of shared memory in a block, the device has ", of_block);
    return static_cast<int>(static_cast<std::size_t>(all) / (shared_bytes + static_cast<std::size_t>(reserved)));
  }
  cudaStream_t stream() const { return stream_; }
  const char* op() const { return op_; }

  // How many blocks a grid has; y above 1: blocks x, x + 1 ... come before those with the next y.
  struct Grid {
    std::int64_t x, y = 1;
    Grid(std::int64_t x, std::int64_t y = 1) : x(x), y(y) {}
  };
  // One launch. A grid of no blocks is no launch. `kernel` takes its one parameter struct by value. cluster: so many blocks in
  // a row run at once and can wait for each other (tile/grid.cuh).
  template <class Params>
  void launch(void (*kernel)(Params), Grid grid, int threads, std::size_t shared_bytes, const Params& params,
              Overlap overlap = Overlap::none, int cluster = 1) const {
    if (grid.x == 0) return;
    if (shared_bytes > 48 * 1024)
      ROOFTILE_CUDA_CHECK(op_, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)));
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
    config.blockDim = dim3(static_cast<unsigned>(threads));
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream_;
    cudaLaunchAttribute attributes[2] = {};
    config.attrs = attributes;
    if (overlap == Overlap::with_previous && hopper_) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attribute.val.programmaticStreamSerializationAllowed = 1;
    }
    if (cluster > 1) {
      cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
      attribute.id = cudaLaunchAttributeClusterDimension;
      attribute.val.clusterDim.x = static_cast<unsigned>(cluster);
      attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
    }
    ROOFTILE_CUDA_CHECK(op_, cudaLaunchKernelEx(&config, kernel, params));
  }

 private:
  const char* op_;
  cudaStream_t stream_;
  int device_, before_ = 0, sms_ = 0;
  bool hopper_ = false;   // its own code runs: PTX of older GPUs neither waits nor knows clusters
  bool changed_ = false;
};

}  // namespace rooftile::gpu
