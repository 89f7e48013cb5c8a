// SPDX-License-Identifier: Apache-2.0
#include "rooftile/error.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"

namespace rooftile::cpu::ROOFTILE_ISA {
void w4a16_matmul(const Parallel&, const TensorView&, const W4View&, const TensorView&, const TensorView&) { fail(ErrorKind::not_supported, "todo"); }
}
