// SPDX-License-Identifier: Apache-2.0
// What append and rope_append share.
#pragma once

#include "kernels/backend.h"
#include "ops/check.h"

namespace rooftile {

// kv_append on the CPU or a GPU, with errors that name `op`.
KernelName append(const char* op, const Context&, const KvCacheView&, TensorView k, TensorView v, TensorView rows,
                  TensorView counts);

namespace check {

// k and v [B, T, kv_heads, head_dim] fit the cache; they, rows and counts share no memory with it.
void check_append(const char* op, const KvCacheView& cache, const TensorView& k, const TensorView& v,
                  const TensorView& rows, const TensorView& counts);

// The call on a GPU, with all that the host can check checked; a fault of an earlier one is raised. `cache` must
// outlive it.
AppendArgs gpu_append(const char* op, const Context& ctx, const KvCacheView& cache, const TensorView& k,
                      const TensorView& v, const TensorView& rows, const TensorView& counts);

}  // namespace check
}  // namespace rooftile
