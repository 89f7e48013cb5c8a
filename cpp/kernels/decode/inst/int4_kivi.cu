// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Int4Kivi : DecodeConfig<T, KvFormat::int4_kivi, D, Stages, CtasPerSm> {};
template <class T>
struct Int4KiviCtaSoftmax : CtaSoftmaxConfig<T, KvFormat::int4_kivi> {};

template <class T>
using Int4KiviConfigs =
    ConfigList<Int4Kivi<T, 64, 4, 2>, Int4Kivi<T, 96, 3, 2>, Int4Kivi<T, 128, 3, 2>, Int4Kivi<T, 192, 3, 2>,
               Int4Kivi<T, 256, 3, 2>, Int4Kivi<T, 512, 3, 2>, Int4KiviCtaSoftmax<T>>;
template <>
struct DecodeConfigs<KvFormat::int4_kivi> : JoinedConfigs<Int4KiviConfigs<tile::half>, Int4KiviConfigs<tile::bf16>> {};
template std::span<const DecodeVariant> decode_variants<KvFormat::int4_kivi>();

}  // namespace rooftile::gpu
