// SPDX-License-Identifier: Apache-2.0
// What no family owns: the build's architectures, and copies.
#include <cuda_runtime.h>

#include "kernels/backend.h"
#include "kernels/launch.h"

namespace rooftile::gpu {

const char* backend() { return ROOFTILE_CUDA_TARGETS; }

void copy_bytes(const char* op, const Context& ctx, void* to, const void* from, std::size_t bytes) {
  if (bytes == 0) return;
  const DeviceScope scope(op, ctx);
  ROOFTILE_CUDA_CHECK(op, cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, scope.stream()));
  ROOFTILE_CUDA_CHECK(op, cudaStreamSynchronize(scope.stream()));
}

}  // namespace rooftile::gpu
