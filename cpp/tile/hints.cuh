// SPDX-License-Identifier: Apache-2.0
// Hints to the compiler about loads and values that a main loop prepares one iteration ahead.
#pragma once

#include <cstdint>

namespace rooftile::tile {

// Loads *from if `given`, else returns `otherwise`. A predicated load, which ptxas can schedule among other
// instructions: CuTe's predicated copies become branches.
__device__ __forceinline__ int load_if(bool given, const std::int32_t* from, int otherwise) {
  asm volatile("{\n.reg .pred given;\nsetp.ne.u32 given, %1, 0;\n@given ld.global.b32 %0, [%2];\n}"
               : "+r"(otherwise)
               : "r"(static_cast<std::uint32_t>(given)), "l"(from));
  return otherwise;
}

// Keeps x in a register from here on, where the compiler would compute x anew for every use; CuTe has no such hint.
__device__ __forceinline__ void pin(std::uint32_t& x) { asm volatile("" : "+r"(x)); }
__device__ __forceinline__ void pin(int& x) {
  std::uint32_t bits = static_cast<std::uint32_t>(x);
  pin(bits);
  x = static_cast<int>(bits);
}
template <class X>
__device__ __forceinline__ void pin(X*& x) {
  const auto address = reinterpret_cast<std::uint64_t>(x);
  std::uint32_t low = static_cast<std::uint32_t>(address), high = static_cast<std::uint32_t>(address >> 32);
  pin(low);
  pin(high);
  x = reinterpret_cast<X*>(std::uint64_t{high} << 32 | low);
}

}  // namespace rooftile::tile
