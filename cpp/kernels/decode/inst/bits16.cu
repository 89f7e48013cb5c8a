// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class Element, KvFormat F, int D>
struct Bits16 {
  using T = Element;
  static constexpr KvFormat format = F;
  static constexpr int head_dim = D, stages = D == 128 ? 2 : 4, blocks_per_sm = 2;
};
struct Fp16D64 : Bits16<tile::half, KvFormat::fp16, 64> {};
struct Fp16D128 : Bits16<tile::half, KvFormat::fp16, 128> {};
struct Bf16D64 : Bits16<tile::bf16, KvFormat::bf16, 64> {};
struct Bf16D128 : Bits16<tile::bf16, KvFormat::bf16, 128> {};

std::span<const DecodeVariant> bits16_variants() {
  static constexpr DecodeVariant table[] = {decode_variant<Fp16D64>(), decode_variant<Fp16D128>(), decode_variant<Bf16D64>(),
                                            decode_variant<Bf16D128>()};
  return table;
}

}  // namespace rooftile::gpu
