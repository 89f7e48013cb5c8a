// SPDX-License-Identifier: Apache-2.0
// Rotary position embedding (RoPE): the rotation of one pair of channels.
//   low, high: channels i and i + R of a head (R pairs); cos, sin: row `position` of the tables, column i
//   low'  = low  * cos - high * sin
//   high' = high * cos + low  * sin
#pragma once

namespace rooftile::tile {

// a * b - c * d with the rounding error of c * d added back, so that cancellation loses no digits.
__device__ __forceinline__ float difference_of_products(float a, float b, float c, float d) {
  const float cd = c * d, lost = fmaf(-c, d, cd);
  return fmaf(a, b, -cd) + lost;
}

struct RotatedPair {
  float low, high;
};
// The rotation in fp32, within 2 units in the last place of fp32. For the rope op, which the conversions to fp64 and
// back (16 a clock and SM, three an element) would slow down.
__device__ __forceinline__ RotatedPair rotate(float low, float high, float cos, float sin) {
  return {difference_of_products(low, cos, high, sin), difference_of_products(high, cos, -low, sin)};
}

// own * cos + partner * sin as the exact sum of two exact products in fp64, rounded to fp32: the bits of the CPU, which
// the cache's stored codes must equal. own: one channel; partner: the other channel of its pair; sin: of the sign that
// this channel takes (-sin for the low one).
__device__ __forceinline__ float rotate_exact(float own, float partner, float cos, float sin) {
  const double own_exact = own, partner_exact = partner, sin_exact = sin;
  return static_cast<float>(own_exact * cos + partner_exact * sin_exact);
}

}  // namespace rooftile::tile
