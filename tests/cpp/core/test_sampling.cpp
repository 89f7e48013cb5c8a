// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "core/philox.h"
#include "core/sampling.h"

namespace rooftile {
namespace {

// The authors' test vectors (Random123, kat_vectors) have one with a counter of zeros in its high half. The others are
// of a Philox that was checked with all of them.
TEST(Philox, KnownAnswers) {
  EXPECT_EQ(philox(0, 0), 0xE169C58D6627E8D5u);
  EXPECT_EQ(philox(1, 0), 0xE50A0EBCE3E80670u);
  EXPECT_EQ(philox(0, 1), 0x5CB200DBF8E4CCA4u);
  EXPECT_EQ(philox(0xA409382200000005u, 0x85A308D300000009u), 0x81F75408B4D47E8Fu);
}

TEST(Sampling, MassIsTheExponential) {
  std::uint64_t before = std::uint64_t{1} << mass_bits;
  EXPECT_EQ(sampling_mass(0), before);
  for (std::uint32_t key = 1; key < last_key - 40000; key += 1 + key / 1000) {
    const std::uint64_t mass = sampling_mass(key);
    const double exact = std::exp(-static_cast<double>(key) / keys_per_unit) * std::ldexp(1.0, mass_bits);
    ASSERT_NEAR(static_cast<double>(mass), exact, 1 + 2e-9 * exact) << key;
    ASSERT_LE(mass, before + before / 100000000) << key;  // falls, but for the polynomial's error
    before = mass;
  }
  EXPECT_EQ(sampling_mass(last_key), 0u);
}

TEST(Sampling, KeysOfFarAndMissingTokens) {
  const float infinity = std::numeric_limits<float>::infinity(), per = static_cast<float>(keys_per_unit);
  EXPECT_EQ(sampling_key(3.0f, 3.0f, per), 0u);
  EXPECT_EQ(sampling_key(2.0f, 3.0f, per), 1u << 26);
  EXPECT_EQ(sampling_key(3.0f - 31.5f, 3.0f, per), static_cast<std::uint32_t>(31.5 * keys_per_unit));
  for (const float logit : {-29.0f, -1e30f, -3e38f, -infinity}) EXPECT_EQ(sampling_key(logit, 3.0f, per), last_key);
  EXPECT_EQ(sampling_key(-infinity, 3.0f, 0.0f), last_key);  // of a temperature that makes all others equal
}

TEST(Sampling, PartsOfAMass) {
  EXPECT_EQ(part_of_mass(1000, 0.5), 500u);
  EXPECT_EQ(part_of_mass(1001, 0.5), 501u);  // rounded up: tokens before which less lies stay
  EXPECT_EQ(part_of_mass(1000, 0.0), 1u);
  const std::uint64_t large = (std::uint64_t{1} << 62) + 1;  // rounds as a double
  EXPECT_LE(part_of_mass(large, 1 - 1e-17), large);
  EXPECT_EQ(min_p_key(0.0), last_key);
  EXPECT_EQ(min_p_key(1.0), 0u);
  EXPECT_EQ(min_p_key(std::exp(-2.0)), std::uint32_t{2} << 26);
}

TEST(Sampling, WhatTopPKeepsOfEqualTokens) {
  const std::uint64_t each = sampling_mass(0);
  EXPECT_EQ(kept_of_part(0, 0, 1).ties, 1u);
  EXPECT_EQ(kept_of_part(0, 0, each).ties, 1u);
  EXPECT_EQ(kept_of_part(0, 0, each + 1).ties, 2u);
  EXPECT_EQ(kept_of_part(0, 5, 3 * each + 5).ties, 3u);
}

TEST(Sampling, SearchLevelsCoverAKey) {
  int end = 31;
  for (int level = 0; level < key_levels; ++level) {
    EXPECT_LE(key_bits(level).bits, max_key_bits);
    end -= key_bits(level).bits;
    EXPECT_EQ(key_bits(level).shift, end);
  }
  EXPECT_EQ(end, 0);
}

}  // namespace
}  // namespace rooftile
