// SPDX-License-Identifier: Apache-2.0
// The next token of each row: penalty, temperature, top_k, top_p, min_p and the draw, or the largest logit: one launch.
//   logits [rows, V] of T, any strides   token_ids [rows, L], seeds, positions, tokens [rows]
// A cluster of 8 CTAs computes a row (one CTA where there are no clusters, or V is small); a thread has a slice of
// neighbouring tokens, 16 at V = 131072. Logits become integers (core/sampling.h), so no result depends on the number
// of CTAs. Passes over the slice: the largest logit; the keys. Few tokens are then listed in one pass, and one CTA
// draws (candidates.cuh). Else top_k's and top_p's last keys are searched, three passes each (find_key.cuh), and a pass
// over the masses finds the token.
// Bytes: a token's logit, once from memory (a row of 128K bf16 is 256 KB) and once from L1. Integer operations a token:
// some 5 for the largest, 10 for a key, 40 for a mass. Few rows leave most of the GPU idle: bound by the integer
// operations of 8 SMs a row, and between passes by latency: a barrier of the cluster and an access of the other CTAs'
// shared memory. With PDL the kernel reads nothing before wait_for_previous_kernel.
// Sync: barriers of the cluster between what its CTAs write in shared memory and the others' reads of it; the last one
// keeps a CTA until nobody reads its shared memory any more.
#include "core/kernel_name.h"
#include "core/philox.h"
#include "kernels/backend.h"
#include "kernels/launch.h"
#include "kernels/sampling/candidates.cuh"
#include "kernels/sampling/cluster_sums.cuh"
#include "kernels/sampling/find_key.cuh"
#include "kernels/sampling/row_slice.cuh"
#include "kernels/sampling/traits.cuh"
#include "kernels/warmup.h"
#include "tile/cta_sync.cuh"
#include "tile/strided_rows.cuh"

namespace rooftile::gpu {
namespace {

using namespace rooftile::tile;
using Sums = ClusterSums<sample_threads>;
constexpr unsigned all_lanes = 0xffffffffu;

// Integers in the order of floats; -0 equals 0, NaN is above all.
constexpr std::uint32_t ordered_infinity = 0xff800000u, ordered_minus_infinity = 0x007fffffu;
__device__ std::uint32_t ordered(float x) {
  const std::uint32_t bits = __float_as_uint(x + 0.0f);
  return x != x ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ float from_ordered(std::uint32_t x) { return __uint_as_float(x >> 31 ? x & 0x7fffffffu : ~x); }

// The largest logit of a row as an ordered integer, and the first token that has it.
struct Largest {
  std::uint32_t logit;
  int token;
};
template <class Slice>
__device__ Largest largest_logit(const Slice& slice, Sums& sums) {
  float best = -INFINITY;
  int best_token = slice.first_token(threadIdx.x);
  slice.template for_each<true>([&](int token, float x) {
    if (!(x <= best) && best == best) best = x, best_token = token;  // the first NaN stays
  });
  // The logit above the complement of the token: of equal logits the first token is the largest.
  std::uint64_t both = std::uint64_t{ordered(best)} << 32 | ~static_cast<std::uint32_t>(best_token);
  both = sums.largest(slice.size() > 0 ? both : 0);
  return {static_cast<std::uint32_t>(both >> 32), static_cast<int>(~static_cast<std::uint32_t>(both))};
}

// The thread whose tokens the draw falls on stores the token, with the help of its warp.
template <class Keys>
__device__ void draw_of_many(const SampleParams& p, const Keys& keys, const KeptTokens& kept, const std::uint64_t& bits,
                             int rank, Sums& sums, const auto& store_token) {
  const std::uint64_t each = sampling_mass(kept.key);
  const auto kept_mass = [&](std::uint64_t below, std::uint64_t ties) {
    return below + each * (ties < kept.ties ? ties : kept.ties);
  };
  std::uint64_t below = 0, ties = 0;  // the mass of this thread's tokens with smaller keys; how many have kept.key
  keys.template for_each<1>([&](int, std::uint32_t key) {
    if (key < kept.key) below += sampling_mass(key);
    ties += key == kept.key;
  });
  const Sums::Prefix of_below = sums.prefix(below), of_ties = sums.prefix(ties);
  const int below_value = sums.publish(of_below.total), ties_value = sums.publish(of_ties.total);
  sums.barrier();  // all CTAs -> all CTAs: the published sums
  const std::uint64_t below_of = sums.of_cta(below_value), ties_of = sums.of_cta(ties_value);
  const std::uint64_t all_below = Sums::sum_of_ctas(below_of), all_ties = Sums::sum_of_ctas(ties_of);
  std::uint64_t below_before = of_below.before + Sums::sum_before(below_of, rank),
                ties_before = of_ties.before + Sums::sum_before(ties_of, rank);
  const std::uint64_t place = place_of(bits, kept_mass(all_below, all_ties));
  const bool falls_here =
      place >= kept_mass(below_before, ties_before) && place < kept_mass(below_before + below, ties_before + ties);
  const unsigned owner = __ballot_sync(all_lanes, falls_here);
  if (owner == 0) return;
  const int lane = static_cast<int>(threadIdx.x) % 32, owner_lane = __ffs(static_cast<int>(owner)) - 1,
            thread = static_cast<int>(threadIdx.x) - lane + owner_lane,
            size = __shfl_sync(all_lanes, keys.size(), owner_lane);
  below_before = __shfl_sync(all_lanes, below_before, owner_lane);
  ties_before = __shfl_sync(all_lanes, ties_before, owner_lane);
  for (int first = 0; first < size; first += 32) {  // a lane a token
    const std::uint32_t key = first + lane < size ? keys.at(thread, first + lane) : last_key;
    below = below_before + Sums::prefix_of_lanes(key < kept.key ? sampling_mass(key) : 0);
    ties = ties_before + Sums::prefix_of_lanes(first + lane < size && key == kept.key);
    const unsigned behind = __ballot_sync(all_lanes, place < kept_mass(below, ties));
    if (behind != 0) {
      if (lane == 0) store_token(keys.first_token(thread) + first + __ffs(static_cast<int>(behind)) - 1);
      return;
    }
    below_before = __shfl_sync(all_lanes, below, 31);
    ties_before = __shfl_sync(all_lanes, ties, 31);
  }
}

// Draws the token of a row.
template <class Keys>
__device__ void draw(const SampleParams& p, const Keys& keys, const std::uint64_t& bits, int rank, Sums& sums,
                     KeySearch& search, Candidates& candidates, const auto& store_token) {
  if (p.use_candidates) {
    const std::uint32_t last =
        p.candidates > 0 ? candidates.last_key_of(p.candidates, keys, sums, p.cluster) : p.min_p_key;
    if (candidates.list(p, keys, last, sums)) {
      const int token = rank == 0 ? candidates.draw(p, sums, bits) : -1;
      if (token >= 0) store_token(token);
      return;
    }
  }
  KeptTokens kept;
#pragma unroll 1                          // one copy of the search's machine code
  for (int step = 0; step < 2; ++step) {  // top_k, top_p
    const bool of_mass = step == 1;
    if (of_mass && p.min_p_first) kept.key = min(kept.key, p.min_p_key);
    if (of_mass ? p.top_p >= 1 : p.top_k == 0) continue;
    const std::uint32_t last = kept.key;
    const FoundKey found = search.find(
        sums, [&](auto&& f) { keys.template for_each<1>([&](int, std::uint32_t key) { f(key); }); },
        [&](std::uint32_t key) { return !of_mass      ? 1
                                        : key <= last ? sampling_mass(key)
                                                      : 0; },
        [&](std::uint64_t sum) { return of_mass ? part_of_mass(sum, p.top_p) : p.top_k; });
    kept = of_mass ? kept_of_part(found.key, found.before, found.target) : KeptTokens{found.key};
  }
  if (p.min_p_key < kept.key) kept = {p.min_p_key};
  draw_of_many(p, keys, kept, bits, rank, sums, store_token);
}

__device__ std::uint64_t random_bits(const SampleParams& p, std::int64_t row) {
  const std::uint64_t seed = cute::recast_ptr<std::uint64_t>(p.seeds.data)[row_offset(p.seeds, row)];
  const std::int64_t position =
      p.positions.data ? load_integer(p.positions.data, row_offset(p.positions, row), p.wide_positions) : 0;
  return philox(seed, static_cast<std::uint64_t>(position));
}

template <class T, bool vector>
__global__ __launch_bounds__(sample_threads, 1) void sample_rows(const __grid_constant__ SampleParams p) {
  using Traits = SampleTraits<T, vector>;
  extern __shared__ SampleStorage storage[];  // one, and what lies behind it
  SampleStorage& smem = storage[0];
  std::uint32_t* const stored_keys = cute::recast_ptr<std::uint32_t>(storage + 1);
  let_next_kernel_start();
  const int cta = static_cast<int>(blockIdx.x), rank = cta % p.cluster;
  const std::int64_t row = cta / p.cluster;
  Sums sums(smem.sums, p.cluster);
  KeySearch search(smem.search, p.cluster);
  Candidates candidates(smem.candidates);
  typename Traits::Slice slice(p, row, rank, stored_keys + key_words(p));
  const auto store_token = [&](int token) {
    const std::int64_t at = row_offset(p.tokens, row);
    if (p.wide_tokens) cute::recast_ptr<std::int64_t>(p.tokens.data)[at] = token;
    else cute::recast_ptr<std::int32_t>(p.tokens.data)[at] = token;
  };
  wait_for_previous_kernel();
  slice.mark_seen(p, row);
  if (!p.greedy && threadIdx.x == sample_threads - 1) smem.random_bits = random_bits(p, row);

  const Largest best = largest_logit(slice, sums);
  if (p.greedy || best.logit <= ordered_minus_infinity || best.logit >= ordered_infinity) {
    if (rank == 0 && threadIdx.x == 0) store_token(p.greedy ? best.token : -1);
  } else {
    const typename Traits::Keys keys(p, slice, from_ordered(best.logit), p.keep_keys ? stored_keys : nullptr);
    draw(p, keys, smem.random_bits, rank, sums, search, candidates, store_token);
  }
  sums.barrier();  // all CTAs -> all CTAs: nobody reads another one's shared memory any more
}

// Calls f(kernel) for a dtype.
template <bool vector, class F>
void with_kernel(DType dtype, F&& f) {
  if (dtype == DType::f32) f(sample_rows<float, vector>);
  else if (dtype == DType::f16) f(sample_rows<half, vector>);
  else f(sample_rows<bf16, vector>);
}

}  // namespace

KernelName sample(const Context& ctx, const SampleArgs& a) {
  const DeviceScope scope("sample", ctx);
  const SampleSettings& s = a.settings;
  const auto scalars = [](const TensorView& t) { return t.given() ? rows_of(t, t.ndim) : Rows{}; };
  const auto is_wide = [](const TensorView& t) { return t.dtype == DType::i64; };
  constexpr std::int64_t small = 16 * sample_threads;  // tokens that one CTA reads as fast as a cluster
  constexpr std::int64_t max_kept_keys = 24;           // of a thread: 96 KB a CTA, which Hopper has room for
  const std::int64_t n = a.logits.last();
  const int cluster = n > small ? scope.largest_cluster() : 1;
  const std::int64_t of_thread = (n + cluster * sample_threads - 1) / (cluster * sample_threads),
                     slice = (of_thread + vec_size - 1) / vec_size * vec_size, slices = (n + slice - 1) / slice;
  ROOFTILE_CHECK_KIND(not_supported, a.greedy() || slice * sample_threads <= KeySearch::max_tokens_of_cta, "sample",
                      ": logits must have a last dimension of at most ", KeySearch::max_tokens_of_cta * cluster,
                      " on this GPU, got ", describe(a.logits));
  const std::int64_t top_k = s.top_k < n ? s.top_k : 0;
  const std::uint32_t last_of_min_p = min_p_key(s.min_p);
  // Tokens listed first: top_k; for top_p a number that it seldom exceeds; 0: those up to min_p's key. Half the list is
  // room for tokens equal to the last one. A list of 1024: top_k 50 lists 50; top_p alone 256; top_k 600 searches keys.
  constexpr std::int64_t max_listed = Candidates::most / 2, listed_for_top_p = Candidates::most / 4;
  const std::int64_t listed = top_k > 0 ? top_k : s.top_p < 1 ? std::min(listed_for_top_p, slices) : 0;
  const SampleParams p = {
      .logits = rows_of(a.logits),
      .token_ids = rows_of(a.token_ids),
      .seeds = scalars(a.seeds),
      .positions = scalars(a.positions),
      .tokens = scalars(a.tokens),
      .vocabulary = static_cast<int>(n),
      .slice = static_cast<int>(slice),
      .cluster = cluster,
      .keep_keys = scope.has_wgmma() && slice <= max_kept_keys,
      .use_candidates = listed > 0 ? listed <= max_listed && listed <= slices : last_of_min_p < last_key,
      .candidates = static_cast<std::uint32_t>(listed),
      .seen = a.penalises() ? static_cast<int>(a.token_ids.last()) : 0,
      .penalty = static_cast<float>(s.repetition_penalty),
      .per_temperature = a.greedy() ? 0.0f : static_cast<float>(keys_per_unit / s.temperature),
      .top_p = s.top_p,
      .top_k = static_cast<std::uint32_t>(top_k),
      .min_p_key = last_of_min_p,
      .min_p_first = s.order == SampleOrder::vllm,
      .greedy = a.greedy(),
      .wide_token_ids = is_wide(a.token_ids),
      .wide_positions = is_wide(a.positions),
      .wide_tokens = is_wide(a.tokens)};
  const int words = key_words(p) + (p.seen > 0 ? seen_words(p) : 0);
  const std::size_t shared_bytes = sizeof(SampleStorage) + static_cast<std::size_t>(words) * sizeof(std::uint32_t);
  (void)scope.ctas_that_fit(shared_bytes);  // refuses what does not fit: a penalty over many tokens
  const std::int64_t ctas = a.tokens.numel() * cluster;
  with_vector(
      n,
      [&](auto vector) {
        with_kernel<vector>(a.logits.dtype, [&](auto kernel) {
          scope.launch(kernel, ctas, sample_threads, shared_bytes, p, Overlap::with_previous, cluster);
        });
      },
      p.logits);
  return kernel_name("cuda_", name(a.logits.dtype));
}

void load_sampling_kernels(const char* op) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    with_kernel<true>(dtype, [op](auto kernel) { load_kernel(op, kernel); });
    with_kernel<false>(dtype, [op](auto kernel) { load_kernel(op, kernel); });
  }
}

}  // namespace rooftile::gpu
