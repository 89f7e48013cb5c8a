// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Int8 : DecodeConfig<T, KvFormat::int8, D, Stages, CtasPerSm> {};
template <class T>
struct Int8CtaSoftmax : CtaSoftmaxConfig<T, KvFormat::int8> {};

template <class T>
struct DecodeConfigs<KvFormat::int8, T> {
  using UpTo96 = ConfigList<Int8<T, 64, 3, 2>, Int8<T, 96, 2, 2>>;
  using Of128 = ConfigList<Int8<T, 128, 2, 2>, Int8CtaSoftmax<T>>;
  using UpTo256 = ConfigList<Int8<T, 192, 2, 2>, Int8<T, 256, 2, 2>>;
  using UpTo512 = ConfigList<Int8<T, 512, 2, 2>>;
};

}  // namespace rooftile::gpu
