// SPDX-License-Identifier: Apache-2.0
// Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): random bits as a function of a key
// and a counter, without a state. The CPU and the GPU compute the same bits.
#pragma once

#include <cstdint>

#include "core/hd.h"

namespace rooftile {

// 64 random bits, the first two of Philox's four words. seed: the key; position: the low half of the counter, whose
// high half is 0.
ROOFTILE_HD inline std::uint64_t philox(std::uint64_t seed, std::uint64_t position) {
  constexpr int rounds = 10;
  std::uint32_t counter[4] = {static_cast<std::uint32_t>(position), static_cast<std::uint32_t>(position >> 32), 0, 0};
  std::uint32_t key[2] = {static_cast<std::uint32_t>(seed), static_cast<std::uint32_t>(seed >> 32)};
  for (int round = 0; round < rounds; ++round) {
    const std::uint64_t a = std::uint64_t{0xD2511F53u} * counter[0], b = std::uint64_t{0xCD9E8D57u} * counter[2];
    const std::uint32_t from_b = static_cast<std::uint32_t>(b >> 32) ^ counter[1] ^ key[0],
                        from_a = static_cast<std::uint32_t>(a >> 32) ^ counter[3] ^ key[1];
    counter[0] = from_b;
    counter[1] = static_cast<std::uint32_t>(b);
    counter[2] = from_a;
    counter[3] = static_cast<std::uint32_t>(a);
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  return std::uint64_t{counter[1]} << 32 | counter[0];
}

}  // namespace rooftile
