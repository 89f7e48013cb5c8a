// SPDX-License-Identifier: Apache-2.0
#include "kernels/w4a16/tiles.cuh"

namespace rooftile::gpu {

W4Kernel w8a16_stream_half(int form, int span) { return w4a16_kernel<tile::half, 8>(form, span); }
W4TilesKernel w8a16_tiles_half(int form, W4Operand operand) { return w4a16_tiles_kernel<tile::half, 8>(form, operand); }

}  // namespace rooftile::gpu
