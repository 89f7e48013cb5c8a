// SPDX-License-Identifier: Apache-2.0
// TMA descriptors (tensor maps) of 16-bit matrices, as TMA loads take them.
#pragma once

#include <cuda.h>

#include "kernels/backend.h"

namespace rooftile::gpu {

// A row-major matrix [rows, columns] of 16-bit elements; `stride` elements between rows, a multiple of 8.
struct MatrixShape {
  std::int64_t rows, columns, stride;
};
// The TMA descriptor of a matrix, for tiles of box_rows (at most 256) x box_columns (at most 64: 128 bytes) with the
// 128-byte swizzle. data: 16-byte aligned.
CUtensorMap rows_map(const char* op, const void* data, DType dtype, const MatrixShape& shape, int box_rows,
                     int box_columns);

}  // namespace rooftile::gpu
