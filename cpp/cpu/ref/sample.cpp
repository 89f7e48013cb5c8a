// SPDX-License-Identifier: Apache-2.0
#include "core/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/philox.h"
#include "cpu/element.h"
#include "cpu/ref/kernels_ref.h"

namespace rooftile::cpu::reference {
namespace {

struct Token {
  std::uint32_t key;
  std::int64_t id;
};

std::uint64_t mass_of(const std::vector<Token>& tokens) {
  std::uint64_t sum = 0;
  for (const Token& t : tokens) sum += sampling_mass(t.key);
  return sum;
}

std::vector<float> logits_of(const SampleArgs& a, std::int64_t row) {
  std::vector<float> x(static_cast<std::size_t>(a.logits.last()));
  for (std::size_t i = 0; i < x.size(); ++i)
    x[i] = read(a.logits, a.logits.row_offset(row) + static_cast<std::int64_t>(i) * a.logits.last_stride());
  if (!a.penalises()) return x;
  std::vector<bool> seen(x.size());
  for (std::int64_t i = 0; i < a.token_ids.last(); ++i) {
    const std::int64_t id = integer_at(a.token_ids, a.token_ids.row_offset(row) + i * a.token_ids.last_stride());
    if (id >= 0 && id < a.logits.last()) seen[static_cast<std::size_t>(id)] = true;
  }
  for (std::size_t i = 0; i < x.size(); ++i)
    if (seen[i]) x[i] = penalised(x[i], static_cast<float>(a.settings.repetition_penalty));
  return x;
}

// The tokens that top_k, top_p and min_p leave, the likeliest first, equally likely ones in the vocabulary's order.
std::vector<Token> kept(std::vector<Token> tokens, const SampleSettings& s) {
  std::sort(tokens.begin(), tokens.end(),
            [](const Token& a, const Token& b) { return a.key != b.key ? a.key < b.key : a.id < b.id; });
  const auto keep_keys_to = [&](std::uint32_t key) {
    while (tokens.back().key > key) tokens.pop_back();
  };
  if (s.top_k > 0 && s.top_k < static_cast<std::int64_t>(tokens.size()))
    keep_keys_to(tokens[static_cast<std::size_t>(s.top_k - 1)].key);
  if (s.order == SampleOrder::vllm) keep_keys_to(min_p_key(s.min_p));
  if (s.top_p < 1) {
    const std::uint64_t part = part_of_mass(mass_of(tokens), s.top_p);
    std::uint64_t before = 0;
    std::size_t count = 0;
    while (count < tokens.size() && before < part) before += sampling_mass(tokens[count++].key);
    tokens.resize(count);
  }
  keep_keys_to(min_p_key(s.min_p));
  return tokens;
}

std::int64_t token_of(const SampleArgs& a, std::int64_t row) {
  const std::vector<float> x = logits_of(a, row);
  std::size_t best = 0;
  for (std::size_t i = 0; i < x.size(); ++i) {
    if (std::isnan(x[i])) {
      best = i;
      break;
    }
    if (x[i] > x[best]) best = i;
  }
  if (a.greedy()) return static_cast<std::int64_t>(best);
  if (!std::isfinite(x[best])) return -1;
  std::vector<Token> tokens(x.size());
  const float per_temperature = static_cast<float>(keys_per_unit / a.settings.temperature);
  for (std::size_t i = 0; i < x.size(); ++i)
    tokens[i] = {sampling_key(x[i], x[best], per_temperature), static_cast<std::int64_t>(i)};
  tokens = kept(std::move(tokens), a.settings);

  const auto at_row = [row](const TensorView& t) {
    return t.given() ? static_cast<std::uint64_t>(integer_at(t, element_offset(t, row))) : 0;
  };
  const std::uint64_t place = place_of(philox(at_row(a.seeds), at_row(a.positions)), mass_of(tokens));
  std::sort(tokens.begin(), tokens.end(), [](const Token& a, const Token& b) { return a.id < b.id; });
  std::uint64_t end = 0;
  for (const Token& t : tokens)
    if (place < (end += sampling_mass(t.key))) return t.id;
  return tokens.front().id;  // not reached: place lies below the sum
}

}  // namespace

void sample(const Parallel& parallel, const SampleArgs& a) {
  parallel.run(a.logits.rows(), [&](std::int64_t row, int) {
    const std::int64_t token = token_of(a, row), at = element_offset(a.tokens, row);
    if (a.tokens.dtype == DType::i64) a.tokens.as<std::int64_t>()[at] = token;
    else a.tokens.as<std::int32_t>()[at] = static_cast<std::int32_t>(token);
  });
}

}  // namespace rooftile::cpu::reference
