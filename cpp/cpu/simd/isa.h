// SPDX-License-Identifier: Apache-2.0
// Include this last. What follows it in the file is compiled for one instruction set, in that set's own namespace.
//
// The target is set by a pragma and not by -march on the command line, so inline functions of shared headers stay
// baseline code: with -march the linker could pick an AVX-512 copy of one of them for everybody.
#pragma once

#ifdef ROOFTILE_X86
#include <immintrin.h>
#endif

#if defined(ROOFTILE_ISA_AMX)
#define ROOFTILE_ISA amx
#define ROOFTILE_AVX512 1
#define ROOFTILE_VNNI 1
#define ROOFTILE_BF16 1
#define ROOFTILE_AMX 1
#define ROOFTILE_F16C 1
#pragma GCC target( \
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vnni,avx512bf16,amx-tile,amx-int8,amx-bf16")
#pragma GCC target("prefer-vector-width=512")
#elif defined(ROOFTILE_ISA_AVX512BF16)
#define ROOFTILE_ISA avx512bf16
#define ROOFTILE_AVX512 1
#define ROOFTILE_VNNI 1
#define ROOFTILE_BF16 1
#define ROOFTILE_F16C 1
#pragma GCC target( \
    "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vnni,avx512bf16,prefer-vector-width=512")
#elif defined(ROOFTILE_ISA_AVX512VNNI)
#define ROOFTILE_ISA avx512vnni
#define ROOFTILE_AVX512 1
#define ROOFTILE_VNNI 1
#define ROOFTILE_F16C 1
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512cd,avx512vnni,prefer-vector-width=512")
#elif defined(ROOFTILE_ISA_AVX512)
#define ROOFTILE_ISA avx512
#define ROOFTILE_AVX512 1
#define ROOFTILE_F16C 1
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512cd,prefer-vector-width=512")
#elif defined(ROOFTILE_ISA_AVX2)
#define ROOFTILE_ISA avx2
#define ROOFTILE_F16C 1
#pragma GCC target("avx2,fma,f16c")
#else
#define ROOFTILE_ISA portable
#endif
