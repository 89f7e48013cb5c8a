// SPDX-License-Identifier: Apache-2.0
// What this build is and what it can run on this machine.
#pragma once

namespace rooftile {

const char* cpu_variants();       // the kernel variants this CPU runs, fastest first: "avx512, avx2, portable, reference"
const char* gpu_backend();        // "sm_80, sm_90a" or why there is none
const char* parallel_backend();   // "openmp (shared)" or "rooftile"
int parallel_threads();           // how many threads a call uses unless told

}  // namespace rooftile
