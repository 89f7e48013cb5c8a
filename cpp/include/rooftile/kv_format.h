// SPDX-License-Identifier: Apache-2.0
// The KV formats. A new combination of bits, granularity and zero points is an enumerator, a line of kv_format_traits,
// kernels/decode/configs/<name>.cuh and, where its variants differ, expected_decode_facts in kernels/decode/plan.cpp;
// everything else asks the traits (docs/contributing.md).
#pragma once

#include <cstdint>

namespace rooftile {

enum class KvFormat : std::uint8_t { fp32, fp16, bf16, int8, int4, int4_kivi_sym, int4_kivi, fp8, int8_kivi_sym };
inline constexpr int kv_format_count = 9;

enum class KvCode : std::uint8_t { element, integer, e4m3 };   // element: a value as it is, no code
enum class KvScaleOf : std::uint8_t { none, token, channel };  // channel: one channel of kv_group tokens

struct KvFormatTraits {
  const char* name;
  int bits;           // of an element or a code
  KvCode code;        // integers without minima are signed, -2^(bits - 1) + 1 to 2^(bits - 1) - 1
  KvScaleOf k_scale;  // what shares a scale of K: granularity. V's scales are per token
  bool affine;        // groups have minima, codes are 0 to 2^bits - 1
};
constexpr KvFormatTraits kv_format_traits(KvFormat f) {
  switch (f) {
    case KvFormat::fp32:
      return {"fp32", 32, KvCode::element, KvScaleOf::none, false};
    case KvFormat::fp16:
      return {"fp16", 16, KvCode::element, KvScaleOf::none, false};
    case KvFormat::bf16:
      return {"bf16", 16, KvCode::element, KvScaleOf::none, false};
    case KvFormat::int8:
      return {"int8", 8, KvCode::integer, KvScaleOf::token, false};
    case KvFormat::int4:
      return {"int4", 4, KvCode::integer, KvScaleOf::token, false};
    case KvFormat::int4_kivi_sym:
      return {"int4-kivi-sym", 4, KvCode::integer, KvScaleOf::channel, false};
    case KvFormat::int4_kivi:
      return {"int4-kivi", 4, KvCode::integer, KvScaleOf::channel, true};
    case KvFormat::fp8:
      return {"fp8", 8, KvCode::e4m3, KvScaleOf::token, false};
    case KvFormat::int8_kivi_sym:
      return {"int8-kivi-sym", 8, KvCode::integer, KvScaleOf::channel, false};
  }
  return {};
}
static_assert(kv_format_traits(static_cast<KvFormat>(kv_format_count - 1)).name != nullptr &&
                  kv_format_traits(static_cast<KvFormat>(kv_format_count)).name == nullptr,
              "kv_format_count must count the formats");

}  // namespace rooftile
