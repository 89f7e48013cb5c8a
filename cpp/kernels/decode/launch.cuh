// SPDX-License-Identifier: Apache-2.0
// The configs of decode's variants, their launches, and the table's rows. configs/ lists which there are.
#pragma once

#include "kernels/decode/combine.h"
#include "kernels/decode/plan.h"
#include "kernels/decode/split_kv.cuh"
#include "kernels/launch.h"
#include "kernels/warmup.h"

namespace rooftile::gpu {

template <class Config>
inline constexpr DType decode_dtype = std::is_same_v<typename Config::T, tile::half> ? DType::f16 : DType::bf16;

// Launches split_kv, and combine after it unless clusters reduce their work tiles themselves.
template <class Config>
struct DecodeKernel {
  using Storage = SharedStorage<DecodeTraits<Config>>;
  static constexpr int threads = 32 * Config::warps;

  static void launch(const DeviceScope& scope, const DecodeParams& p) {
    static_assert(sizeof(Storage) <= 99 * 1024);  // every supported architecture allows a CTA this much
    scope.launch(split_kv<Config>, {p.ctas / p.ctas_per_sm, p.ctas_per_sm}, threads, sizeof(Storage), p,
                 Overlap::with_previous, p.cluster_size);
    if (p.cluster_size > 1) return;
    launch_combine(scope, {decode_dtype<Config>, Config::head_dim}, p);
  }
  static void load(const char* op) {
    load_kernel(op, split_kv<Config>);
    load_combine(op, {decode_dtype<Config>, Config::head_dim});
  }
};

// The config of a variant for one n-tile of packed rows. Stages: KV tiles in the ring of the warps of a tile.
// CtasPerSm: resident CTAs of an SM. warps_per_tile: 1; 2 above 128 channels, 4 above 256. These warps share the
// output's channels. smem_levels: levels of the reduction whose values stay in shared memory; fewer for many channels,
// so that the CTA stays small.
template <class Element, KvFormat F, int D, int Stages, int CtasPerSm>
struct DecodeConfig {
  using T = Element;
  static constexpr KvFormat format = F;
  static constexpr int head_dim = D, stages = Stages, ctas_per_sm = CtasPerSm, n_tiles = 1;
  static constexpr int warps = 4, warps_per_tile = D > 256 ? 4 : D > 128 ? 2 : 1, smem_levels = D > 128 ? 1 : 4;
};
// The config of a variant for two n-tiles of packed rows, with a softmax state of the CTA: two steps in the ring.
template <class Element, KvFormat F>
struct CtaSoftmaxConfig {
  using T = Element;
  static constexpr KvFormat format = F;
  static constexpr int head_dim = 128, stages = 2, ctas_per_sm = 2, n_tiles = 2;
  static constexpr int warps = 4, warps_per_tile = 1, smem_levels = 1;
};

template <class Config>
constexpr DecodeVariant decode_variant() {
  using Kernel = DecodeKernel<Config>;
  return {{decode_dtype<Config>, Config::format, Config::head_dim, mma_n * Config::n_tiles},
          Config::ctas_per_sm,
          DecodeTraits<Config>::clusters,
          sizeof(typename Kernel::Storage),
          Kernel::launch,
          Kernel::load};
}

// The configs of a KV format's variants for queries of T: a ConfigList for each of HeadDims, UpTo96, Of128 (which
// begins with the smallest block_m), UpTo256 and UpTo512. A file in configs/ defines them.
template <KvFormat F, class T>
struct DecodeConfigs;
template <class... Configs>
struct ConfigList {
  static constexpr DecodeVariant table[sizeof...(Configs)] = {decode_variant<Configs>()...};
};

template <KvFormat F, DType dtype, HeadDims dims>
std::span<const DecodeVariant> decode_variants() {
  using Configs = DecodeConfigs<F, tile::ElementOf<dtype>>;
  if constexpr (dims == HeadDims::up_to_96) return Configs::UpTo96::table;
  else if constexpr (dims == HeadDims::of_128) return Configs::Of128::table;
  else if constexpr (dims == HeadDims::up_to_256) return Configs::UpTo256::table;
  else return Configs::UpTo512::table;
}

}  // namespace rooftile::gpu
