// SPDX-License-Identifier: Apache-2.0
#include "kernels/w4a16/tiles.cuh"

namespace rooftile::gpu {

W4Kernel w4a16_stream_bf16(int form, int span, W4Zeros zeros) { return w4a16_kernel<tile::bf16>(form, span, zeros); }
W4TilesKernel w4a16_tiles_bf16(int form, W4Operand operand) { return w4a16_tiles_kernel<tile::bf16, 4>(form, operand); }

}  // namespace rooftile::gpu
