// SPDX-License-Identifier: Apache-2.0
#include "rooftile/error.h"
#include "cpu/ref/kernels_ref.h"

namespace rooftile::cpu::reference {
void kv_append(const Parallel&, const KvCacheView&, const TensorView&, const TensorView&, const std::int32_t*, const std::int32_t*) { fail(ErrorKind::not_supported, "todo"); }
}
