// SPDX-License-Identifier: Apache-2.0
#include "bind.h"
#include "rooftile/fused.h"
#include "tensor_caster.h"

namespace rooftile::python {

using namespace nb::literals;
using nb::handle;

// Every binding converts its arguments, releases the GIL and calls one function of cpp/include. It returns the name of
// the kernel that ran.
void bind_fused(nb::module_& m) {
  m.def("rms_norm", [](handle x, handle weight, handle eps, handle out, handle stream, handle plan) {
    Args args("rms_norm");
    const TensorView tx = args.in(x, "x"), tw = args.optional(weight, "weight"), ty = args.out(out, "out");
    const float e = static_cast<float>(args.number(eps, "eps"));
    const Context ctx = args.context(tx, stream, plan);
    return run([&] { return rms_norm(ctx, tx, tw, e, ty); });
  }, "x"_a.none(), "weight"_a.none(), "eps"_a.none(), "out"_a.none(), "stream"_a.none(), "plan"_a.none());
}

}  // namespace rooftile::python
