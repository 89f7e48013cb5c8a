// SPDX-License-Identifier: Apache-2.0
// A plan as text: "tma config=0 tma_rows=64 cluster=2 stages=5" names a path, then everything that path may choose.
// Callers read it in rt.explain and force it with plan=. The other fields of a plan follow from these and the problem.
#pragma once

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>

#include "rooftile/error.h"
#include "rooftile/names.h"

namespace rooftile {

template <class Plan>
struct PlanChoice {
  const char* name;  // of the field
  int Plan::* value;
};
template <class Plan>
struct PlanPath {
  const char* name;
  std::span<const PlanChoice<Plan>> choices;
};

template <class Plan>
std::string plan_text(const PlanPath<Plan>& path, const Plan& plan) {
  std::string text = path.name;
  for (const PlanChoice<Plan>& choice : path.choices)
    ((text += ' ').append(choice.name) += '=') += std::to_string(plan.*choice.value);
  return text;
}

// Sets the choices that `text` names and returns the index of its path. A path that is none of `paths` is an error of
// kind not_supported; a choice that is missing, unknown, twice there or no number is one of kind value.
template <class Plan>
std::size_t read_plan(const char* op, std::string_view text, std::span<const PlanPath<Plan>> paths, Plan& plan) {
  auto next_word = [rest = text]() mutable {  // words apart by spaces; "" at the end
    rest.remove_prefix(std::min(rest.find_first_not_of(' '), rest.size()));
    const std::string_view word = rest.substr(0, rest.find(' '));
    rest.remove_prefix(word.size());
    return word;
  };
  const std::string_view name = next_word();
  const auto form = [](const PlanPath<Plan>& path) {
    std::string all = path.name;
    for (const PlanChoice<Plan>& choice : path.choices) ((all += ' ') += choice.name) += "=";
    return '"' + all + '"';
  };
  std::size_t at = 0;
  while (at < paths.size() && name != paths[at].name) ++at;
  if (at == paths.size()) {
    std::string known;
    for (const PlanPath<Plan>& path : paths) (known += known.empty() ? "" : ", ") += form(path);
    fail(ErrorKind::not_supported, op, ": plan ", quoted(text), " is no plan of the GPU kernels, which are ", known);
  }
  const PlanPath<Plan>& path = paths[at];
  unsigned found = 0;  // bit i: choice i was read
  for (std::string_view word = next_word(); !word.empty(); word = next_word()) {
    const std::string_view key = word.substr(0, word.find('=')),
                           digits = word.substr(std::min(key.size() + 1, word.size()));
    std::size_t i = 0;
    while (i < path.choices.size() && key != path.choices[i].name) ++i;
    ROOFTILE_CHECK(i < path.choices.size() && !(found >> i & 1), op, ": plan ", quoted(text), " must read ", form(path),
                   ", got ", beginning(key, 60), i < path.choices.size() ? " twice" : "");
    int value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    ROOFTILE_CHECK(error == std::errc() && end == digits.data() + digits.size(), op, ": plan ", quoted(text),
                   " must give ", key, " a number of 32 bits, got ", quoted(digits));
    plan.*path.choices[i].value = value;
    found |= 1u << i;
  }
  for (std::size_t i = 0; i < path.choices.size(); ++i)
    ROOFTILE_CHECK(found >> i & 1, op, ": plan ", quoted(text), " must read ", form(path), ", got no ",
                   path.choices[i].name);
  return at;
}

// Collects what is wrong with a plan: the first condition that does not hold. The conditions return whether they hold,
// so that && stops at that one.
class PlanCheck {
 public:
  template <class... Parts>
  bool need(bool holds, const Parts&... parts) {
    if (holds) return true;
    std::ostringstream text;
    (text << ... << parts);
    wrong_ = text.str();
    return false;
  }
  bool range(const char* field, std::int64_t value, std::int64_t least, std::int64_t most) {
    return need(least <= value && value <= most, field, " must be ", least, " to ", most, ", got ", value);
  }
  // A field that follows from the problem and the plan's choices.
  template <class T>
  bool follows(const char* field, T value, T expected) {
    return need(value == expected, field, " must be ", +expected, ", got ", +value);
  }
  const std::string& wrong() const { return wrong_; }  // "" if everything holds

 private:
  std::string wrong_;
};

// Raises a value error that names the plan whose text was forced, and what does not hold, unless fits(check).
template <class Fits>
void require_fit(const char* op, std::string_view text, const Fits& fits) {
  PlanCheck check;
  ROOFTILE_CHECK(fits(check), op, ": plan ", quoted(text), " does not fit this call: ", check.wrong());
}

}  // namespace rooftile
