// SPDX-License-Identifier: Apache-2.0
// Stands in for every GPU family in a build without CUDA.
#include "kernels/backend.h"

namespace rooftile::gpu {

const char* backend() { return "none: built without CUDA"; }

}  // namespace rooftile::gpu
