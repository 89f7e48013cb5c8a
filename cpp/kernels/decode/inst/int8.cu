// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Int8 : DecodeConfig<T, KvFormat::int8, D, Stages, CtasPerSm> {};
template <class T>
struct Int8Steps : StepConfig<T, KvFormat::int8> {};

template <>
struct DecodeConfigs<KvFormat::int8>
    : ConfigList<Int8<tile::half, 64, 3, 2>, Int8<tile::half, 96, 2, 2>, Int8<tile::half, 128, 2, 2>,
                 Int8<tile::half, 192, 2, 2>, Int8<tile::half, 256, 2, 2>, Int8<tile::half, 512, 2, 2>,
                 Int8Steps<tile::half>, Int8<tile::bf16, 64, 3, 2>, Int8<tile::bf16, 96, 2, 2>,
                 Int8<tile::bf16, 128, 2, 2>, Int8<tile::bf16, 192, 2, 2>, Int8<tile::bf16, 256, 2, 2>,
                 Int8<tile::bf16, 512, 2, 2>, Int8Steps<tile::bf16>> {};
template std::span<const DecodeVariant> decode_variants<KvFormat::int8>();

}  // namespace rooftile::gpu
