// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Int4Kivi : DecodeConfig<T, KvFormat::int4_kivi, D, Stages, CtasPerSm> {};
template <class T>
struct Int4KiviCtaSoftmax : CtaSoftmaxConfig<T, KvFormat::int4_kivi> {};

template <class T>
struct DecodeConfigs<KvFormat::int4_kivi, T> {
  using UpTo96 = ConfigList<Int4Kivi<T, 64, 4, 2>, Int4Kivi<T, 96, 3, 2>>;
  using Of128 = ConfigList<Int4Kivi<T, 128, 3, 2>, Int4KiviCtaSoftmax<T>>;
  using UpTo256 = ConfigList<Int4Kivi<T, 192, 3, 2>, Int4Kivi<T, 256, 3, 2>>;
  using UpTo512 = ConfigList<Int4Kivi<T, 512, 3, 2>>;
};

}  // namespace rooftile::gpu
