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
  static_assert(sizeof(DecodeShared<Config>) <= 99 * 1024);   // what a block of every supported architecture may have
  scope.launch(split_kv<Config>, {p.blocks / p.layers, p.layers}, 32 * Config::warps, sizeof(DecodeShared<Config>), p, Overlap::with_previous, p.cluster);
  if (p.cluster > 1) return;
  const std::int64_t used = std::min<std::int64_t>(columns, std::int64_t{p.q_per_kv} * p.tokens);
  scope.launch(combine<typename Config::T, Config::head_dim>, std::int64_t{p.batch} * p.cache.kv_heads * p.passes * used,
               Config::head_dim, 0, p, Overlap::with_previous);
}

template <class Config>
void load_decode(const char* op) {
  load_kernel(op, split_kv<Config>);
  load_kernel(op, combine<typename Config::T, Config::head_dim>);
}

// What a variant is made of. `stages` tiles of a team on the way, `blocks` a multiprocessor. A team is one warp; of more than
// 128 channels two, which have half of the output's channels each, and more of the fold waits in the workspace, so that a
// block stays small.
template <class Element, KvFormat F, int D, int Stages, int Blocks>
struct DecodeConfig {
  using T = Element;
  static constexpr KvFormat format = F;
  static constexpr int head_dim = D, stages = Stages, blocks_per_sm = Blocks;
  static constexpr int warps = 4, team = D > 128 ? 2 : 1, near_levels = D > 128 ? 1 : 4;
  static constexpr bool clusters = near_levels >= cluster_slots;   // there is room for a block's leaves
};

template <class Config>
constexpr DecodeVariant decode_variant() {
  return {{std::is_same_v<typename Config::T, tile::half> ? DType::f16 : DType::bf16, Config::format, Config::head_dim},
          Config::blocks_per_sm, Config::clusters, sizeof(DecodeShared<Config>), launch_decode<Config>, load_decode<Config>};
}

// The table of one file.
template <class... Configs>
std::span<const DecodeVariant> decode_variants() {
  static constexpr DecodeVariant table[] = {decode_variant<Configs>()...};
  return table;
}

}  // namespace rooftile::gpu
