// SPDX-License-Identifier: Apache-2.0
// The table of compiled variants, and how a plan finds its own. Host only.
#pragma once

#include <cstdint>
#include <span>

#include "core/op_args.h"
#include "kernels/gemm/plan.h"

namespace rooftile::gpu {

class DeviceScope;
struct GemmParams;

struct GemmKey {
  GemmPath path = GemmPath::stream;
  int bits = 16;  // of W
  DType dtype = DType::f16;
  int config = 0;             // as in GemmPlan
  bool vec = false;           // stream: rows are 16-byte vectors
  bool partial = false;       // collective: stores partial sums of a split of K
  bool own_scale = false;     // codes_stream: scales have x's type; else their type is known at run time
  bool small_groups = false;  // codes_stream: a step of 128 k may hold several scale blocks
  W4StreamZeros zeros = W4StreamZeros::symmetric;  // codes_stream
  W4Operand operand = W4Operand::codes;            // codes_wgmma
  bool operator==(const GemmKey&) const = default;
};
GemmKey key_of(const GemmPlan&, const GemmProblem&);

// One compiled variant. Each function below returns the variants of one 16-bit path, or of one width of codes, for one
// element type; the files in inst/ define them.
struct GemmVariant {
  GemmKey key;
  // The parameters have the type that the path's kernels take (params.h).
  void (*launch)(const DeviceScope&, const GemmPlan&, std::int64_t ctas, const GemmParams&);
  void (*load)(const char* op);
};
std::span<const GemmVariant> stream_bits16_half_variants();
std::span<const GemmVariant> stream_bits16_bf16_variants();
std::span<const GemmVariant> tma_half_variants();
std::span<const GemmVariant> tma_bf16_variants();
std::span<const GemmVariant> collective_half_variants();
std::span<const GemmVariant> collective_bf16_variants();
std::span<const GemmVariant> multistage_half_variants();
std::span<const GemmVariant> multistage_bf16_variants();
std::span<const GemmVariant> w4_half_variants();
std::span<const GemmVariant> w4_bf16_variants();
std::span<const GemmVariant> w8_half_variants();
std::span<const GemmVariant> w8_bf16_variants();

const GemmVariant* find_variant(const GemmKey&);  // null: not compiled

// Launches the plan's kernel on `ctas` CTAs (collective, multistage: CUTLASS knows how many).
void launch_variant(const DeviceScope&, const GemmPlan&, const GemmProblem&, std::int64_t ctas, const GemmParams&);

// Runs a product with W in 16 bits as planned. partial: the workspace of a plan with a separate epilogue.
void run_linear(const DeviceScope&, const LinearArgs&, const GemmProblem&, const GemmPlan&, float* partial);

}  // namespace rooftile::gpu
