// SPDX-License-Identifier: Apache-2.0
#include "kernels/gemm/stream_codes.cuh"
#include "kernels/gemm/wgmma.cuh"

namespace rooftile::gpu {

W4Kernel w8a16_stream_half(const W4StreamVariant& v) { return w4a16_stream_kernel<tile::half, 8>(v); }
W4WgmmaKernel w8a16_wgmma_half(int config, W4Operand operand) {
  return w4a16_wgmma_kernel<tile::half, 8>(config, operand);
}

}  // namespace rooftile::gpu
