// SPDX-License-Identifier: Apache-2.0
#pragma once

#ifdef __CUDACC__
#define ROOFTILE_HD __host__ __device__
#else
#define ROOFTILE_HD
#endif
