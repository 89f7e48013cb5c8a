// SPDX-License-Identifier: Apache-2.0
// How many CTAs share a batch entry of append: plain data from a pure function of problem and device. Host only.
#pragma once

#include <cstdint>
#include <string>

#include "rooftile/context.h"
#include "rooftile/kv_cache.h"

namespace rooftile::gpu {

struct AppendProblem {
  std::int64_t batch = 0, tokens = 0;      // B, T
  std::int64_t kv_heads = 0, q_heads = 0;  // q_heads: 0 without RoPE
  int head_dim = 0;
  bool kivi = false;  // the format encodes groups of 32 tokens
};
struct AppendDevice {
  std::int64_t sms = 0;
  std::int64_t largest_cluster = 1;  // CTAs; 1: no clusters
};

// Work tiles of one batch entry, at most: one for each side, head and token (kivi formats: group that the tokens can
// touch), and one for two heads of q of a token. Without the slices of a closing group.
std::int64_t append_work_tiles(const AppendProblem& problem);

struct AppendPlan {
  const char* why = "";  // why the choices are so
  // The choices of a plan. entry_ctas: CTAs that share one batch entry, a power of two. cluster_size: entry_ctas, one
  // cluster and one launch; or 1, and a second kernel writes the lengths unless the CTA is alone.
  int entry_ctas = 1, cluster_size = 1;

  bool is_one_launch() const { return cluster_size == entry_ctas; }
};
// An entry gets enough CTAs to fill the device, but few enough that validation costs little beside the work, and at
// most a cluster if a full cluster does the work in two rounds of work tiles.
//   Example, 132 SMs, clusters of 8 CTAs, 8 KV heads: a decode step of 4 rows in int8 has 16 work tiles an entry, so
//   2 CTAs an entry, one cluster. A prompt of 2048 tokens in one row has 32768, so 1056 CTAs would fill the device;
//   rounded down to a power of two, 1024 CTAs, which cannot be a cluster.
AppendPlan plan_append(const AppendProblem& problem, const AppendDevice& device);
// The plan whose text is `forced`, or the one above where it is null. Raises not_supported for more work tiles than a
// call may have, and value errors for a plan that does not fit the call.
AppendPlan plan_append(const char* op, const AppendProblem&, const AppendDevice&, const char* forced);
// "append entry_ctas=2 cluster_size=2"
std::string text(const AppendPlan& plan);

// op: append or rope_append
KernelName kernel_of(const char* op, DType dtype, KvFormat format);

}  // namespace rooftile::gpu
