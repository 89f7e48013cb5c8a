// SPDX-License-Identifier: Apache-2.0
// Stored values of one row of a KV cache, read on the host. Arguments have been checked by ops; the host can read the
// cache's memory. One compiled version for every CPU, so the bits are the same on all of them.
#pragma once

#include <cstdint>

#include "core/parallel.h"
#include "rooftile/kv_cache.h"

namespace rooftile::cpu {

// out_k, out_v fp32 [tokens, Hkv, D]: the first `coded` tokens as their codes read, the others raw.
void kv_dequantize(const Parallel&, const KvCacheView&, std::int64_t row, std::int64_t coded, const TensorView& out_k,
                   const TensorView& out_v);
// out_k, out_v int8 [tokens, Hkv, D] (fp8: the codes' bits): the codes of the row's first tokens.
void kv_dump_codes(const KvCacheView&, std::int64_t row, const TensorView& out_k, const TensorView& out_v);
// out fp32 [tokens, Hkv, 1], or [groups of 32 tokens, Hkv, D] for K of the kivi formats: scales, or minima.
void kv_dump_scales(const KvCacheView&, std::int64_t row, KvSide side, bool minima, const TensorView& out);

}  // namespace rooftile::cpu
