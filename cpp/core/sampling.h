// SPDX-License-Identifier: Apache-2.0
// The arithmetic of `sample`, the same on the CPU and on a GPU. What follows the logits is integers: sums of integers
// have the same value in any order, so every thread count, instruction set and device draws the same token.
//   distance  (largest logit - logit) / temperature, in natural-logarithm units: a token's probability is
//             exp(-distance) of the likeliest token's
//   key       the distance in units of 2^-26, rounded down: tokens of one key are equally likely
//   mass      2^40 * exp(-distance of the key), rounded down: a token's probability, not yet divided by the sum
#pragma once

#include <cmath>
#include <cstdint>

#include "core/hd.h"

namespace rooftile {

inline constexpr double keys_per_unit = 0x1p26;
inline constexpr std::uint32_t last_key =
    0x7fffffff;                       // distances of 32 and more, mass 0: logits of -inf are among them
inline constexpr int mass_bits = 40;  // of the likeliest token's mass, which is 2^40
inline constexpr std::int64_t max_vocabulary = std::int64_t{1} << 22;  // the sum of the masses stays below 2^63

// What repetition_penalty makes of the logit of a token that has been seen (Keskar et al. 2019).
ROOFTILE_HD inline float penalised(float logit, float penalty) {
#ifdef __CUDA_ARCH__  // not fused with what follows
  return logit < 0 ? __fmul_rn(logit, penalty) : __fdiv_rn(logit, penalty);
#else
  return logit < 0 ? logit * penalty : logit / penalty;
#endif
}

// per_temperature: keys_per_unit / temperature.
ROOFTILE_HD inline std::uint32_t sampling_key(float logit, float largest, float per_temperature) {
  const float key = (largest - logit) * per_temperature;
  return key < static_cast<float>(last_key) ? static_cast<std::uint32_t>(static_cast<std::int32_t>(key)) : last_key;
}

ROOFTILE_HD inline std::uint32_t high_product(std::uint32_t a, std::uint32_t b) {
  return static_cast<std::uint32_t>(std::uint64_t{a} * b >> 32);
}
ROOFTILE_HD inline std::uint64_t high_product(std::uint64_t a, std::uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  __extension__ using Wide = unsigned __int128;
  return static_cast<std::uint64_t>(static_cast<Wide>(a) * b >> 64);
#endif
}

// exp(-x) is 2^-(n + f), n the integer and f the fraction of x * log2(e). 2^-f is 1 - f * p(f), p a polynomial of
// degree 6 (Chebyshev interpolation of (1 - 2^-f) / f, coefficients in units of 2^-32): right within 2e-9.
ROOFTILE_HD inline std::uint64_t sampling_mass(std::uint32_t key) {
  constexpr std::uint64_t log2_e = 0xB8AA3B29;  // in units of 2^-31
  const std::uint64_t power = key * log2_e;     // in units of 2^-57
  const int n = static_cast<int>(power >> 57);
  if (n > mass_bits) return 0;
  const std::uint32_t f = static_cast<std::uint32_t>(power >> 25);  // in units of 2^-32, as all below
  std::uint32_t p = 0x0009C23C - high_product(f, 0x0000BDBAu);
  p = 0x005728F4 - high_product(f, p);
  p = 0x027641CC - high_product(f, p);
  p = 0x0E35812F - high_product(f, p);
  p = 0x3D7F7BCC - high_product(f, p);
  p = 0xB17217F7 - high_product(f, p);
  const std::uint64_t fraction = (std::uint64_t{1} << 32) - high_product(f, p);
  return fraction << (mass_bits - 32) >> n;
}

// top_p of a sum of masses, at least 1: the tokens before which less than this lies stay.
ROOFTILE_HD inline std::uint64_t part_of_mass(std::uint64_t sum, double top_p) {
  const double part = static_cast<double>(sum) * top_p;
  const std::uint64_t floor = static_cast<std::uint64_t>(part);
  const std::uint64_t ceil = floor + (static_cast<double>(floor) < part);
  return ceil < 1 ? 1 : ceil > sum ? sum : ceil;
}

// The last key that min_p keeps.
inline std::uint32_t min_p_key(double min_p) {
  const double key = -std::log(min_p) * keys_per_unit;  // min_p 0: infinity
  return key < static_cast<double>(last_key) ? static_cast<std::uint32_t>(key) : last_key;
}

// A search for a key looks at its bits in three levels, the highest first; each counts the values of some bits.
struct KeyBits {
  int shift, bits;
};
inline constexpr int key_levels = 3, max_key_bits = 11;
ROOFTILE_HD constexpr KeyBits key_bits(int level) {
  return level == 0 ? KeyBits{20, 11} : KeyBits{20 - 10 * level, 10};
}

// What is drawn from: the tokens with smaller keys than `key`, and the first `ties` tokens in the vocabulary's order
// with this key. They lie side by side in the vocabulary's order, each as wide as its mass.
struct KeptTokens {
  std::uint32_t key = last_key;
  std::uint64_t ties = ~std::uint64_t{0};
};
// What top_p keeps of tokens whose keys' masses reach `part` at `key`; `before`: the mass of the smaller keys.
ROOFTILE_HD inline KeptTokens kept_of_part(std::uint32_t key, std::uint64_t before, std::uint64_t part) {
  const std::uint64_t each = sampling_mass(key);
  return {key, each == 0 ? 0 : (part - before + each - 1) / each};
}

// Where in [0, sum) random bits draw: every mass has its share, to within 2^-64.
ROOFTILE_HD inline std::uint64_t place_of(std::uint64_t bits, std::uint64_t sum) { return high_product(bits, sum); }

}  // namespace rooftile
