// SPDX-License-Identifier: Apache-2.0
#include "rooftile/error.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"

namespace rooftile::cpu::ROOFTILE_ISA {
void decode_attention(const Parallel&, const DecodeArgs&) { fail(ErrorKind::not_supported, "todo"); }
void prefill_attention(const Parallel&, const PrefillArgs&) { fail(ErrorKind::not_supported, "todo"); }
void merge_attention(const Parallel&, const TensorView&, const TensorView&, const TensorView&, const TensorView&, const TensorView&, const TensorView&) { fail(ErrorKind::not_supported, "todo"); }
}
