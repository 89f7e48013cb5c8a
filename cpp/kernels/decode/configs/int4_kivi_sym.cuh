// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Int4KiviSym : DecodeConfig<T, KvFormat::int4_kivi_sym, D, Stages, CtasPerSm> {};
template <class T>
struct Int4KiviSymCtaSoftmax : CtaSoftmaxConfig<T, KvFormat::int4_kivi_sym> {};

template <class T>
struct DecodeConfigs<KvFormat::int4_kivi_sym, T> {
  using UpTo96 = ConfigList<Int4KiviSym<T, 64, 4, 2>, Int4KiviSym<T, 96, 3, 2>>;
  using Of128 = ConfigList<Int4KiviSym<T, 128, 3, 2>, Int4KiviSymCtaSoftmax<T>>;
  using UpTo256 = ConfigList<Int4KiviSym<T, 192, 3, 2>, Int4KiviSym<T, 256, 3, 2>>;
  using UpTo512 = ConfigList<Int4KiviSym<T, 512, 3, 2>>;
};

}  // namespace rooftile::gpu
