// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

struct Fp16KiviD64 : DecodeConfig<tile::half, KvFormat::int4_kivi, 64, 4, 3> {};
struct Fp16KiviD128 : DecodeConfig<tile::half, KvFormat::int4_kivi, 128, 3, 2> {};
struct Bf16KiviD64 : DecodeConfig<tile::bf16, KvFormat::int4_kivi, 64, 4, 3> {};
struct Bf16KiviD128 : DecodeConfig<tile::bf16, KvFormat::int4_kivi, 128, 3, 2> {};

std::span<const DecodeVariant> int4_kivi_variants() {
  return decode_variants<Fp16KiviD64, Fp16KiviD128, Bf16KiviD64, Bf16KiviD128>();
}

}  // namespace rooftile::gpu
