// SPDX-License-Identifier: Apache-2.0
// What sample_rows is compiled for, the element type of logits and whether they load as vectors, and what follows.
#pragma once

#include <cstdint>

#include "kernels/sampling/candidates.cuh"
#include "kernels/sampling/cluster_sums.cuh"
#include "kernels/sampling/find_key.cuh"
#include "kernels/sampling/row_slice.cuh"

namespace rooftile::gpu {

template <class T, bool vector>
struct SampleTraits {
  using Slice = RowSlice<T, vector>;  // a thread's tokens
  using Keys = RowKeys<T, vector>;    // and their keys
};

// Of a CTA, the same for all kernels. Behind it, where asked for: keys (slice, sample_threads), and a bit for each
// token of the CTA.
struct SampleStorage {
  KeySearch::Storage search;
  ClusterSums<sample_threads>::Storage sums;
  Candidates::Storage candidates;
  std::uint64_t random_bits;
};

}  // namespace rooftile::gpu
