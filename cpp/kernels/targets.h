// SPDX-License-Identifier: Apache-2.0
// Which GPUs a build runs on: pure functions of the list of compiled targets.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace rooftile::gpu {

// Why a GPU of compute capability major.minor runs no code compiled for `targets`, e.g. "sm_80, compute_80, sm_90a"
// (sm: machine code; compute: PTX that the driver of a newer GPU compiles). nullopt: the GPU runs one of the targets.
std::optional<std::string> refusal(std::string_view targets, int major, int minor);

// Whether the build holds code for Hopper (sm_90a), the only code with wgmma, clusters and PDL waits.
bool built_for_hopper(std::string_view targets);

}  // namespace rooftile::gpu
