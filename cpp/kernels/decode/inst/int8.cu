// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class Element, int D>
struct Int8 {
  using T = Element;
  static constexpr KvFormat format = KvFormat::int8;
  static constexpr int head_dim = D, stages = D == 128 ? 2 : 3, blocks_per_sm = 2;
};
struct Fp16Int8D64 : Int8<tile::half, 64> {};
struct Fp16Int8D128 : Int8<tile::half, 128> {};
struct Bf16Int8D64 : Int8<tile::bf16, 64> {};
struct Bf16Int8D128 : Int8<tile::bf16, 128> {};

std::span<const DecodeVariant> int8_variants() {
  static constexpr DecodeVariant table[] = {decode_variant<Fp16Int8D64>(), decode_variant<Fp16Int8D128>(),
                                            decode_variant<Bf16Int8D64>(), decode_variant<Bf16Int8D128>()};
  return table;
}

}  // namespace rooftile::gpu
