// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

// Queries and K's scales take shared memory too. 128 channels: 3 levels of the reduction stay there, too few for the
// partials of a cluster. 512 channels: none.
template <class T, int D, int Stages, int CtasPerSm>
struct Int8KiviSym : DecodeConfig<T, KvFormat::int8_kivi_sym, D, Stages, CtasPerSm> {
  static constexpr int smem_levels = D == 512 ? 0 : D == 128 ? 3 : D > 128 ? 1 : 4;
  static constexpr bool clusters = smem_levels >= cluster_partials;
};
template <class T>
struct Int8KiviSymSteps : StepConfig<T, KvFormat::int8_kivi_sym> {};

template <>
struct DecodeConfigs<KvFormat::int8_kivi_sym>
    : ConfigList<Int8KiviSym<tile::half, 64, 3, 2>, Int8KiviSym<tile::half, 96, 2, 2>,
                 Int8KiviSym<tile::half, 128, 2, 2>, Int8KiviSym<tile::half, 192, 2, 2>,
                 Int8KiviSym<tile::half, 256, 2, 2>, Int8KiviSym<tile::half, 512, 2, 2>, Int8KiviSymSteps<tile::half>,
                 Int8KiviSym<tile::bf16, 64, 3, 2>, Int8KiviSym<tile::bf16, 96, 2, 2>,
                 Int8KiviSym<tile::bf16, 128, 2, 2>, Int8KiviSym<tile::bf16, 192, 2, 2>,
                 Int8KiviSym<tile::bf16, 256, 2, 2>, Int8KiviSym<tile::bf16, 512, 2, 2>, Int8KiviSymSteps<tile::bf16>> {
};
template std::span<const DecodeVariant> decode_variants<KvFormat::int8_kivi_sym>();

}  // namespace rooftile::gpu
