// SPDX-License-Identifier: Apache-2.0
// A row of the table of variants (dispatch.h) from a kernel.
#pragma once

#include "kernels/gemm/dispatch.h"
#include "kernels/gemm/params.h"
#include "kernels/launch.h"
#include "kernels/warmup.h"

namespace rooftile::gpu {

// `Params`: what the kernel takes; derives from GemmParams.
template <class Params, void (*kernel)(Params)>
struct VariantOf {
  static void launch(const DeviceScope& scope, const GemmPlan& plan, std::int64_t ctas, const GemmParams& p) {
    scope.launch(kernel, ctas, plan.threads, plan.shared_bytes, static_cast<const Params&>(p), Overlap::with_previous,
                 plan.cluster);
  }
  static void load(const char* op) { load_kernel(op, kernel); }
  static GemmVariant row(const GemmKey& key) { return {key, launch, load}; }
};

}  // namespace rooftile::gpu
