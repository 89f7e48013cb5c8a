// SPDX-License-Identifier: Apache-2.0
// The next token of each row of logits.  logits [..., V], tokens [...]
// A row: its largest logit, its keys (core/sampling.h), the last key that top_k, top_p and min_p keep, the sum of the
// masses, the token where the draw falls. A key is searched by three histograms of some of its bits. top_k comes first:
// what follows looks at the tokens that it keeps. Bound by the histogram of V keys and, without top_k, by V masses.
#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <memory>

#include "core/philox.h"
#include "core/sampling.h"
#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/rows.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

// One thread's row: logits x [n], and tokens [count] that may still be drawn, in the vocabulary's order.
struct Row {
  explicit Row(std::int64_t n)
      : n(n),
        x(std::make_unique_for_overwrite<float[]>(static_cast<std::size_t>(n))),
        keys(std::make_unique_for_overwrite<std::uint32_t[]>(static_cast<std::size_t>(n))),
        ids(std::make_unique_for_overwrite<std::uint32_t[]>(static_cast<std::size_t>(n))) {}
  std::int64_t n, count = 0;
  std::unique_ptr<float[]> x;
  std::unique_ptr<std::uint32_t[]> keys, ids;
};

// Of each token once, however often token_ids has it. seen: [V] bits.
void penalise(const SampleArgs& a, std::int64_t row, Row& r) {
  const auto seen = std::make_unique<bool[]>(static_cast<std::size_t>(r.n));
  const float penalty = static_cast<float>(a.settings.repetition_penalty);
  const std::int64_t begin = a.token_ids.row_offset(row);
  for (std::int64_t i = 0; i < a.token_ids.last(); ++i) {
    const std::int64_t id = integer_at(a.token_ids, begin + i * a.token_ids.last_stride());
    if (id < 0 || id >= r.n || seen[static_cast<std::size_t>(id)]) continue;
    seen[static_cast<std::size_t>(id)] = true;
    r.x[static_cast<std::size_t>(id)] = penalised(r.x[static_cast<std::size_t>(id)], penalty);
  }
}

// The first of the largest logits; the first NaN counts as the largest.
std::int64_t largest_of(const Row& r) {
  const float lowest = -std::numeric_limits<float>::infinity();
  const float* x = r.x.get();
  F32 highest = splat(lowest);
  I32 nan{};
  for (std::int64_t i = 0; i < r.n; i += lanes) {
    const F32 v = load_some(x + i, static_cast<int>(std::min<std::int64_t>(r.n - i, lanes)), lowest);
    highest = vmax(v, highest);
    nan |= v != v;
  }
  bool has_nan = false;
  for (int i = 0; i < lanes; ++i) has_nan |= nan[i] != 0;
  if (has_nan) return std::find_if(x, x + r.n, [](float v) { return v != v; }) - x;
  return std::find(x, x + r.n, max(highest)) - x;
}

void make_keys(Row& r, float largest, float per_temperature) {
  for_vecs(r.n, [&](std::int64_t i, auto lanes) {
    const F32 key = (splat(largest) - load(r.x.get() + i, lanes)) * splat(per_temperature);
    const I32 whole = __builtin_convertvector(key, I32);
    const I32 all = key < splat(static_cast<float>(last_key)) ? whole : static_cast<std::int32_t>(last_key) + I32{};
    store(reinterpret_cast<float*>(r.keys.get()) + i, (F32)all, lanes);
  });
  for (std::int64_t i = 0; i < r.n; ++i) r.ids[static_cast<std::size_t>(i)] = static_cast<std::uint32_t>(i);
  r.count = r.n;
}

// Leaves the tokens of which keeps(key) is true; it is called once a token, in the vocabulary's order.
template <class Keeps>
void keep_if(Row& r, const Keeps& keeps) {
  std::int64_t count = 0;
  for (std::int64_t i = 0; i < r.count; ++i) {
    const std::uint32_t key = r.keys[static_cast<std::size_t>(i)], id = r.ids[static_cast<std::size_t>(i)];
    r.keys[static_cast<std::size_t>(count)] = key;
    r.ids[static_cast<std::size_t>(count)] = id;
    count += keeps(key);
  }
  r.count = count;
}
void keep_keys_to(Row& r, std::uint32_t last) {
  if (last < last_key) keep_if(r, [last](std::uint32_t key) { return key <= last; });
}

struct FoundKey {
  std::uint32_t key = 0;
  std::uint64_t before = 0;  // weights of smaller keys
};
// The smallest key at which the weights of the tokens with keys up to it reach `target`, at most the sum of all.
template <class Weight>
FoundKey find_key(const Row& r, std::uint64_t target, const Weight& weight) {
  FoundKey found;
  for (int level = 0; level < key_levels; ++level) {
    const auto [shift, bits] = key_bits(level);
    const std::uint32_t mask = (1u << bits) - 1;
    std::uint64_t sums[1 << max_key_bits] = {};
    for (std::int64_t i = 0; i < r.count; ++i) {
      const std::uint32_t k = r.keys[static_cast<std::size_t>(i)];
      if (level == 0 || k >> (shift + bits) == found.key) sums[k >> shift & mask] += weight(k);
    }
    std::uint32_t bin = 0;
    while (found.before + sums[bin] < target) found.before += sums[bin++];
    found.key = found.key << bits | bin;
  }
  return found;
}

std::uint64_t mass_of(const Row& r) {
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < r.count; ++i) sum += sampling_mass(r.keys[static_cast<std::size_t>(i)]);
  return sum;
}

// Leaves the tokens that may be drawn.
void keep(Row& r, const SampleSettings& s) {
  if (s.top_k > 0 && s.top_k < r.n)
    keep_keys_to(r, find_key(r, static_cast<std::uint64_t>(s.top_k), [](std::uint32_t) { return 1; }).key);
  if (s.order == SampleOrder::vllm) keep_keys_to(r, min_p_key(s.min_p));
  if (s.top_p < 1) {
    const std::uint64_t part = part_of_mass(mass_of(r), s.top_p);
    const FoundKey found = find_key(r, part, sampling_mass);
    const KeptTokens kept = kept_of_part(found.key, found.before, part);
    std::uint64_t ties = 0;
    keep_if(r, [&](std::uint32_t key) { return key < kept.key || (key == kept.key && ties++ < kept.ties); });
  }
  if (s.order == SampleOrder::transformers) keep_keys_to(r, min_p_key(s.min_p));
}

std::int64_t draw(const Row& r, std::uint64_t random_bits) {
  const std::uint64_t place = place_of(random_bits, mass_of(r));
  std::uint64_t end = 0;
  std::int64_t i = 0;
  while (end += sampling_mass(r.keys[static_cast<std::size_t>(i)]), end <= place) ++i;
  return r.ids[static_cast<std::size_t>(i)];
}

std::int64_t token_of(const SampleArgs& a, std::int64_t row, Row& r) {
  if (a.penalises()) penalise(a, row, r);
  const std::int64_t best = largest_of(r);
  const float largest = r.x[static_cast<std::size_t>(best)];
  if (a.greedy()) return best;
  if (!(std::fabs(largest) <= std::numeric_limits<float>::max())) return -1;
  make_keys(r, largest, static_cast<float>(keys_per_unit / a.settings.temperature));
  keep(r, a.settings);
  const auto of_row = [row](const TensorView& t) {
    return t.given() ? static_cast<std::uint64_t>(integer_at(t, element_offset(t, row))) : 0;
  };
  return draw(r, philox(of_row(a.seeds), of_row(a.positions)));
}

}  // namespace

void sample(const Parallel& parallel, const SampleArgs& a) {
  const std::int64_t n = a.logits.last();
  const auto rows = std::make_unique<std::unique_ptr<Row>[]>(static_cast<std::size_t>(parallel.threads()));
  with_element(a.logits.dtype, [&](auto e) {
    using T = decltype(e);
    const RowScratch<T> scratch(a.logits, parallel.threads());
    for_rows(parallel, a.logits.rows(), n, [&](std::int64_t row, int thread) {
      std::unique_ptr<Row>& r = rows[static_cast<std::size_t>(thread)];
      if (!r) r = std::make_unique<Row>(n);
      const T* from = scratch.read(a.logits, row, thread);
      for_vecs(n, [&](std::int64_t i, auto lanes) { store(r->x.get() + i, load(from + i, lanes), lanes); });
      const std::int64_t token = token_of(a, row, *r), at = element_offset(a.tokens, row);
      if (a.tokens.dtype == DType::i64) a.tokens.as<std::int64_t>()[at] = token;
      else a.tokens.as<std::int32_t>()[at] = static_cast<std::int32_t>(token);
    });
  });
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
