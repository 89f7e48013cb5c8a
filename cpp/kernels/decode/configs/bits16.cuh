// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Bits16 : DecodeConfig<T, std::is_same_v<T, tile::half> ? KvFormat::fp16 : KvFormat::bf16, D, Stages, CtasPerSm> {
};
template <class T>
struct Bits16CtaSoftmax : CtaSoftmaxConfig<T, std::is_same_v<T, tile::half> ? KvFormat::fp16 : KvFormat::bf16> {};

template <class T>
struct Bits16Configs {
  using UpTo96 = ConfigList<Bits16<T, 64, 4, 2>, Bits16<T, 96, 2, 2>>;
  using Of128 = ConfigList<Bits16<T, 128, 2, 2>, Bits16CtaSoftmax<T>>;
  using UpTo256 = ConfigList<Bits16<T, 192, 2, 2>, Bits16<T, 256, 2, 2>>;
  using UpTo512 = ConfigList<Bits16<T, 512, 2, 2>>;
};
template <>
struct DecodeConfigs<KvFormat::fp16, tile::half> : Bits16Configs<tile::half> {};
template <>
struct DecodeConfigs<KvFormat::bf16, tile::bf16> : Bits16Configs<tile::bf16> {};

}  // namespace rooftile::gpu
