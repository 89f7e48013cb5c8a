// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/combine.h"

#include <algorithm>

#include "kernels/decode/combine.cuh"
#include "kernels/launch.h"
#include "kernels/warmup.h"

namespace rooftile::gpu {
namespace {

using Kernel = void (*)(DecodeParams);

template <class T>
Kernel kernel_of(int head_dim) {
  switch (head_dim) {
    case 64:
      return combine<T, 64>;
    case 96:
      return combine<T, 96>;
    case 128:
      return combine<T, 128>;
    case 192:
      return combine<T, 192>;
    case 256:
      return combine<T, 256>;
    case 512:
      return combine<T, 512>;
  }
  fail(ErrorKind::not_supported, "decode_attention: combine is not compiled for head_dim ", head_dim);
}
Kernel kernel_of(const CombineKey& key) {
  return key.dtype == DType::bf16 ? kernel_of<tile::bf16>(key.head_dim) : kernel_of<tile::half>(key.head_dim);
}

}  // namespace

void launch_combine(const DeviceScope& scope, const CombineKey& key, const DecodeParams& p) {
  // Few work tiles: a CTA for each packed row. Many: one for a tile, most of which have no partials. An SM holds four.
  const std::int64_t tiles = std::int64_t{p.batch} * p.tiles_per_entry;
  if (tiles == 0) return;
  const std::int64_t ctas_per_tile = std::clamp<std::int64_t>(4 * scope.sms() / tiles, 1, p.rows_used);
  scope.launch(kernel_of(key), {tiles, ctas_per_tile}, key.head_dim, 0, p, Overlap::with_previous);
}
void load_combine(const char* op, const CombineKey& key) { load_kernel(op, kernel_of(key)); }

}  // namespace rooftile::gpu
