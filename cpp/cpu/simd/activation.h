// SPDX-License-Identifier: Apache-2.0
// The activations, of sixteen floats. Include isa.h and vec.h first.
#pragma once

namespace rooftile::cpu::ROOFTILE_ISA {

// g / (1 + e^-z) without an overflow on the way. g and z have one sign.
ROOFTILE_INLINE F32 gate_by_sigmoid(F32 g, F32 z) {
  const F32 e = exp(-magnitude(z));
  return where_negative(g, g * e, g) / (e + 1.0f);
}

struct Silu {
  static F32 apply(F32 g) { return gate_by_sigmoid(g, g); }
};

struct GeluTanh {  // g/2 (1 + tanh z) = g / (1 + e^-2z), z = sqrt(2/pi) (g + 0.044715 g^3)
  static F32 apply(F32 g) {
    return gate_by_sigmoid(g, g * fma(g * g, splat(0.044715f), splat(1.0f)) * 1.5957691216057308f);
  }
};

struct GeluErf {  // g/2 (1 + erf(g / sqrt 2)), through erfc so that the tail of negative g keeps its digits
  static F32 apply(F32 g) {
    // erfc(a) e^(a^2) as a polynomial in t = (a - 2.5) / (a + 2.5): least squares on a in [0, 11], relative error
    // 3e-11.
    // Beyond 11 the exponential has left the range of every output type.
    constexpr float coefficients[] = {
        6.0772811027271639e-06f, 1.5400649275632975e-05f,  -3.3909722175723238e-05f, -1.2702450910831046e-04f,
        2.2847375417844813e-04f, 8.7537355989569842e-04f,  -2.6424030088634575e-03f, -3.9936202372097516e-03f,
        3.9922542356430987e-02f, -1.2503305773166934e-01f, 2.5171319319337870e-01f,  -3.7173673384784189e-01f,
        2.1080636406012820e-01f,
    };
    const F32 a = clamp(magnitude(g) * 0.70710678118654752440f, 0.0f, 11.0f);
    const F32 t = (a - 2.5f) / (a + 2.5f);
    F32 p{};
    for (const float c : coefficients) p = fma(p, t, splat(c));
    const F32 half_erfc = exp(g * g * -0.5f) * p * 0.5f;
    return g * where_negative(g, half_erfc, 1.0f - half_erfc);
  }
};

}  // namespace rooftile::cpu::ROOFTILE_ISA
