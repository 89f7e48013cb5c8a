// SPDX-License-Identifier: Apache-2.0
#include "rooftile/error.h"
#include "cpu/ref/kernels_ref.h"

namespace rooftile::cpu::reference {
void w4a16_matmul(const Parallel&, const TensorView&, const W4View&, const TensorView&, const TensorView&) { fail(ErrorKind::not_supported, "todo"); }
}
