// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

// Decoding waits for itself: a third block a multiprocessor hides more of that, but takes shorter rings and fewer
// registers, and few leaves do not come out even over half as many blocks more.
inline constexpr int many_leaves = 2048;

struct Fp16KiviD64 : DecodeConfig<tile::half, KvFormat::int4_kivi, 64, 4, 3> {};
struct Fp16KiviD128 : DecodeConfig<tile::half, KvFormat::int4_kivi, 128, 3, 2> {};
struct Fp16KiviD128Many : DecodeConfig<tile::half, KvFormat::int4_kivi, 128, 2, 3, many_leaves> {};
struct Bf16KiviD64 : DecodeConfig<tile::bf16, KvFormat::int4_kivi, 64, 4, 3> {};
struct Bf16KiviD128 : DecodeConfig<tile::bf16, KvFormat::int4_kivi, 128, 3, 2> {};
struct Bf16KiviD128Many : DecodeConfig<tile::bf16, KvFormat::int4_kivi, 128, 2, 3, many_leaves> {};

std::span<const DecodeVariant> int4_kivi_variants() {
  return decode_variants<Fp16KiviD64, Fp16KiviD128, Fp16KiviD128Many, Bf16KiviD64, Bf16KiviD128, Bf16KiviD128Many>();
}

}  // namespace rooftile::gpu
