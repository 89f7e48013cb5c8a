// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Fp8 : DecodeConfig<T, KvFormat::fp8, D, Stages, CtasPerSm> {};
template <class T>
struct Fp8Steps : StepConfig<T, KvFormat::fp8> {};

template <>
struct DecodeConfigs<KvFormat::fp8>
    : ConfigList<Fp8<tile::half, 64, 3, 2>, Fp8<tile::half, 96, 2, 2>, Fp8<tile::half, 128, 2, 2>,
                 Fp8<tile::half, 192, 2, 2>, Fp8<tile::half, 256, 2, 2>, Fp8<tile::half, 512, 2, 2>,
                 Fp8Steps<tile::half>, Fp8<tile::bf16, 64, 3, 2>, Fp8<tile::bf16, 96, 2, 2>, Fp8<tile::bf16, 128, 2, 2>,
                 Fp8<tile::bf16, 192, 2, 2>, Fp8<tile::bf16, 256, 2, 2>, Fp8<tile::bf16, 512, 2, 2>,
                 Fp8Steps<tile::bf16>> {};
template std::span<const DecodeVariant> decode_variants<KvFormat::fp8>();

}  // namespace rooftile::gpu
