// SPDX-License-Identifier: Apache-2.0
// Services shared by all families: the build's targets, device properties, shared memory limits, warmup and copies.
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

#include "kernels/backend.h"
#include "kernels/device.h"
#include "kernels/launch.h"
#include "kernels/targets.h"
#include "kernels/warmup.h"

namespace rooftile::gpu {

const char* backend() { return ROOFTILE_CUDA_TARGETS; }

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();  // no driver, or one that is too old
  return 0;
}

const DeviceFacts& device_facts(const char* op, int device) {
  static std::mutex mutex;
  static std::map<int, DeviceFacts> known;  // references into a map stay valid
  const std::lock_guard lock(mutex);
  if (const auto found = known.find(device); found != known.end()) return found->second;
  DeviceFacts facts;
  const auto ask = [&](int& value, cudaDeviceAttr what) {
    ROOFTILE_CUDA_CHECK(op, cudaDeviceGetAttribute(&value, what, device));
  };
  int major = 0, minor = 0;
  ask(major, cudaDevAttrComputeCapabilityMajor);
  ask(minor, cudaDevAttrComputeCapabilityMinor);
  ask(facts.sms, cudaDevAttrMultiProcessorCount);
  ask(facts.cta_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  ask(facts.sm_shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  ask(facts.reserved_shared, cudaDevAttrReservedSharedMemoryPerBlock);
  ask(facts.max_window, cudaDevAttrMaxAccessPolicyWindowSize);
  facts.hopper = major == 9 && built_for_hopper(backend());
  facts.refusal = refusal(backend(), major, minor);
  return known.emplace(device, facts).first->second;
}

void allow_shared(const char* op, int device, const void* kernel, std::size_t bytes) {
  static std::mutex mutex;
  static std::map<std::pair<int, const void*>, std::size_t> allowed;
  const std::lock_guard lock(mutex);
  std::size_t& most = allowed[{device, kernel}];
  if (bytes <= most) return;
  ROOFTILE_CUDA_CHECK(
      op, cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(bytes)));
  most = bytes;
}

void DeviceScope::launch(const void* kernel, Grid grid, int threads, std::size_t shared_bytes, const void* params,
                         Overlap overlap, int cluster) const {
  if (grid.x == 0) return;
  constexpr std::int64_t max_x = 0x7fffffff, max_y = 65535;  // of any device
  ROOFTILE_CHECK_KIND(not_supported, grid.x <= max_x && grid.y <= max_y, op_, ": the call needs a grid of ", grid.x,
                      " x ", grid.y, " CTAs, a device takes at most ", max_x, " x ", max_y, "; split it");
  if (shared_bytes > 48 * 1024) allow_shared(op_, device_, kernel, shared_bytes);
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = shared_bytes;
  config.stream = stream_;
  cudaLaunchAttribute attributes[3] = {};
  config.attrs = attributes;
  const auto add = [&](cudaLaunchAttributeID id) -> cudaLaunchAttributeValue& {
    attributes[config.numAttrs].id = id;
    return attributes[config.numAttrs++].val;
  };
  if (overlap == Overlap::with_previous && facts_.hopper)
    add(cudaLaunchAttributeProgrammaticStreamSerialization).programmaticStreamSerializationAllowed = 1;
  if (cluster > 1) {
    auto& size = add(cudaLaunchAttributeClusterDimension).clusterDim;
    size.x = static_cast<unsigned>(cluster);
    size.y = size.z = 1;
  }
  if (once_bytes_ > 0) {
    cudaAccessPolicyWindow& window = add(cudaLaunchAttributeAccessPolicyWindow).accessPolicyWindow;
    window.base_ptr = const_cast<void*>(once_);
    window.num_bytes = once_bytes_;
    window.hitRatio = 1.0f;
    window.hitProp = window.missProp = cudaAccessPropertyStreaming;
  }
  void* arguments[] = {const_cast<void*>(params)};
  ROOFTILE_CUDA_CHECK(op_, cudaLaunchKernelExC(&config, kernel, arguments));
}

void warmup(const Context& ctx) {
  constexpr const char* op = "warmup";
  const DeviceScope scope(op, ctx);
  load_append_kernels(op);
  load_decode_kernels(op);
  load_elementwise_kernels(op);
  load_embedding_kernels(op);
  load_gemm_kernels(op, scope.has_wgmma());
  load_norm_kernels(op);
  load_rope_kernels(op);
  load_sampling_kernels(op);
}

void copy_bytes(const char* op, const Context& ctx, void* to, const void* from, std::size_t bytes, bool wait) {
  if (bytes == 0) return;
  const DeviceScope scope(op, ctx);
  ROOFTILE_CUDA_CHECK(op, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, scope.stream()));
  if (wait) ROOFTILE_CUDA_CHECK(op, cudaStreamSynchronize(scope.stream()));
}

}  // namespace rooftile::gpu
