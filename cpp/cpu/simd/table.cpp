// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"

#define ROOFTILE_TEXT(x) #x
#define ROOFTILE_NAME(x) ROOFTILE_TEXT(x)
#define ROOFTILE_JOIN(a, b) a##b
#define ROOFTILE_FUNCTION(isa) ROOFTILE_JOIN(isa, _kernels)

namespace rooftile::cpu {

const Kernels& ROOFTILE_FUNCTION(ROOFTILE_ISA)() {
#ifdef ROOFTILE_VNNI  // another variant's kernels, but for its own
  static const Kernels table = [] {
#ifdef ROOFTILE_BF16
    Kernels kernels = avx512vnni_kernels();
#else
    Kernels kernels = avx512_kernels();
#endif
    kernels.variant = ROOFTILE_NAME(ROOFTILE_ISA);
    kernels.w4a16_matmul = ROOFTILE_ISA::w4a16_matmul;
#ifdef ROOFTILE_AMX
    kernels.decode_attention = ROOFTILE_ISA::decode_attention;
#elif defined(ROOFTILE_BF16)
    kernels.prefill_attention = ROOFTILE_ISA::prefill_attention;
#endif
    return kernels;
  }();
#else
  static const Kernels table{
      ROOFTILE_NAME(ROOFTILE_ISA),
      ROOFTILE_ISA::decode_attention,
      ROOFTILE_ISA::prefill_attention,
      ROOFTILE_ISA::merge_attention,
      ROOFTILE_ISA::kv_append,
      ROOFTILE_ISA::w4a16_matmul,
      ROOFTILE_ISA::linear,
      ROOFTILE_ISA::norm,
      ROOFTILE_ISA::embedding,
      ROOFTILE_ISA::rope,
      ROOFTILE_ISA::gated,
      ROOFTILE_ISA::softmax,
      ROOFTILE_ISA::sample,
  };
#endif
  return table;
}

}  // namespace rooftile::cpu
