// SPDX-License-Identifier: Apache-2.0
#include "rooftile/error.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"

namespace rooftile::cpu::ROOFTILE_ISA {
void kv_append(const Parallel&, const KvCacheView&, const TensorView&, const TensorView&, const std::int32_t*, const std::int32_t*) { fail(ErrorKind::not_supported, "todo"); }
}
