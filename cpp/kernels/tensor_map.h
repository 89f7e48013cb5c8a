// SPDX-License-Identifier: Apache-2.0
// What Hopper's copy engine must know of a tensor (tile/tma.cuh).
#pragma once

#include <cuda.h>

#include "kernels/backend.h"

namespace rooftile::gpu {

// Rows of 16-bit elements, neighbours next to each other; from row to row `stride` elements, a multiple of 8.
struct MatrixShape {
  std::int64_t rows, columns, stride;
};
// Boxes of box_rows (256 at most) x box_columns (64 at most: 128 bytes), which arrive swizzled by 128 bytes. data: a
// multiple of 16 bytes.
CUtensorMap rows_map(const char* op, const void* data, DType dtype, const MatrixShape& shape, int box_rows,
                     int box_columns);

}  // namespace rooftile::gpu
