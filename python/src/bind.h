// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nanobind/nanobind.h>

#include "rooftile/context.h"

namespace rooftile::python {

inline nanobind::str kernel_of(const KernelName& kernel) { return nanobind::str(kernel.text); }

// Runs one op without the GIL and returns the name of the kernel that ran.
template <class Op>
nanobind::str run(const Op& op) {
  KernelName kernel;
  {
    nanobind::gil_scoped_release unlocked;
    kernel = op();
  }
  return kernel_of(kernel);
}

void bind_attention(nanobind::module_& m);
void bind_explain(nanobind::module_& m);
void bind_fused(nanobind::module_& m);
void bind_gemm(nanobind::module_& m);
void bind_graph(nanobind::module_& m);
void bind_kv_cache(nanobind::module_& m);
void bind_roof(nanobind::module_& m);
void bind_sampling(nanobind::module_& m);

}  // namespace rooftile::python
