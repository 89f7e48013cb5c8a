// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Int4 : DecodeConfig<T, KvFormat::int4, D, Stages, CtasPerSm> {};
template <class T>
struct Int4Steps : StepConfig<T, KvFormat::int4> {};

template <>
struct DecodeConfigs<KvFormat::int4>
    : ConfigList<Int4<tile::half, 64, 4, 3>, Int4<tile::half, 96, 3, 2>, Int4<tile::half, 128, 3, 2>,
                 Int4<tile::half, 192, 3, 2>, Int4<tile::half, 256, 3, 2>, Int4<tile::half, 512, 3, 2>,
                 Int4Steps<tile::half>, Int4<tile::bf16, 64, 4, 3>, Int4<tile::bf16, 96, 3, 2>,
                 Int4<tile::bf16, 128, 3, 2>, Int4<tile::bf16, 192, 3, 2>, Int4<tile::bf16, 256, 3, 2>,
                 Int4<tile::bf16, 512, 3, 2>, Int4Steps<tile::bf16>> {};
template std::span<const DecodeVariant> decode_variants<KvFormat::int4>();

}  // namespace rooftile::gpu
