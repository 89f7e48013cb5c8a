// SPDX-License-Identifier: Apache-2.0
#ifdef __linux__
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <cstring>
#include <string>
#include <vector>

#include "cpu/kernels.h"
#include "rooftile/error.h"
#include "rooftile/names.h"

namespace rooftile::cpu {
namespace {

struct Variant {
  const Kernels& (*kernels)();
  bool (*runs)();
};

bool always() { return true; }
#ifdef ROOFTILE_X86
// __builtin_cpu_supports also checks that the operating system saves the registers (XCR0).
bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool has_avx512vnni() { return has_avx512() && __builtin_cpu_supports("avx512vnni"); }
// Intel's CPUs do as many multiply-adds of bf16 a cycle as of fp32: there these kernels would take longer.
bool has_fast_avx512bf16() {
  return has_avx512vnni() && __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel");
}
// Linux gives a process AMX's registers when it asks for them.
bool has_amx() {
  static const bool has = [] {
    constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return has_avx512vnni() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("amx-tile") &&
           __builtin_cpu_supports("amx-bf16") && __builtin_cpu_supports("amx-int8") &&
           syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
  }();
  return has;
}
#endif

constexpr Variant variants[] = {
// best first; the reference is never chosen unasked
#ifdef ROOFTILE_X86
    {amx_kernels, has_amx},  // avx512vnni, but for W4A16 of many rows of bf16 and decode attention over 4-bit codes
    {avx512bf16_kernels, has_fast_avx512bf16},  // avx512vnni, but for prompts in bf16
    {avx512vnni_kernels, has_avx512vnni},       // avx512, but for W4A16 of one row
    {avx512_kernels, has_avx512},               // F, BW, DQ, VL
    {avx2_kernels, has_avx2},                   // with FMA and F16C
#endif
    {portable_kernels, always},
    {reference_kernels, always},
};

const Kernels& best() {
  for (const Variant& v : variants)
    if (v.runs()) return v.kernels();
  return portable_kernels();
}

}  // namespace

const Kernels& kernels_for(const char* op, const char* variant) {
  static const Kernels& chosen = best();
  if (!variant) return chosen;
  std::vector<std::string> names;
  for (const Variant& v : variants) {
    if (v.runs()) names.emplace_back(v.kernels().variant);
    if (std::strcmp(v.kernels().variant, variant) == 0) {
      ROOFTILE_CHECK_KIND(not_supported, v.runs(), op, ": plan ", quoted(variant),
                          " is not for this CPU, which runs: ", runnable_variants());
      return v.kernels();
    }
  }
  fail(ErrorKind::not_supported, op, ": plan ", quoted(variant),
       " is no CPU variant; this CPU runs: ", runnable_variants(), did_you_mean(variant, names));
}

const char* runnable_variants() {
  static const std::string text = [] {
    std::string names;
    for (const Variant& v : variants)
      if (v.runs()) names += (names.empty() ? "" : ", ") + std::string(v.kernels().variant);
    return names;
  }();
  return text.c_str();
}

}  // namespace rooftile::cpu
