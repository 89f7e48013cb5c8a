// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Fp8 : DecodeConfig<T, KvFormat::fp8, D, Stages, CtasPerSm> {};
template <class T>
struct Fp8CtaSoftmax : CtaSoftmaxConfig<T, KvFormat::fp8> {};

template <class T>
struct DecodeConfigs<KvFormat::fp8, T> {
  using UpTo96 = ConfigList<Fp8<T, 64, 3, 2>, Fp8<T, 96, 2, 2>>;
  using Of128 = ConfigList<Fp8<T, 128, 2, 2>, Fp8CtaSoftmax<T>>;
  using UpTo256 = ConfigList<Fp8<T, 192, 2, 2>, Fp8<T, 256, 2, 2>>;
  using UpTo512 = ConfigList<Fp8<T, 512, 2, 2>>;
};

}  // namespace rooftile::gpu
