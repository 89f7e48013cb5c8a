// SPDX-License-Identifier: Apache-2.0
// What a Python W4Weight or W8Weight hands to C++: checked once, not once a call.
#pragma once

#include "rooftile/gemm.h"
#include "tensor_caster.h"

namespace rooftile::python {

class W4Handle {
 public:
  // codes, scales: uint8 arrays in kernel form; offsets, perm: the same or None. Kept alive, and must not be resized.
  // op: whose name errors begin with.
  W4Handle(nb::handle codes, nb::handle scales, nb::handle offsets, nb::handle perm, nb::handle n, nb::handle k,
           int bits, nb::handle group, nb::handle zeros, nb::handle scale_dtype, const char* op);
  const W4View& view() const { return view_; }

 private:
  nb::tuple arrays_;
  W4View view_;
};

// The weight behind the argument `w` of an op for weights of so many bits; a typed error if it is none.
const W4View& w4_view(nb::handle h, const char* op, int bits);

}  // namespace rooftile::python
