// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Int4 : DecodeConfig<T, KvFormat::int4, D, Stages, CtasPerSm> {};
template <class T>
struct Int4CtaSoftmax : CtaSoftmaxConfig<T, KvFormat::int4> {};

template <class T>
struct DecodeConfigs<KvFormat::int4, T> {
  using UpTo96 = ConfigList<Int4<T, 64, 4, 3>, Int4<T, 96, 3, 2>>;
  using Of128 = ConfigList<Int4<T, 128, 3, 2>, Int4CtaSoftmax<T>>;
  using UpTo256 = ConfigList<Int4<T, 192, 3, 2>, Int4<T, 256, 3, 2>>;
  using UpTo512 = ConfigList<Int4<T, 512, 3, 2>>;
};

}  // namespace rooftile::gpu
