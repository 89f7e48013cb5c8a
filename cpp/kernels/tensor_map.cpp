// SPDX-License-Identifier: Apache-2.0
#include "kernels/tensor_map.h"

#include <cuda_runtime.h>
#include <cudaTypedefs.h>

#include "kernels/launch.h"

namespace rooftile::gpu {
namespace {

// The driver's function, found through the runtime: the library is not linked against libcuda.
PFN_cuTensorMapEncodeTiled_v12000 find_encode(const char* op) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  ROOFTILE_CUDA_CHECK(
      op, cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess || !found)
    fail(ErrorKind::device, op,
         ": this CUDA driver has no cuTensorMapEncodeTiled; it is too old for this GPU's kernels");
  return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(found);
}

}  // namespace

CUtensorMap rows_map(const char* op, const void* data, DType dtype, const MatrixShape& shape, int box_rows,
                     int box_columns) {
  static const PFN_cuTensorMapEncodeTiled_v12000 encode = find_encode(op);
  CUtensorMap map;
  const cuuint64_t size[2] = {static_cast<cuuint64_t>(shape.columns), static_cast<cuuint64_t>(shape.rows)};
  const cuuint64_t stride[1] = {2 * static_cast<cuuint64_t>(shape.stride)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(box_columns), static_cast<cuuint32_t>(box_rows)}, step[2] = {1, 1};
  const CUtensorMapDataType type =
      dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  const CUresult status =
      encode(&map, type, 2, const_cast<void*>(data), size, stride, box, step, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS)
    fail(ErrorKind::device, op, ": cuTensorMapEncodeTiled failed: error ", static_cast<int>(status));
  return map;
}

}  // namespace rooftile::gpu
