// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

struct Fp16Int8D64 : DecodeConfig<tile::half, KvFormat::int8, 64, 3, 2> {};
struct Fp16Int8D128 : DecodeConfig<tile::half, KvFormat::int8, 128, 2, 2> {};
struct Bf16Int8D64 : DecodeConfig<tile::bf16, KvFormat::int8, 64, 3, 2> {};
struct Bf16Int8D128 : DecodeConfig<tile::bf16, KvFormat::int8, 128, 2, 2> {};

std::span<const DecodeVariant> int8_variants() { return decode_variants<Fp16Int8D64, Fp16Int8D128, Bf16Int8D64, Bf16Int8D128>(); }

}  // namespace rooftile::gpu
