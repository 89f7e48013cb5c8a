// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

template <class Element, int D>
struct Kivi {
  using T = Element;
  static constexpr KvFormat format = KvFormat::int4_kivi;
  static constexpr int head_dim = D, stages = D == 128 ? 3 : 4, blocks_per_sm = D == 128 ? 2 : 3;
};
struct Fp16KiviD64 : Kivi<tile::half, 64> {};
struct Fp16KiviD128 : Kivi<tile::half, 128> {};
struct Bf16KiviD64 : Kivi<tile::bf16, 64> {};
struct Bf16KiviD128 : Kivi<tile::bf16, 128> {};

std::span<const DecodeVariant> int4_kivi_variants() {
  static constexpr DecodeVariant table[] = {decode_variant<Fp16KiviD64>(), decode_variant<Fp16KiviD128>(),
                                            decode_variant<Bf16KiviD64>(), decode_variant<Bf16KiviD128>()};
  return table;
}

}  // namespace rooftile::gpu
