// SPDX-License-Identifier: Apache-2.0
// Rounding to 4 or 8 bits, one definition for both backends: scale, minimum and codes of a group.
#pragma once

#include <cmath>

#include "core/half.h"
#include "core/hd.h"
#include "rooftile/tensor.h"

namespace rooftile {

// x rounded to the scale's dtype: a finite value never becomes infinite.
ROOFTILE_HD inline float w4_stored(float x, DType t) {
  const float largest = largest_scale(t, false), infinity = INFINITY;
  const float r = t == DType::f16 ? to_float(from_float<Half>(x)) : to_float(from_float<BFloat16>(x));
  const bool overflowed = (r == infinity || r == -infinity) && x != infinity && x != -infinity;
  return overflowed ? (x < 0 ? -largest : largest) : r;
}

// Rounds a scale: a positive scale never becomes 0, and 15 times an affine scale stays finite.
ROOFTILE_HD inline float w4_stored_scale(float x, DType t, bool affine) {
  const float largest = largest_scale(t, affine), r = w4_stored(x < largest ? x : largest, t);
  return r == 0 && x > 0 ? (t == DType::f16 ? 0x1p-24f : 0x1p-133f) : r;
}

struct W4Group {
  bool affine;           // with a minimum, 4 bits only; else symmetric
  int most;              // symmetric: the largest |code|
  float scale, minimum;  // as stored

  // The group whose values lie in [low, high]. A group with a NaN or an infinity has NaN for scale and minimum.
  ROOFTILE_HD static W4Group of(float low, float high, bool finite, bool affine, int bits, DType t) {
    const int most = (1 << (bits - 1)) - 1;
    if (!finite) return {affine, most, NAN, NAN};
    const float magnitude = fmaxf(fabsf(low), fabsf(high));  // +0 for zeros of either sign, so the scale has no sign
    const float step =
        affine ? (high - low) / 15.0f : magnitude / static_cast<float>(most);  // may overflow to infinity
    return {affine, most, w4_stored_scale(step, t, affine), affine ? w4_stored(low, t) : 0.0f};
  }
  ROOFTILE_HD int code(float x) const {
    // with a zero or NaN scale every code reads back as the minimum (0 if symmetric) or NaN
    if (!(scale > 0)) return affine ? 0 : most + 1;
    const float u = nearbyintf((x - minimum) / scale);
    const float highest = affine ? 15.0f : static_cast<float>(most), lowest = affine ? 0.0f : -highest;
    const float clamped = u < lowest ? lowest : u > highest ? highest : u;
    return static_cast<int>(clamped) + (affine ? 0 : most + 1);
  }
};

}  // namespace rooftile
