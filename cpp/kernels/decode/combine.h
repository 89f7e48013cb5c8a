// SPDX-License-Identifier: Apache-2.0
// The kernel `combine` (combine.cuh), which is the same for every KV format.
#pragma once

#include "kernels/decode/params.h"

namespace rooftile::gpu {

struct CombineKey {
  DType dtype;
  int head_dim;
};
class DeviceScope;
void launch_combine(const DeviceScope& scope, const CombineKey& key, const DecodeParams& p);
void load_combine(const char* op, const CombineKey& key);

}  // namespace rooftile::gpu
