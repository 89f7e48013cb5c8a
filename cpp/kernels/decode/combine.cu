// SPDX-License-Identifier: Apache-2.0
#include "kernels/decode/combine.h"

#include "kernels/decode/combine.cuh"
#include "kernels/launch.h"
#include "kernels/warmup.h"

namespace rooftile::gpu {
namespace {

using Kernel = void (*)(DecodeParams);

template <class T, bool many_tiles>
Kernel kernel_of(int head_dim) {
  switch (head_dim) {
    case 64:
      return combine<T, 64, many_tiles>;
    case 96:
      return combine<T, 96, many_tiles>;
    case 128:
      return combine<T, 128, many_tiles>;
    case 192:
      return combine<T, 192, many_tiles>;
    case 256:
      return combine<T, 256, many_tiles>;
    case 512:
      return combine<T, 512, many_tiles>;
  }
  fail(ErrorKind::not_supported, "decode_attention: combine is not compiled for head_dim ", head_dim);
}
template <bool many_tiles>
Kernel kernel_of(const CombineKey& key) {
  return key.dtype == DType::bf16 ? kernel_of<tile::bf16, many_tiles>(key.head_dim)
                                  : kernel_of<tile::half, many_tiles>(key.head_dim);
}

}  // namespace

void launch_combine(const DeviceScope& scope, const CombineKey& key, const DecodeParams& p) {
  const std::int64_t tiles = std::int64_t{p.batch} * p.tiles_per_entry;
  // split_kv has p.ctas CTAs, so p.ctas - 1 work tiles at most are shared and have partials. With fewer than 1.5 times
  // as many tiles the rows of a tile would wait for each other; with few rows in all, a CTA for each costs nothing.
  const bool many_tiles = 2 * tiles > std::int64_t{3} * p.ctas && tiles * p.rows_used > std::int64_t{8} * scope.sms();
  scope.launch(many_tiles ? kernel_of<true>(key) : kernel_of<false>(key), {tiles, many_tiles ? 1 : p.rows_used},
               key.head_dim, 0, p, Overlap::with_previous);
}
void load_combine(const char* op, const CombineKey& key) {
  load_kernel(op, kernel_of<false>(key));
  load_kernel(op, kernel_of<true>(key));
}

}  // namespace rooftile::gpu
