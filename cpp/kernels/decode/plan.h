// SPDX-License-Identifier: Apache-2.0
// Chooses the variant, the grid and the workspace from the problem's shape and the device alone.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "kernels/decode/params.h"

namespace rooftile::gpu {

struct DecodeKey {
  DType dtype;
  KvFormat format;
  int head_dim;
  int block_m = 8;  // packed query rows of a work tile
  bool operator==(const DecodeKey&) const = default;
};
std::string text(const DecodeKey& key);  // "float16 int8 d128"

struct DecodePlan {
  int block_m = 8;  // packed query rows of a work tile: which variant runs
  int ctas = 0, ctas_per_sm = 1, cluster_size = 1, ctas_per_tile = 0;  // as in DecodeParams
  int m_blocks = 0;                                                    // m-blocks of a KV head
  std::size_t partial_o = 0, partial_ml = 0, reduction_o = 0;  // byte offsets in the workspace; work_prefix is at 0
  std::size_t workspace_bytes = 0;
  const char* why = "";  // the reason, for explain
};
struct DecodeShape {
  std::int64_t batch, tokens;  // B, T
  int kv_heads, q_per_kv, head_dim;
  int block_m;           // packed query rows of a work tile
  std::int64_t visible;  // tokens that the queries of one cache row see together, at most
};
struct DecodeDevice {
  int sms, ctas_per_sm;  // resident CTAs of the variant on one SM
  int max_cluster;       // 1: no clusters
};
DecodePlan plan_decode(const DecodeShape& shape, const DecodeDevice& device);
// "split_kv block_m=8 ctas=264 ctas_per_sm=2 cluster_size=1": the plan's choices, as plan= takes them
// (core/plan_text.h). Where a cache row is split follows from its length and is nobody's choice.
std::string text(const DecodePlan&);
// The first field that does not fit the call, and what fits: "ctas must be 1 to 264, got 300"; "" if all do.
std::string check_plan(const DecodeShape&, const DecodeDevice&, const DecodePlan&);
// The plan that a caller forces by its text, null for plan_decode's. Throws where it does not fit.
DecodePlan plan_decode(const char* op, const DecodeShape&, const DecodeDevice&, const char* forced);
// The block_m that a plan's text asks for, of the shape and the device above; 0 where `forced` is null.
int forced_block_m(const char* op, const char* forced);
KernelName kernel_of(const DecodeKey&);

// Tokens that the queries of one cache row see together, at most: one query sees `window` tokens (0: all), the other
// queries shift the window by T - 1, and ranges begin at a multiple of 32.
constexpr std::int64_t visible_tokens(std::int64_t capacity, std::int64_t window, std::int64_t tokens) {
  return window > 0 && window + tokens + 31 < capacity ? window + tokens + 31 : capacity;
}
// Whether a call with this many packed rows takes the variant rather than one of a smaller block_m.
constexpr bool fills(std::int64_t packed_rows, int block_m) { return 2 * packed_rows > block_m; }

// What a plan has to know of a variant.
struct DecodeFacts {
  int ctas_per_sm = 0;         // what __launch_bounds__ was given; 0: there is no such variant
  bool clusters = false;       // the variant can run as clusters
  std::size_t smem_bytes = 0;  // dynamic shared memory of a CTA; 0: not known, in a build without GPU kernels
};
DecodeFacts decode_facts(const DecodeKey&);           // of the compiled variants, where the build has them
DecodeFacts expected_decode_facts(const DecodeKey&);  // the same, for a build without them; a test compares

// One compiled variant.
class DeviceScope;
struct DecodeVariant {
  DecodeKey key;
  int ctas_per_sm;         // what __launch_bounds__ was given
  bool clusters;           // the variant can run as clusters
  std::size_t smem_bytes;  // dynamic shared memory of a CTA
  void (*launch)(const DeviceScope&, const DecodeParams&);
  void (*load)(const char* op);
};
// The variants of a KV format for queries of one dtype, in parts by head_dim, each with the smallest block_m first:
// the build may compile them apart (cpp/kernels/CMakeLists.txt).
enum class HeadDims : std::uint8_t { up_to_96, of_128, up_to_256, up_to_512 };
template <KvFormat F, DType dtype, HeadDims dims>
std::span<const DecodeVariant> decode_variants();

}  // namespace rooftile::gpu
