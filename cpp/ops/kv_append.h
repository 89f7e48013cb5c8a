// SPDX-License-Identifier: Apache-2.0
// kv_append as a part of other ops: its errors name the op that was called.
#pragma once

#include "rooftile/kv_cache.h"

namespace rooftile {

KernelName append(const char* op, const Context&, const KvCacheView&, TensorView k, TensorView v, TensorView rows,
                  TensorView counts);

}  // namespace rooftile
