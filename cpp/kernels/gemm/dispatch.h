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

// One compiled variant. Each function below returns the variants of a path, or of one config of it, for one dtype of x;
// the build compiles them in several source files that it writes (cpp/kernels/CMakeLists.txt).
struct GemmVariant {
  GemmKey key;
  // The parameters have the type that the path's kernels take (params.h).
  void (*launch)(const DeviceScope&, const GemmPlan&, std::int64_t ctas, const GemmParams&);
  void (*load)(const char* op);
};
template <DType>
std::span<const GemmVariant> stream_bits16_variants();
template <DType>
std::span<const GemmVariant> tma_variants();
template <DType, int config, bool partial>
std::span<const GemmVariant> collective_variants();
template <DType>
std::span<const GemmVariant> multistage_variants();
template <DType, int bits, int config>
std::span<const GemmVariant> stream_codes_variants();
template <DType, int bits, int config>
std::span<const GemmVariant> wgmma_codes_variants();

const GemmVariant* find_variant(const GemmKey&);  // null: not compiled

// Launches the plan's kernel on `ctas` CTAs (collective, multistage: CUTLASS knows how many).
void launch_variant(const DeviceScope&, const GemmPlan&, const GemmProblem&, std::int64_t ctas, const GemmParams&);

// Runs a product with W in 16 bits as planned. partial: the workspace of a plan with a separate epilogue.
void run_linear(const DeviceScope&, const LinearArgs&, const GemmProblem&, const GemmPlan&, float* partial);

}  // namespace rooftile::gpu
