// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Int4Kivi : DecodeConfig<T, KvFormat::int4_kivi, D, Stages, CtasPerSm> {};
template <class T>
struct Int4KiviSteps : StepConfig<T, KvFormat::int4_kivi> {};

template <>
struct DecodeConfigs<KvFormat::int4_kivi>
    : ConfigList<Int4Kivi<tile::half, 64, 4, 2>, Int4Kivi<tile::half, 96, 3, 2>, Int4Kivi<tile::half, 128, 3, 2>,
                 Int4Kivi<tile::half, 192, 3, 2>, Int4Kivi<tile::half, 256, 3, 2>, Int4Kivi<tile::half, 512, 3, 2>,
                 Int4KiviSteps<tile::half>, Int4Kivi<tile::bf16, 64, 4, 2>, Int4Kivi<tile::bf16, 96, 3, 2>,
                 Int4Kivi<tile::bf16, 128, 3, 2>, Int4Kivi<tile::bf16, 192, 3, 2>, Int4Kivi<tile::bf16, 256, 3, 2>,
                 Int4Kivi<tile::bf16, 512, 3, 2>, Int4KiviSteps<tile::bf16>> {};
template std::span<const DecodeVariant> decode_variants<KvFormat::int4_kivi>();

}  // namespace rooftile::gpu
