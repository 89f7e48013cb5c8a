// SPDX-License-Identifier: Apache-2.0
// AMX's tile registers. Include isa.h first.
#pragma once

#include <cstdint>

#include "cpu/simd/vec.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

// How tile registers are laid out: palette 1, eight of 16 lines of 64 bytes.
struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, unused[14] = {};
  std::uint16_t line_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  std::uint8_t lines[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};
constexpr TileConfig tile_config{};

// This thread's tile registers, while it lives.
class TileRegisters {
 public:
  static constexpr int lines = 16;
  explicit TileRegisters(const TileConfig& config = tile_config) { _tile_loadconfig(&config); }
  ~TileRegisters() { _tile_release(); }
  TileRegisters(const TileRegisters&) = delete;
  TileRegisters& operator=(const TileRegisters&) = delete;
};

// The unit sleeps after some hundred cycles without a product, and the next one then waits for it, some 700 cycles on a
// Xeon of the 4th generation. This product of registers 4 and 6 into 0, which nobody reads, keeps it awake between two
// that are wanted: decode attention over 719 tokens takes 34 us in place of 41.
ROOFTILE_INLINE void keep_awake() { _tile_dpbusd(0, 4, 6); }

// GCC's intrinsics do not say that they read memory: what was written to it before stays before them.
ROOFTILE_INLINE void memory_is_read() { asm volatile("" ::: "memory"); }

}  // namespace
}  // namespace rooftile::cpu::ROOFTILE_ISA
