// SPDX-License-Identifier: Apache-2.0
#include "cpu/kv_read.h"

#include <cstddef>
#include <cstdint>
#include <utility>

#include "core/kv_layout.h"
#include "cpu/element.h"

namespace rooftile::cpu {
namespace {

// Reads single stored values of one head of a row.
struct Reader {
  const KvCacheView& c;
  std::int64_t row, head;
  KvSide side;

  const KvCacheView::Plane& plane() const { return side == KvSide::k ? c.k : c.v; }
  const std::byte* section(const std::byte* base, std::int64_t token) const {
    return base + kv_page(c, row, token) * plane().page_stride + head * plane().head_stride;
  }
  int code(std::int64_t token, int d) const {
    const int offset = static_cast<int>(token % c.page_size);
    const std::int64_t index = side == KvSide::k ? k_code_index(c.head_dim, offset, d)
                                                 : v_code_index(c.format, c.page_size, c.head_dim, offset, d);
    const std::byte* codes = section(plane().codes, token);
    if (code_bits(c.format) == 8) return static_cast<std::int8_t>(codes[index]);
    const int nibble = (static_cast<int>(codes[index / 2]) >> (index % 2 * 4)) & 15;
    return has_min(c.format) || nibble < 8 ? nibble : nibble - 16;
  }
  float scale(std::int64_t token, int d, bool minima) const {
    const std::int64_t offset = token % c.page_size;
    const bool per_channel = side == KvSide::k && is_kivi(c.format);
    const std::int64_t index = per_channel ? offset / kv_group * padded_head_dim(c.head_dim) + d : offset;
    const std::byte* base = section(minima ? plane().min : plane().scale, token);
    return read({.data = const_cast<std::byte*>(base), .dtype = kv_scale_dtype(c.dtype)}, index);
  }
  float decoded(std::int64_t token, int d) const {  // two roundings: the product, then the sum
    const float product = code_value(c.format, code(token, d)) * scale(token, d, false);
    return has_min(c.format) ? product + scale(token, d, true) : product;
  }
  float raw(std::int64_t token, int d) const {
    if (is_element_format(c.format)) {
      const std::byte* base = section(plane().codes, token) + token % c.page_size * plane().token_stride;
      return read({.data = const_cast<std::byte*>(base), .dtype = c.dtype}, d);
    }
    const std::int64_t offset = (row * c.kv_heads + head) * c.ring_size + token % c.ring_size;
    return read({.data = side == KvSide::k ? c.ring_k : c.ring_v, .dtype = c.dtype}, offset * c.head_dim + d);
  }
};

}  // namespace

void kv_dequantize(const Parallel& parallel, const KvCacheView& c, std::int64_t row, std::int64_t coded,
                   const TensorView& out_k, const TensorView& out_v) {
  const std::int64_t tokens = out_k.shape[0];
  parallel.run(std::int64_t{c.kv_heads} * 2, [&](std::int64_t task, int) {
    const Reader reader{c, row, task / 2, task % 2 ? KvSide::v : KvSide::k};
    const TensorView& out = task % 2 ? out_v : out_k;
    for (std::int64_t token = 0; token < tokens; ++token) {
      float* to = out.as<float>() + token * out.stride[0] + reader.head * out.stride[1];
      for (int d = 0; d < c.head_dim; ++d)
        to[d * out.stride[2]] = token < coded ? reader.decoded(token, d) : reader.raw(token, d);
    }
  });
}

void kv_dump_codes(const KvCacheView& c, std::int64_t row, const TensorView& out_k, const TensorView& out_v) {
  for (const auto& [side, out] : {std::pair{KvSide::k, &out_k}, {KvSide::v, &out_v}})
    for (std::int64_t head = 0; head < c.kv_heads; ++head)
      for (std::int64_t token = 0; token < out->shape[0]; ++token)
        for (int d = 0; d < c.head_dim; ++d)
          out->as<std::int8_t>()[token * out->stride[0] + head * out->stride[1] + d * out->stride[2]] =
              static_cast<std::int8_t>(Reader{c, row, head, side}.code(token, d));
}

void kv_dump_scales(const KvCacheView& c, std::int64_t row, KvSide side, bool minima, const TensorView& out) {
  const std::int64_t step = side == KvSide::k && is_kivi(c.format) ? kv_group : 1;  // tokens of a group
  for (std::int64_t i = 0; i < out.shape[0]; ++i)
    for (std::int64_t head = 0; head < c.kv_heads; ++head)
      for (int d = 0; d < out.shape[2]; ++d)
        out.as<float>()[i * out.stride[0] + head * out.stride[1] + d * out.stride[2]] =
            Reader{c, row, head, side}.scale(i * step, d, minima);
}

}  // namespace rooftile::cpu
