// SPDX-License-Identifier: Apache-2.0
// The one launch helper of all families: on the call's device and stream, with typed errors.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <string>

#include "kernels/backend.h"
#include "rooftile/context.h"
#include "rooftile/error.h"

namespace rooftile::gpu {

#define ROOFTILE_CUDA_CHECK(op, call)                                               \
  do {                                                                              \
    if (const cudaError_t rooftile_status = (call); rooftile_status != cudaSuccess) \
      ::rooftile::gpu::fail_cuda(op, #call, rooftile_status);                       \
  } while (0)

// Throws a device error with CUDA's own text, after clearing the runtime's last error.
[[noreturn]] inline void fail_cuda(const char* op, const char* what, cudaError_t status) {
  (void)cudaGetLastError();
  fail(ErrorKind::device, op, ": ", what, " failed: ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")");
}

// The caller's workspace of at least `bytes` on the device, checked for size and alignment; null for 0 bytes.
inline std::byte* workspace_of(const char* op, const Context& ctx, std::size_t bytes) {
  if (bytes == 0) return nullptr;
  const Lender::Memory lent =
      ctx.lender ? ctx.lender->lend(ctx, bytes) : Lender::Memory{ctx.workspace, ctx.workspace_bytes};
  ROOFTILE_CHECK(lent.bytes >= bytes, op, ": workspace must have ", bytes, " bytes, got ", lent.bytes);
  ROOFTILE_CHECK(reinterpret_cast<std::uintptr_t>(lent.data) % 16 == 0, op,
                 ": workspace must start at a multiple of 16 bytes");
  return static_cast<std::byte*>(lent.data);
}
// The Xs that begin `bytes` bytes into the workspace.
template <class X>
X* workspace_at(std::byte* workspace, std::size_t bytes) {
  return static_cast<X*>(static_cast<void*>(workspace + bytes));
}

// Device properties, queried once per device.
struct DeviceFacts {
  int sms = 0;
  int cta_shared = 0, sm_shared = 0,
      reserved_shared = 0;             // bytes of shared memory: most of a CTA, of an SM, reserved for each CTA
  int max_window = 0;                  // bytes of memory whose place in L2 a launch may choose; 0: none
  bool hopper = false;                 // Hopper's machine code runs; PTX of older GPUs has no PDL and no clusters
  std::optional<std::string> refusal;  // why nothing of this build runs
};
const DeviceFacts& device_facts(const char* op, int device);

// Raises a kernel's dynamic shared memory limit on the current device to at least `bytes`. The limit never shrinks:
// another thread may be about to launch the kernel with more.
void allow_shared(const char* op, int device, const void* kernel, std::size_t bytes);

// with_previous: PDL. The kernel waits in its own code (tile/cta_sync.cuh) for the previous launch and may start while
// that one runs. Code for GPUs other than Hopper does not wait, so there the kernel starts after the previous launch.
enum class Overlap { none, with_previous };

// Makes a call's device current for its lifetime and restores the caller's current device afterwards.
class DeviceScope {
 public:
  DeviceScope(const char* op, const Context& ctx)
      : op_(op),
        stream_(static_cast<cudaStream_t>(ctx.stream)),
        device_(ctx.device.index),
        facts_(device_facts(op, device_)) {
    if (facts_.refusal) fail(ErrorKind::not_supported, op, ": ", name(ctx.device), " ", *facts_.refusal);
    ROOFTILE_CUDA_CHECK(op, cudaGetDevice(&before_));
    if (device_ != before_) ROOFTILE_CUDA_CHECK(op, cudaSetDevice(device_));  // last: nothing throws after the change
    changed_ = device_ != before_;
  }
  DeviceScope(const DeviceScope&) = delete;
  ~DeviceScope() {
    if (changed_) (void)cudaSetDevice(before_);
  }

  int sms() const { return facts_.sms; }
  bool has_wgmma() const { return facts_.hopper; }
  // CTAs; without Hopper's machine code a cluster is one CTA.
  int largest_cluster() const { return facts_.hopper ? 8 : 1; }
  // CTAs with `shared_bytes` of shared memory (plus the reserved bytes) that one SM holds at once. Throws if a CTA may
  // not have that much.
  int ctas_that_fit(std::size_t shared_bytes) const {
    ROOFTILE_CHECK_KIND(not_supported, shared_bytes <= static_cast<std::size_t>(facts_.cta_shared), op_,
                        ": the kernel needs ", shared_bytes, " bytes of shared memory in a CTA, the device has ",
                        facts_.cta_shared);
    return static_cast<int>(static_cast<std::size_t>(facts_.sm_shared) /
                            (shared_bytes + static_cast<std::size_t>(facts_.reserved_shared)));
  }
  cudaStream_t stream() const { return stream_; }
  const char* op() const { return op_; }

  // CTAs of a grid along x and y; x runs fastest.
  struct Grid {
    std::int64_t x, y = 1;
    Grid(std::int64_t x, std::int64_t y = 1) : x(x), y(y) {}
  };
  // Says that the launches of this scope read `bytes` bytes from `data` on once: L2 evicts them before anything else.
  // Weights are far larger than L2. Without this a product leaves nothing else in it, and the kernels between two
  // products find their own machine code in memory (docs/design/085-weights-leave-l2-first.md).
  void reads_once(const void* data, std::size_t bytes) {
    once_ = data;
    once_bytes_ = std::min(bytes, static_cast<std::size_t>(facts_.max_window));
  }
  // One launch; an empty grid launches nothing. `kernel` takes one parameter struct by value. cluster: number of
  // neighbouring CTAs that run at once and may wait for each other (tile/cta_sync.cuh).
  template <class Params>
  void launch(void (*kernel)(Params), Grid grid, int threads, std::size_t shared_bytes, const Params& params,
              Overlap overlap = Overlap::none, int cluster = 1) const {
    launch(reinterpret_cast<const void*>(kernel), grid, threads, shared_bytes, &params, overlap, cluster);
  }

 private:
  void launch(const void* kernel, Grid grid, int threads, std::size_t shared_bytes, const void* params, Overlap overlap,
              int cluster) const;

  const char* op_;
  cudaStream_t stream_;
  int device_, before_ = 0;
  const DeviceFacts& facts_;
  bool changed_ = false;
  const void* once_ = nullptr;  // what launches read once; 0 bytes: nothing
  std::size_t once_bytes_ = 0;
};

}  // namespace rooftile::gpu
