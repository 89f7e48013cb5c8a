// SPDX-License-Identifier: Apache-2.0
#include "rooftile/constants.h"

#include "core/kv_layout.h"
#include "core/sampling.h"
#include "core/w4_layout.h"
#include "ops/check.h"

namespace rooftile {

Constants constants() {
  return {.kv_group = kv_group,
          .kv_ring = kv_ring,
          .kv_step_back = kv_step_back,
          .max_head_dim = max_head_dim,
          .max_heads = check::max_heads,
          .max_head_norm = max_head_norm,
          .max_vocabulary = max_vocabulary,
          .w4_tile_rows = w4_tile_n};
}

std::span<const int> kv_page_sizes() {
  static constexpr int sizes[] = {16, 32, 64, 128};
  return sizes;
}

std::span<const int> w4_group_sizes() {
  static constexpr int sizes[] = {128, 64, 32};
  return sizes;
}

const DType* element_dtype(KvFormat f) {
  static constexpr DType f32 = DType::f32, f16 = DType::f16, bf16 = DType::bf16;
  return f == KvFormat::fp32 ? &f32 : f == KvFormat::fp16 ? &f16 : f == KvFormat::bf16 ? &bf16 : nullptr;
}

bool has_groups(KvFormat f) { return is_kivi(f); }
bool has_minima(KvFormat f) { return has_min(f); }

}  // namespace rooftile
