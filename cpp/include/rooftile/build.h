// SPDX-License-Identifier: Apache-2.0
// What this build is and what it can run on this machine.
#pragma once

#include "rooftile/context.h"

namespace rooftile {

const char* cpu_variants();      // the kernel variants this CPU runs, fastest first: "avx2, portable, reference"
const char* gpu_backend();       // "sm_80, compute_80, sm_90a" or why there is none
int gpu_count();                 // GPUs that can be used now; 0 without a driver
const char* parallel_backend();  // "openmp (shared)" or "rooftile"
void warmup(
    const Context&);     // loads every GPU kernel on the context's device; a first use inside a stream capture may fail
int parallel_threads();  // how many threads a call uses unless told

}  // namespace rooftile
