// SPDX-License-Identifier: Apache-2.0
// Which variant runs, on how many blocks, with how much workspace: from the problem's shape and the device alone.
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
  int block_m = 8;  // of a task: query heads of a KV head times new tokens
  bool operator==(const DecodeKey&) const = default;
};
std::string text(const DecodeKey& key);  // "float16 int8 d128"

struct DecodePlan {
  int ctas = 0, ctas_per_sm = 1, cluster_size = 1, ctas_per_tile = 0;  // as in DecodeParams
  int m_blocks = 0;                                                    // tasks of a KV head
  std::size_t partial_o = 0, partial_ml = 0,
              reduction_o = 0;  // offsets of the parts of the workspace; row_begin is at 0
  std::size_t workspace_bytes = 0;
};
struct DecodeShape {
  std::int64_t batch, tokens;
  int kv_heads, q_per_kv, head_dim;
  int block_m;           // of a task
  std::int64_t visible;  // tokens that the queries of a row see together, at most: of capacity and window
};
struct DecodeDevice {
  int sms, ctas_per_sm;  // how many of the variant's blocks a multiprocessor of this device holds
  int max_cluster;
};
DecodePlan plan_decode(const DecodeShape& shape, const DecodeDevice& device);

// One compiled variant. The table of all is the sum of its files'.
class DeviceScope;
struct DecodeVariant {
  DecodeKey key;
  int ctas_per_sm;  // at most, what its registers were cut for
  bool clusters;
  std::size_t smem_bytes;  // of a block
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
