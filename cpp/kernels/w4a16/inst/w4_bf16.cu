// SPDX-License-Identifier: Apache-2.0
#include "kernels/w4a16/stream.cuh"
#include "kernels/w4a16/wgmma.cuh"

namespace rooftile::gpu {

W4Kernel w4a16_stream_bf16(const W4StreamVariant& v) { return w4a16_stream_kernel<tile::bf16, 4>(v); }
W4WgmmaKernel w4a16_wgmma_bf16(int config, W4Operand operand) {
  return w4a16_wgmma_kernel<tile::bf16, 4>(config, operand);
}

}  // namespace rooftile::gpu
