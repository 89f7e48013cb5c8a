// SPDX-License-Identifier: Apache-2.0
// CUDA loads a kernel at its first use, which a stream capture may not allow. warmup() loads all kernels that the GPU
// runs, so those of wgmma and TMA on Hopper alone: each family has one function here that loads its own. Kernels that
// convert weights or measure the roof are left out, because no capture contains them.
#pragma once

#include "kernels/launch.h"

namespace rooftile::gpu {

// Loads one kernel on the current device.
template <class Params>
void load_kernel(const char* op, void (*kernel)(Params)) {
  cudaFuncAttributes attributes;
  ROOFTILE_CUDA_CHECK(op, cudaFuncGetAttributes(&attributes, kernel));
}

void load_append_kernels(const char* op);
void load_decode_kernels(const char* op);
void load_elementwise_kernels(const char* op);
void load_embedding_kernels(const char* op);
void load_gemm_kernels(const char* op, bool hopper);
void load_norm_kernels(const char* op);
void load_rope_kernels(const char* op);
void load_sampling_kernels(const char* op);

}  // namespace rooftile::gpu
