// SPDX-License-Identifier: Apache-2.0
// Gated activations.  x [..., 2H] = [gate | up], h [..., H] = f(gate) * up
// One pass: three streams, one exponential an element.
#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/vec64.h"
#include "cpu/simd/rows.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

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

template <class Activation>
void gated_rows(const Parallel& parallel, const TensorView& x, const TensorView& h) {
  with_element(x.dtype, [&](auto e) {
    using T = decltype(e);
    const RowScratch<T> x_room(x, parallel.threads()), h_room(h, parallel.threads());
    const std::int64_t n = h.last();
    for_rows(parallel, x.rows(), x.last(), [&](std::int64_t row, int thread) {
      const T* gate = x_room.read(x, row, thread);
      T* to = h_room.write(h, row, thread);
      for_pieces(n, [=](std::int64_t i, auto lanes) {
        store64(to + i, Activation::apply(load64(gate + i, lanes)) * load64(gate + n + i, lanes), lanes);
      });
      h_room.commit(h, row, thread);
    });
  });
}

}  // namespace

void gated(const Parallel& parallel, const TensorView& x, const TensorView& h, Gate gate) {
  switch (gate) {
    case Gate::silu: return gated_rows<Silu>(parallel, x, h);
    case Gate::gelu_tanh: return gated_rows<GeluTanh>(parallel, x, h);
    case Gate::gelu_erf: return gated_rows<GeluErf>(parallel, x, h);
  }
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
