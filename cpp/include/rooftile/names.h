// SPDX-License-Identifier: Apache-2.0
// Help for a caller who misspelt a name.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace rooftile {

// Returns ", did you mean \"int4-kivi\"?" for the known name most similar to `given`, or "" if no name is similar.
// Similarity is the longest common subsequence, which must cover at least half of both names.
std::string did_you_mean(std::string_view given, std::span<const std::string> known);

// The beginning of a text in UTF-8: `longest` bytes of it, or a few less, so that no character is cut.
std::string_view beginning(std::string_view text, std::size_t longest);
// The text in quotes; of one longer than any name or plan the beginning and its length.
std::string quoted(std::string_view text);

}  // namespace rooftile
