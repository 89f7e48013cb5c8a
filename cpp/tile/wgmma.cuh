// SPDX-License-Identifier: Apache-2.0
// Whether the code that is compiled may contain wgmma, TMA and setmaxnreg: only sm_90a's may. Kernels test
// `#ifdef ROOFTILE_WGMMA`.
#pragma once

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define ROOFTILE_WGMMA 1
#endif
