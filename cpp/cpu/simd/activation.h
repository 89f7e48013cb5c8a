// SPDX-License-Identifier: Apache-2.0
// The activations, of eight doubles. Include isa.h, vec.h and vec64.h first.
#pragma once

namespace rooftile::cpu::ROOFTILE_ISA {

struct Silu {
  static F64 apply(F64 g) { return g / (exp64(-g) + 1.0); }
};

struct GeluTanh {   // g/2 (1 + tanh z) = g / (1 + e^-2z), z = sqrt(2/pi) (g + 0.044715 g^3)
  static F64 apply(F64 g) {
    const F64 minus_2z = g * (g * g * 0.044715 + 1.0) * -1.5957691216057308;
    return g / (exp64(minus_2z) + 1.0);
  }
};

struct GeluErf {   // g/2 (1 + erf(g / sqrt 2)), through erfc so that the tail of negative g keeps its digits
  static F64 apply(F64 g) {
    // erfc(a) e^(a^2) as a polynomial in t = (a - 2.5) / (a + 2.5): least squares on a in [0, 11], relative error 3e-11.
    // Beyond 11 the exponential has left the range of every output type.
    constexpr double coefficients[] = {
        6.0772811027271639e-06, 1.5400649275632975e-05, -3.3909722175723238e-05, -1.2702450910831046e-04,
        2.2847375417844813e-04, 8.7537355989569842e-04, -2.6424030088634575e-03, -3.9936202372097516e-03,
        3.9922542356430987e-02, -1.2503305773166934e-01, 2.5171319319337870e-01, -3.7173673384784189e-01,
        2.1080636406012820e-01,   
    };
    const F64 a = clamp(magnitude(g) * 0.70710678118654752440, 0.0, 11.0);
    const F64 t = (a - 2.5) / (a + 2.5);
    F64 p{};
    for (const double c : coefficients) p = p * t + c;
    const F64 half_erfc = exp64(g * g * -0.5) * p * 0.5;
    return g * where_negative(g, half_erfc, 1.0 - half_erfc);
  }
};

}  // namespace rooftile::cpu::ROOFTILE_ISA
