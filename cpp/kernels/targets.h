// SPDX-License-Identifier: Apache-2.0
// Which GPUs a build runs on, decided from text alone.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace rooftile::gpu {

// Why a GPU of compute capability major.minor runs nothing that was compiled for `targets`, "sm_80, compute_80,
// sm_90a": sm is machine code, compute is PTX that newer GPUs compile for themselves. None: it runs one of them.
std::optional<std::string> refusal(std::string_view targets, int major, int minor);

// Whether a Hopper GPU runs code of its own: wgmma, clusters and waits for the kernel before exist in no other.
bool built_for_hopper(std::string_view targets);

}  // namespace rooftile::gpu
