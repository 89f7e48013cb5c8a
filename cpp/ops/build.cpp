// SPDX-License-Identifier: Apache-2.0
#include "rooftile/build.h"

#include "core/parallel.h"
#include "cpu/kernels.h"
#include "kernels/backend.h"
#include "kernels/device.h"

namespace rooftile {

const char* cpu_variants() { return cpu::runnable_variants(); }
int gpu_count() { return gpu::device_count(); }
const char* gpu_backend() { return gpu::backend(); }
void warmup(const Context& ctx) { gpu::warmup(ctx); }
int parallel_threads() { return Parallel(0).threads(); }

}  // namespace rooftile
