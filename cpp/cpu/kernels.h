// SPDX-License-Identifier: Apache-2.0
// What the CPU backend offers to ops: the same set of functions, compiled several times.
//
// `reference` (cpp/cpu/ref) is plain loops, the oracle of the C++ tests. `portable`, `avx2`, `avx512`, `avx512vnni`,
// `avx512bf16` and `amx` (cpp/cpu/simd) are one source compiled per instruction set. Arguments have been checked by
// ops; every function takes any strides and allocates its own scratch on the host.
#pragma once

#include "core/op_args.h"
#include "core/parallel.h"

namespace rooftile::cpu {

struct Kernels {
  const char* variant;

  void (*decode_attention)(const Parallel&, const DecodeArgs&);
  void (*prefill_attention)(const Parallel&, const PrefillArgs&);
  void (*merge_attention)(const Parallel&, const TensorView& out_a, const TensorView& lse_a, const TensorView& out_b,
                          const TensorView& lse_b, const TensorView& out, const TensorView& lse);

  // Stores tokens of k, v [B, T, Hkv, D] at positions lengths[row] .. ; lengths are advanced by ops afterwards.
  void (*kv_append)(const Parallel&, const KvCacheView&, const TensorView& k, const TensorView& v,
                    const std::int32_t* rows, const std::int32_t* counts);

  void (*w4a16_matmul)(const Parallel&, const W4MatmulArgs&);
  void (*linear)(const Parallel&, const LinearArgs&);

  void (*norm)(const Parallel&, const NormArgs&);
  void (*embedding)(const Parallel&, const EmbeddingArgs&);
  void (*rope)(const Parallel&, const TensorView& x, const TensorView& cos, const TensorView& sin,
               const TensorView& positions, const TensorView& y);
  void (*gated)(const Parallel&, const TensorView& x, const TensorView& h, Gate);
  void (*softmax)(const Parallel&, const TensorView& x, const TensorView& y);
  void (*sample)(const Parallel&, const SampleArgs&);
};

const Kernels& reference_kernels();
const Kernels& portable_kernels();
#ifdef ROOFTILE_X86
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512vnni_kernels();  // avx512, with W4A16 and W8A16 of one row of x in integers
const Kernels& amx_kernels();         // avx512vnni, with those of many rows of bf16 in AMX's tiles
const Kernels& avx512bf16_kernels();  // avx512vnni, with those of many rows of bf16, and prefill, in bf16
#endif

// The best variant this machine runs, or the one named; raises NotSupported, naming `op`, for one it does not run or
// know.
const Kernels& kernels_for(const char* op, const char* variant);
// Names this machine can run, best first, comma separated.
const char* runnable_variants();

}  // namespace rooftile::cpu
