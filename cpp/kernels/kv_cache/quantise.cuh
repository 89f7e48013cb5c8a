// SPDX-License-Identifier: Apache-2.0
// A group of values -> its scale, its minimum and its codes. A group is one head of one token or, for K of the kivi
// formats, one channel of 32 tokens. Every value goes through the CPU's fp32 operations, each rounded once; the _rn
// intrinsics keep the compiler from contracting them. So the stored bytes equal the CPU's.
#pragma once

#include <cstdint>
#include <limits>
#include <type_traits>

#include "core/half.h"
#include "core/kv_layout.h"
#include "tile/element.cuh"

namespace rooftile::gpu {

// Least and greatest value of a group, as integers that order like the values; symmetric formats: the greatest
// magnitude.
template <KvFormat f>
struct GroupRange {
  int low = std::numeric_limits<int>::max(), high = has_min(f) ? std::numeric_limits<int>::min() : 0;

  static constexpr int infinity = 0x7f800000;
  // Float bits <-> ordered integer; its own inverse.
  static __device__ int flip(int x) { return x ^ ((x >> 31) & 0x7fffffff); }

  __device__ void add(float x) {
    if constexpr (has_min(f)) {
      const int key = flip(__float_as_int(x));
      low = min(low, key);
      high = max(high, key);
    } else {
      high = max(high, __float_as_int(x) & 0x7fffffff);
    }
  }
  __device__ void reduce_warp() {  // over the 32 lanes, which hold one group together
    if constexpr (has_min(f)) low = __reduce_min_sync(0xffffffffu, low);
    high = __reduce_max_sync(0xffffffffu, high);
  }
  __device__ void reduce_xor(int lanes) {  // with lane ^ lanes
    if constexpr (has_min(f)) low = min(low, __shfl_xor_sync(0xffffffffu, low, lanes));
    high = max(high, __shfl_xor_sync(0xffffffffu, high, lanes));
  }
  // By masks: ?: would select an address and spill both ranges to memory.
  __device__ void assign_if(const GroupRange& other, bool condition) {
    const int mask = -static_cast<int>(condition);
    low = (low & ~mask) | (other.low & mask);
    high = (high & ~mask) | (other.high & mask);
  }
  __device__ bool has_nonfinite() const {  // the group holds a NaN or an infinity: their keys lie past all finite ones
    return high >= infinity || (has_min(f) && low <= flip(infinity | static_cast<int>(0x80000000u)));
  }
  __device__ float least() const { return __int_as_float(flip(low)); }
  __device__ float greatest() const { return __int_as_float(has_min(f) ? flip(high) : high); }
};

// Scale and minimum of a group as a reader of the cache sees them, and the codes they yield.
template <class T, KvFormat f>
struct Quantizer {
  static constexpr bool bf16 = std::is_same_v<T, tile::bf16>;
  static constexpr float smallest = bf16 ? 0x1p-133f : 0x1p-24f;  // subnormal
  static constexpr float largest_scale = rooftile::largest_scale(bf16 ? DType::bf16 : DType::f16, has_min(f));
  static constexpr float max_code = static_cast<float>(rooftile::max_code(f)), min_code = has_min(f) ? 0.0f : -max_code;

  T stored_scale, stored_minimum;
  float minimum;

  explicit __device__ Quantizer(const GroupRange<f>& r) {
    const float nan = __int_as_float(0x7fc00000);  // converts to the same NaN bits as on the CPU
    const float width = has_min(f) ? __fsub_rn(r.greatest(), r.least()) : r.greatest();
    const float step = width > 0.0f ? fminf(fmaxf(__fdiv_rn(width, max_code), smallest), largest_scale) : 0.0f;
    stored_scale = round(r.has_nonfinite() ? nan : step);
    minimum = 0.0f;
    if constexpr (has_min(f)) {
      constexpr float largest_minimum = bf16 ? 0x1.fep+127f : 65504.0f;
      // + 0 makes the minimum +0 in a group that holds zeros of both signs
      const float least = fminf(fmaxf(__fadd_rn(r.least(), 0.0f), -largest_minimum), largest_minimum);
      stored_minimum = round(r.has_nonfinite() ? nan : least);
      minimum = tile::to_float(stored_minimum);
    }
    const float scale = tile::to_float(stored_scale);
    factor_ = !bf16 ? 1.0f : scale < 0x1p-64f ? 0x1p+80f : scale > 0x1p+64f ? 0x1p-80f : 1.0f;
    scale_ = __fmul_rn(scale, factor_);
    inverse_ = __frcp_rn(scale_);
  }

  // The quantizer of lane `lane`, for codes alone: the stored values are this lane's.
  __device__ Quantizer from_lane(int lane) const {
    Quantizer quantizer = *this;
    if constexpr (has_min(f)) quantizer.minimum = __shfl_sync(0xffffffffu, minimum, lane);
    quantizer.scale_ = __shfl_sync(0xffffffffu, scale_, lane);
    quantizer.inverse_ = __shfl_sync(0xffffffffu, inverse_, lane);
    if constexpr (bf16) quantizer.factor_ = __shfl_sync(0xffffffffu, factor_, lane);
    return quantizer;
  }

  // The code of x; 0 if the scale is 0 or NaN. The quotient is correctly rounded: after the first correction it errs by
  // less than one unit in the last place, and the second correction is then exact (Markstein). This holds without
  // under- and overflow; factor_ and the bound prevent both, except for quotients so small that their code is 0 in any
  // case.
  __device__ int code(float x) const {
    float a = has_min(f) ? __fsub_rn(x, minimum) : x;
    if constexpr (bf16) a = __fmul_rn(fminf(a, std::numeric_limits<float>::max()), factor_);
    float ratio = __fmul_rn(a, inverse_);
    ratio = __fmaf_rn(__fmaf_rn(-scale_, ratio, a), inverse_, ratio);
    ratio = __fmaf_rn(__fmaf_rn(-scale_, ratio, a), inverse_, ratio);
    if constexpr (is_e4m3(f))
      return scale_ > 0.0f ? e4m3(fminf(fabsf(ratio), max_code)) | (__float_as_int(x) >> 24 & 0x80) : 0;
    return scale_ > 0.0f ? __float2int_rn(fminf(fmaxf(ratio, min_code), max_code)) : 0;
  }

 private:
  // Rounds 0 <= x <= 448 to the nearest E4M3 number, ties to even. Below 2^-6 (subnormals) the step is 2^-9; above, the
  // mantissa has three bits.
  static __device__ int e4m3(float x) {
    if (x < 0x1p-6f) return __float2int_rn(x * 0x1p+9f);
    const int bits = __float_as_int(x);
    return ((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3);
  }
  static __device__ T round(float x) {
    if (x != x) {
      constexpr std::uint16_t bits = bf16 ? 0x7fc0 : 0x7e00;
      return tile::bit_cast<T>(bits);
    }
    return tile::from_float<T>(x);
  }
  float scale_, inverse_, factor_;  // scale_: the stored scale times factor_, a power of two
};

template <KvFormat f>
inline constexpr std::uint32_t code_mask = (1u << code_bits(f)) - 1;

// Packs four codes into one word, the first in the lowest bits.
template <KvFormat f>
__device__ std::uint32_t packed(const int (&codes)[4]) {
  std::uint32_t word = 0;
#pragma unroll
  for (int j = 0; j < 4; ++j) word |= (static_cast<std::uint32_t>(codes[j]) & code_mask<f>) << (j * code_bits(f));
  return word;
}

}  // namespace rooftile::gpu
