// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Int4KiviSym : DecodeConfig<T, KvFormat::int4_kivi_sym, D, Stages, CtasPerSm> {};
template <class T>
struct Int4KiviSymSteps : StepConfig<T, KvFormat::int4_kivi_sym> {};

template <>
struct DecodeConfigs<KvFormat::int4_kivi_sym>
    : ConfigList<Int4KiviSym<tile::half, 64, 4, 2>, Int4KiviSym<tile::half, 96, 3, 2>,
                 Int4KiviSym<tile::half, 128, 3, 2>, Int4KiviSym<tile::half, 192, 3, 2>,
                 Int4KiviSym<tile::half, 256, 3, 2>, Int4KiviSym<tile::half, 512, 3, 2>, Int4KiviSymSteps<tile::half>,
                 Int4KiviSym<tile::bf16, 64, 4, 2>, Int4KiviSym<tile::bf16, 96, 3, 2>,
                 Int4KiviSym<tile::bf16, 128, 3, 2>, Int4KiviSym<tile::bf16, 192, 3, 2>,
                 Int4KiviSym<tile::bf16, 256, 3, 2>, Int4KiviSym<tile::bf16, 512, 3, 2>, Int4KiviSymSteps<tile::bf16>> {
};
template std::span<const DecodeVariant> decode_variants<KvFormat::int4_kivi_sym>();

}  // namespace rooftile::gpu
