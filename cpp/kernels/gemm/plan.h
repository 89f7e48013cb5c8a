// SPDX-License-Identifier: Apache-2.0
// How a product is divided among CTAs: plain data from a pure function of problem and device. Host only.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/gemm/configs.h"
#include "rooftile/context.h"
#include "rooftile/gemm.h"

namespace rooftile {
struct LinearArgs;
struct W4MatmulArgs;
}  // namespace rooftile

namespace rooftile::gpu {

// The mainloop that runs. W in 16 bits: stream (stream_bits16.cuh, any strides), on Hopper's wgmma tma (tma_bits16.cuh)
// and collective (collective.cuh), on mma.sync multistage (multistage.cuh). W in 4 or 8 bits: codes_stream
// (stream_codes.cuh), on Hopper codes_wgmma (wgmma_codes.cuh).
enum class GemmPath : std::uint8_t { stream, tma, collective, multistage, codes_stream, codes_wgmma };
// Kernels of wgmma or TMA: the target gemm_hopper of CMakeLists.txt, which is compiled for Hopper alone.
constexpr bool needs_hopper(GemmPath path) {
  return path == GemmPath::tma || path == GemmPath::collective || path == GemmPath::codes_wgmma;
}

// The A operands of wgmma_codes.cuh. codes, codes_64: u - zero, exact, whose sums over 128 or 64 k are scaled in fp32.
// f16_scales, bf16_scales: weights rounded to x's type, from scales (and minima) of that 16-bit type.
enum class W4Operand : std::uint8_t { codes, codes_64, f16_scales, bf16_scales };
constexpr bool w4_exact(W4Operand operand) { return operand <= W4Operand::codes_64; }

struct GemmProblem {
  std::int64_t m = 0, n = 0, k = 0;  // rows of x, rows of W, columns of both
  int bits = 16;                     // of W: 4, 8 or 16
  int group = 0;                     // of W in 4 or 8 bits, as are zeros and scale_dtype
  W4Zeros zeros = W4Zeros::symmetric;
  DType scale_dtype = DType::f16;
  DType dtype = DType::f16;  // of x and y
  int sms = 0;
  bool hopper = false;           // the device has wgmma, TMA and clusters
  bool gated = false;            // rows of W are [gate | up]
  bool batch_invariant = false;  // W in 4 or 8 bits
  // Alignment (rows.h) of x in the order of W's columns, which act-order changes, and of W in 16 bits
  bool vec = false;               // rows are whole 16-byte vectors
  bool aligned_operands = false;  // and meet the rules of TMA
  bool aligned_all = false;       // and y, residual and bias do
};

struct GemmPlan {
  GemmPath path = GemmPath::stream;
  // The choices of a path (plan.cpp has the list)
  int config = 0;   // index of the path's tile config; stream: 0 up to 8 tokens a CTA, else 1
  int cluster = 1;  // CTAs of a cluster. tma: one for each split of K; codes_stream: the same, or 1; codes_wgmma: with
                    // the same tokens, a divisor of n_blocks
  int splits = 1;   // splits of K whose sums go through the workspace, or (codes_stream) a cluster
  int row_tiles = 1, slices_log2 = 0;  // stream: a CTA has row_tiles << slices_log2 warps
  int tma_rows = 0, stages = 0;        // tma: rows of W of a CTA; stages of its ring
  int m_group = 1;                     // codes_wgmma: m-blocks that meet all rows of W before the next ones do
  int stream_k_ranges = 0;  // codes_wgmma: stream-K work ranges for each m-block, one a cluster; 0: no stream-K
  int expand_rows = 0;      // codes_wgmma: rows of W that expand.cuh writes to the workspace at a time; 0: no expansion
  // What follows from the problem and the choices
  bool separate_epilogue = false;           // sums go to the workspace and a second kernel runs the epilogue
  int split_steps = 0;                      // steps of a split of K, of the mainloop's own length (configs.h)
  std::int64_t launch_tokens = 0;           // of one launch; below m several launches follow each other
  std::int64_t m_blocks = 0, n_blocks = 0;  // of one launch: CTAs along tokens, and along rows of W
  int threads = 0;                          // of a CTA; collective, multistage: CUTLASS knows
  std::size_t shared_bytes = 0, workspace_bytes = 0;
  // The same, of W in 4 or 8 bits
  W4Operand operand = W4Operand::codes;  // codes_wgmma
  int scale_k = 0;                       // k of a scale block within a step: 32, 64 or 128; splits start at multiples
  std::int64_t gate_tiles = 0;           // gated, gate and up in one CTA: tile rows of W from a gate to its up
  int x_tile_tokens = 0;                 // codes_stream: rows of a tile of x in shared memory
  int sums_offset = 0;                   // codes_stream: bytes to the epilogue's sums in shared memory
  std::size_t semaphore_bytes = 0, fixup_bytes = 0;  // stream-K: the beginning of the workspace
  std::size_t gathered_bytes = 0;                    // codes_wgmma: x gathered, the end of the workspace
  int gather_ctas = 1;                               // CTAs that gather one token
  const char* why = "";
};

// CTAs of collective.cuh for one split of K, whole clusters.
std::int64_t linear_collective_ctas(LinearTile, std::int64_t n, std::int64_t m);

GemmProblem problem_of(const LinearArgs&, int sms, bool hopper);
// aligned_outputs: false where y, bias and residual are not known yet.
GemmProblem problem_of(const W4MatmulArgs&, int sms, bool hopper, bool aligned_outputs = true);
KernelName kernel_of(const GemmPlan&, const GemmProblem&);  // the kernel's name
// "tma config=0 tma_rows=64 cluster=2 stages=5": the path and its choices, as plan= takes them (core/plan_text.h).
std::string text(const GemmPlan&);
// The first field that does not fit the problem, and what fits: "config must be 0 to 3, got 7"; "" if all do.
std::string check_plan(const GemmProblem&, const GemmPlan&);

// The same problem and device give the same plan. Splits of K, and with them the bits of a row, depend on m through its
// bucket only. W in 16 bits: on Hopper, where rows are 16-byte vectors, up to 64 tokens, 65 to 128, 129 to 256, and
// more; elsewhere up to 16, and more. W in 4 or 8 bits: up to 8, 16, 32 and 64 tokens, then each further 64
// (codes_wgmma: 128); batch_invariant takes the split of the bucket of 16 at every m. Stream-K does not change bits.
GemmPlan plan_gemm(const GemmProblem&);
// The plan that a caller forces by its text, null for the one above. Throws where it does not fit.
GemmPlan plan_gemm(const char* op, const GemmProblem&, const char* forced);

}  // namespace rooftile::gpu
