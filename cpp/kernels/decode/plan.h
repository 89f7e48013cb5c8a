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
  int ctas = 0, ctas_per_sm = 1, cluster_size = 1, ctas_per_tile = 0;  // as in DecodeParams
  int m_blocks = 0;                                                    // m-blocks of a KV head
  std::size_t partial_o = 0, partial_ml = 0, reduction_o = 0;  // byte offsets in the workspace; work_prefix is at 0
  std::size_t workspace_bytes = 0;
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

// One compiled variant. Each file in inst/ returns the variants of one cache format.
class DeviceScope;
struct DecodeVariant {
  DecodeKey key;
  int ctas_per_sm;         // what __launch_bounds__ was given
  bool clusters;           // the variant can run as clusters
  std::size_t smem_bytes;  // dynamic shared memory of a CTA
  void (*launch)(const DeviceScope&, const DecodeParams&);
  void (*load)(const char* op);
};
std::span<const DecodeVariant> bits16_variants();
std::span<const DecodeVariant> int8_variants();
std::span<const DecodeVariant> fp8_variants();
std::span<const DecodeVariant> int4_variants();
std::span<const DecodeVariant> int4_kivi_variants();
std::span<const DecodeVariant> int4_kivi_sym_variants();

}  // namespace rooftile::gpu
