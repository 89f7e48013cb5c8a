// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class T, int D, int Stages, int CtasPerSm>
struct Bits16 : DecodeConfig<T, std::is_same_v<T, tile::half> ? KvFormat::fp16 : KvFormat::bf16, D, Stages, CtasPerSm> {
};
template <class T>
struct Bits16Steps : StepConfig<T, std::is_same_v<T, tile::half> ? KvFormat::fp16 : KvFormat::bf16> {};

std::span<const DecodeVariant> bits16_variants() {
  return decode_variants<Bits16<tile::half, 64, 4, 2>, Bits16<tile::half, 96, 2, 2>, Bits16<tile::half, 128, 2, 2>,
                         Bits16<tile::half, 192, 2, 2>, Bits16<tile::half, 256, 2, 2>, Bits16<tile::half, 512, 2, 2>,
                         Bits16Steps<tile::half>, Bits16<tile::bf16, 64, 4, 2>, Bits16<tile::bf16, 96, 2, 2>,
                         Bits16<tile::bf16, 128, 2, 2>, Bits16<tile::bf16, 192, 2, 2>, Bits16<tile::bf16, 256, 2, 2>,
                         Bits16<tile::bf16, 512, 2, 2>, Bits16Steps<tile::bf16>>();
}

}  // namespace rooftile::gpu
