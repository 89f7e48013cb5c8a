// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/decode/combine.cuh"
#include "kernels/decode/plan.h"
#include "kernels/decode/split_kv.cuh"
#include "kernels/launch.h"
#include "kernels/warmup.h"

namespace rooftile::gpu {

template <class Config>
void launch_decode(const DeviceScope& scope, const DecodeParams& p) {
  scope.launch(split_kv<Config>, p.blocks, decode_threads, sizeof(DecodeShared<Config>), p);
  const std::int64_t used = std::min<std::int64_t>(columns, std::int64_t{p.q_per_kv} * p.tokens);
  scope.launch(combine<typename Config::T, Config::head_dim>, std::int64_t{p.batch} * p.cache.kv_heads * p.passes * used,
               Config::head_dim, 0, p, Overlap::with_previous);
}

template <class Config>
void load_decode(const char* op) {
  load_kernel(op, split_kv<Config>);
  load_kernel(op, combine<typename Config::T, Config::head_dim>);
}

template <class Config>
constexpr DecodeVariant decode_variant() {
  return {{std::is_same_v<typename Config::T, tile::half> ? DType::f16 : DType::bf16, Config::format, Config::head_dim},
          Config::blocks_per_sm, launch_decode<Config>, load_decode<Config>};
}

}  // namespace rooftile::gpu
