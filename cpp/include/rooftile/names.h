// SPDX-License-Identifier: Apache-2.0
// Help for a caller who misspelt a name.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace rooftile {

// ", did you mean \"int4-kivi\"?" for the known name most like `given`, or nothing where none is: names are alike by
// the letters they have in common in one order, at least half of both.
std::string did_you_mean(std::string_view given, std::span<const std::string> known);

}  // namespace rooftile
