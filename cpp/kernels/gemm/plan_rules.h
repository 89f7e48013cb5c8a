// SPDX-License-Identifier: Apache-2.0
// What plan.cpp asks of plan_bits16.cpp and plan_codes.cpp, and what those two share. Host only.
#pragma once

#include "core/plan_text.h"
#include "kernels/gemm/plan.h"

namespace rooftile::gpu {

constexpr std::int64_t divide_up(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }
inline constexpr int max_splits = 16;

// Bytes of the workspace that hold fp32 partial sums: (N padded to 16, tokens of a launch, splits).
inline std::size_t partial_bytes(const GemmProblem& p, const GemmPlan& plan) {
  if (!plan.separate_epilogue) return 0;
  return sizeof(float) * static_cast<std::size_t>(plan.splits * plan.launch_tokens * divide_up(p.n, 16) * 16);
}

// Sets the path, its choices and the reason.
void choose_bits16(const GemmProblem&, GemmPlan&);
void choose_codes(const GemmProblem&, GemmPlan&);
// Whether the path and its choices fit the problem.
bool bits16_fits(PlanCheck&, const GemmProblem&, const GemmPlan&);
bool codes_fit(PlanCheck&, const GemmProblem&, const GemmPlan&);
// Sets the fields that follow from the problem and the plan's choices.
void complete_bits16(const GemmProblem&, GemmPlan&);
void complete_codes(const GemmProblem&, GemmPlan&);

}  // namespace rooftile::gpu
