// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/collective.cuh"

namespace rooftile::gpu {

void linear_collective_bf16(const DeviceScope& scope, const Bits16Params& p, int config) {
  launch_collective<tile::bf16>(scope, p, config);
}
void load_linear_collectives_bf16(const char* op) { load_collectives<tile::bf16>(op); }

}  // namespace rooftile::gpu
