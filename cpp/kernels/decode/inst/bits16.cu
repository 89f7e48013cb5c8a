// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/launch.cuh"

namespace rooftile::gpu {

struct Fp16D64 : DecodeConfig<tile::half, KvFormat::fp16, 64, 4, 2> {};
struct Fp16D128 : DecodeConfig<tile::half, KvFormat::fp16, 128, 2, 2> {};
struct Bf16D64 : DecodeConfig<tile::bf16, KvFormat::bf16, 64, 4, 2> {};
struct Bf16D128 : DecodeConfig<tile::bf16, KvFormat::bf16, 128, 2, 2> {};

std::span<const DecodeVariant> bits16_variants() { return decode_variants<Fp16D64, Fp16D128, Bf16D64, Bf16D128>(); }

}  // namespace rooftile::gpu
