// SPDX-License-Identifier: Apache-2.0
// What the GPU side of this build is.
#pragma once

namespace rooftile::gpu {

const char* backend();   // "sm_80, sm_90a" or why there is none

}  // namespace rooftile::gpu
