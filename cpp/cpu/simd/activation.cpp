// SPDX-License-Identifier: Apache-2.0
// Gated activations.  x [..., 2H] = [gate | up], h [..., H] = f(gate) * up
// One pass: three streams, one exponential an element.
#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"
#include "cpu/simd/activation.h"
#include "cpu/simd/rows.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

template <class Activation>
void gated_rows(const Parallel& parallel, const TensorView& x, const TensorView& h) {
  with_element(x.dtype, [&](auto e) {
    using T = decltype(e);
    const RowScratch<T> x_scratch(x, parallel.threads()), h_scratch(h, parallel.threads());
    const std::int64_t n = h.last();
    for_rows(parallel, x.rows(), x.last(), [&](std::int64_t row, int thread) {
      const T* gate = x_scratch.read(x, row, thread);
      T* to = h_scratch.write(h, row, thread);
      for_vecs(n, [=](std::int64_t i, auto lanes) {
        store(to + i, Activation::apply(load(gate + i, lanes)) * load(gate + n + i, lanes), lanes);
      });
      h_scratch.commit(h, row, thread);
    });
  });
}

}  // namespace

void gated(const Parallel& parallel, const TensorView& x, const TensorView& h, Gate gate) {
  switch (gate) {
    case Gate::silu:
      return gated_rows<Silu>(parallel, x, h);
    case Gate::gelu_tanh:
      return gated_rows<GeluTanh>(parallel, x, h);
    case Gate::gelu_erf:
      return gated_rows<GeluErf>(parallel, x, h);
  }
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
