// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Fp8 : DecodeConfig<T, KvFormat::fp8, D, Stages, CtasPerSm> {};
template <class T>
struct Fp8CtaSoftmax : CtaSoftmaxConfig<T, KvFormat::fp8> {};

template <class T>
using Fp8Configs = ConfigList<Fp8<T, 64, 3, 2>, Fp8<T, 96, 2, 2>, Fp8<T, 128, 2, 2>, Fp8<T, 192, 2, 2>,
                              Fp8<T, 256, 2, 2>, Fp8<T, 512, 2, 2>, Fp8CtaSoftmax<T>>;
template <>
struct DecodeConfigs<KvFormat::fp8> : JoinedConfigs<Fp8Configs<tile::half>, Fp8Configs<tile::bf16>> {};
template std::span<const DecodeVariant> decode_variants<KvFormat::fp8>();

}  // namespace rooftile::gpu
