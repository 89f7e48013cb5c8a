// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace rooftile::gpu {

int device_count();  // GPUs that can be used now; 0 without a driver or in a build without CUDA

}  // namespace rooftile::gpu
