// SPDX-License-Identifier: Apache-2.0
// The C++ side of a Python W4Weight or W8Weight: arrays that are checked once, and again after they have changed.
#pragma once

#include "rooftile/gemm.h"
#include "tensor_caster.h"

namespace rooftile::python {

class W4Handle {
 public:
  // codes, scales: uint8 arrays in packed layout; offsets, perm: the same or None. Kept alive.
  // op: whose name errors begin with.
  W4Handle(nb::handle codes, nb::handle scales, nb::handle offsets, nb::handle perm, nb::handle n, nb::handle k,
           int bits, nb::handle group, nb::handle zeros, nb::handle scale_dtype, const char* op);
  // The arrays where they are now, checked again if anything about them has changed.
  const W4View& view(Args&);

 private:
  void take(Args&);

  HeldArray codes_, scales_, offsets_, perm_;
  W4View view_;
  bool taken_ = false;  // view_ is of the arrays as they were taken
};

// The weight behind the argument `w` of an op for weights of so many bits; a typed error if it is none.
// Taken behind all arguments that may run Python code (__dlpack__), which may move the weight's memory.
W4View w4_view(Args&, nb::handle h, int bits);

}  // namespace rooftile::python
