// SPDX-License-Identifier: Apache-2.0
#include "kernels/targets.h"

#include <algorithm>
#include <charconv>

namespace rooftile::gpu {
namespace {

// capability: ten times the major number plus the minor one, as in the target's name.
bool runs(std::string_view target, int capability) {
  const bool ptx = target.starts_with("compute_");
  target.remove_prefix(target.find('_') + 1);
  int built = 0;
  std::from_chars(target.data(), target.data() + target.size(), built);
  if (target.ends_with('a')) return capability == built;  // architecture-specific code runs on that architecture only
  return capability >= built && (ptx || capability / 10 == built / 10);
}

template <class F>
bool any_target(std::string_view targets, F&& accepts) {
  for (std::string_view rest = targets; !rest.empty();) {
    const std::string_view target = rest.substr(0, rest.find(", "));
    if (accepts(target)) return true;
    rest.remove_prefix(std::min(rest.size(), target.size() + 2));
  }
  return false;
}

}  // namespace

bool built_for_hopper(std::string_view targets) {
  return any_target(targets, [](std::string_view target) { return target == "sm_90a" || target == "compute_90a"; });
}

std::optional<std::string> refusal(std::string_view targets, int major, int minor) {
  if (any_target(targets, [&](std::string_view one) { return runs(one, 10 * major + minor); })) return std::nullopt;
  return "has compute capability " + std::to_string(major) + "." + std::to_string(minor) +
         ", which runs none of what this build is compiled for: " + std::string(targets);
}

}  // namespace rooftile::gpu
