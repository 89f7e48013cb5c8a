// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

// Queries and K's scales take shared memory too: 3 levels of the reduction stay there with 128 channels, none with 512.
template <class T, int D, int Stages, int CtasPerSm>
struct Int8KiviSym : DecodeConfig<T, KvFormat::int8_kivi_sym, D, Stages, CtasPerSm> {
  static constexpr int smem_levels = D == 512 ? 0 : D == 128 ? 3 : D > 128 ? 1 : 4;
};
template <class T>
struct Int8KiviSymCtaSoftmax : CtaSoftmaxConfig<T, KvFormat::int8_kivi_sym> {};

template <class T>
struct DecodeConfigs<KvFormat::int8_kivi_sym, T> {
  using UpTo96 = ConfigList<Int8KiviSym<T, 64, 3, 2>, Int8KiviSym<T, 96, 2, 2>>;
  using Of128 = ConfigList<Int8KiviSym<T, 128, 2, 2>, Int8KiviSymCtaSoftmax<T>>;
  using UpTo256 = ConfigList<Int8KiviSym<T, 192, 2, 2>, Int8KiviSym<T, 256, 2, 2>>;
  using UpTo512 = ConfigList<Int8KiviSym<T, 512, 2, 2>>;
};

}  // namespace rooftile::gpu
