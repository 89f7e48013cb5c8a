// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/collective.cuh"

namespace rooftile::gpu {

void linear_collective_half(const DeviceScope& scope, const Bits16Params& p, int config) {
  launch_collective<tile::half>(scope, p, config);
}
void load_linear_collectives_half(const char* op) { load_collectives<tile::half>(op); }

}  // namespace rooftile::gpu
