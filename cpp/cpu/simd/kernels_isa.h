// SPDX-License-Identifier: Apache-2.0
// The kernels of one instruction set, declared for table.cpp. Include isa.h first.
#pragma once

#include "cpu/kernels.h"

namespace rooftile::cpu::ROOFTILE_ISA {

void decode_attention(const Parallel&, const DecodeArgs&);
void prefill_attention(const Parallel&, const PrefillArgs&);
void merge_attention(const Parallel&, const TensorView& out_a, const TensorView& lse_a, const TensorView& out_b,
                     const TensorView& lse_b, const TensorView& out, const TensorView& lse);
void kv_append(const Parallel&, const KvCacheView&, const TensorView& k, const TensorView& v, const std::int32_t* rows,
               const std::int32_t* counts);
void w4a16_matmul(const Parallel&, const W4MatmulArgs&);
void linear(const Parallel&, const LinearArgs&);
void norm(const Parallel&, const NormArgs&);
void embedding(const Parallel&, const EmbeddingArgs&);
void rope(const Parallel&, const TensorView& x, const TensorView& cos, const TensorView& sin,
          const TensorView& positions, const TensorView& y);
void gated(const Parallel&, const TensorView& x, const TensorView& h, Gate);
void softmax(const Parallel&, const TensorView& x, const TensorView& y);
void sample(const Parallel&, const SampleArgs&);

}  // namespace rooftile::cpu::ROOFTILE_ISA
