// SPDX-License-Identifier: Apache-2.0
// What the kernels of this folder are compiled for, and what follows: CTAs of an SM.
#pragma once

#include <cstdint>

#include "kernels/launch.h"
#include "tile/strided_rows.cuh"

namespace rooftile::gpu {

// Kernels with a thread for each vector of eight elements: gated activations, rope, merge, embedding.
inline constexpr int cta_threads = 128;

// CTAs of an SM here and below: as many as let ptxas keep all loads of a thread in registers without spills. 16 of 128
// threads are 32 registers a thread, 10 are 48, 8 are 64; strided rows need more, an address for each element.
template <bool vector>
struct GatedTraits {
  static constexpr int ctas_per_sm = vector ? 16 : 8;
};
template <bool vector>
struct EmbeddingTraits {
  static constexpr int ctas_per_sm = vector ? 16 : 10;
};
template <bool vector>
struct MergeTraits {
  static constexpr int ctas_per_sm = vector ? 10 : 8;
};
// Of few tokens a thread derives the addresses of y before it waits for the kernel before, of many after its loads,
// which leaves registers for 12 CTAs an SM: on an H200 1 token takes 1.14 and 1.31 us, 16384 tokens 93.5 and 91.4.
template <bool vector, bool many>
struct RopeTraits {
  static constexpr int ctas_per_sm = !vector ? 7 : many ? 12 : 10;
};

// Kernels that reduce a row: norms and softmax. vecs: vectors of a row that a thread holds.
inline constexpr int row_threads = 512;  // the most of a CTA

// Whether a launch leaves most SMs free. Then the next kernel may start at once, and its start is hidden; else only
// when the loads of this one are on their way, which its CTAs would delay. On an H200 layer_norm of 64 rows of 4096
// elements takes 3.27 us with the former and 2.28 with the latter, silu_mul of 1 token 0.93 and 1.22. (embedding of 64
// tokens, whose loads wait for others, 1.23 and 1.36: its next kernel always starts at once.)
inline bool few_ctas(std::int64_t ctas, int sms) { return 4 * ctas <= sms; }

// Whether a launch reads more than stays in L2. Then loads of gates and of norms allocate L1 lines: on an H200 silu_mul
// of 16384 tokens of 4096 (268 MB) takes 93.4 us and else 99.1, of 2048 tokens 12.5 and 11.8, of 64 1.95 and 1.68; why
// was not measured. (rope gains 1 % and softmax nothing.)
inline bool reads_past_l2(std::int64_t bytes) { return bytes >= std::int64_t{64} << 20; }

// On an H200 rms_norm of 1 row of 4096 elements takes 1.45 us and coarsened 1.58, of 16384 rows 76.9 and 69.4.
template <bool vector>
inline tile::RowPlan plan_rows(std::int64_t n, std::int64_t rows, int sms) {
  const tile::RowPlan plan = tile::plan_row(n);
  return vector && !few_ctas(rows, sms) ? tile::coarsened(plan) : plan;
}

// When the vectors of weights and biases that load_early takes are loaded. The order of the arithmetic is the same.
enum class Tables {
  with_row,        // weights and biases with the row: few rows
  while_reducing,  // weights while the row is reduced, biases after it
  after_reducing   // both after it
};
template <int vecs, Tables tables, bool vector>
struct NormTraits {
  // A third CTA for rms_norm would spill the early weights.
  static constexpr int ctas_per_sm = !vector || tables == Tables::with_row           ? 1
                                     : tables == Tables::after_reducing && vecs == 2 ? 3
                                                                                     : 2;
};
// A row of a pair has a warp at most, so CTAs have 128 threads: as many threads on an SM as above, but for rows of four
// vectors element by element, which would spill at 128 registers.
inline constexpr int pair_threads = 128;
template <int vecs, Tables tables, bool vector>
struct NormPairTraits {
  static constexpr int ctas_per_sm =
      !vector && vecs == 4 ? 3 : row_threads / pair_threads * NormTraits<vecs, tables, vector>::ctas_per_sm;
};
template <int vecs, bool vector>  // of 512 threads: 3 CTAs are 40 registers a thread, 2 are 64
struct SoftmaxTraits {
  static constexpr int ctas_per_sm = vector && vecs == 2 ? 3 : 2;
};

inline std::int64_t ctas_for(std::int64_t threads) { return (threads + cta_threads - 1) / cta_threads; }
__device__ __forceinline__ std::int64_t thread_index() {
  return static_cast<std::int64_t>(blockIdx.x) * cta_threads + threadIdx.x;
}
inline std::int64_t vecs_of(std::int64_t n) { return (n + tile::vec_size - 1) / tile::vec_size; }

// Calls f(element, vector) for every dtype and access width, for warmup.
template <class F>
void for_all(F&& f) {
  f(tile::half{}, std::true_type{});
  f(tile::half{}, std::false_type{});
  f(tile::bf16{}, std::true_type{});
  f(tile::bf16{}, std::false_type{});
}

}  // namespace rooftile::gpu
