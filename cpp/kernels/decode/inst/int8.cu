// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Int8 : DecodeConfig<T, KvFormat::int8, D, Stages, CtasPerSm> {};
template <class T>
struct Int8CtaSoftmax : CtaSoftmaxConfig<T, KvFormat::int8> {};

template <class T>
using Int8Configs = ConfigList<Int8<T, 64, 3, 2>, Int8<T, 96, 2, 2>, Int8<T, 128, 2, 2>, Int8<T, 192, 2, 2>,
                               Int8<T, 256, 2, 2>, Int8<T, 512, 2, 2>, Int8CtaSoftmax<T>>;
template <>
struct DecodeConfigs<KvFormat::int8> : JoinedConfigs<Int8Configs<tile::half>, Int8Configs<tile::bf16>> {};
template std::span<const DecodeVariant> decode_variants<KvFormat::int8>();

}  // namespace rooftile::gpu
