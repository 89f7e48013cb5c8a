// SPDX-License-Identifier: Apache-2.0
// What no family owns: the build's architectures, and copies.
#include <cuda_runtime.h>

#include "kernels/backend.h"
#include "kernels/device.h"
#include "kernels/launch.h"
#include "kernels/warmup.h"

namespace rooftile::gpu {

const char* backend() { return ROOFTILE_CUDA_TARGETS; }

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) == cudaSuccess) return count;
  (void)cudaGetLastError();   // no driver, or one that is too old
  return 0;
}

void warmup(const Context& ctx) {
  constexpr const char* op = "warmup";
  const DeviceScope scope(op, ctx);
  load_append_kernels(op);
  load_decode_kernels(op);
  load_elementwise_kernels(op);
  load_linear_kernels(op);
  load_norm_kernels(op);
  load_product_kernels(op);
  load_w4a16_kernels(op);
}

void copy_bytes(const char* op, const Context& ctx, void* to, const void* from, std::size_t bytes, bool wait) {
  if (bytes == 0) return;
  const DeviceScope scope(op, ctx);
  ROOFTILE_CUDA_CHECK(op, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, scope.stream()));
  if (wait) ROOFTILE_CUDA_CHECK(op, cudaStreamSynchronize(scope.stream()));
}

}  // namespace rooftile::gpu
