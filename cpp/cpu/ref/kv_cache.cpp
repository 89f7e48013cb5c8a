// SPDX-License-Identifier: Apache-2.0
// Reference append, one value at a time. The arithmetic of an encoding is part of the format: cpu/simd writes the same
// bytes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "core/kv_layout.h"
#include "cpu/element.h"
#include "cpu/ref/kernels_ref.h"

namespace rooftile::cpu::reference {
namespace {

// Writes x as entry `index` of an array of scales or minima, clamped to the dtype's finite range. Returns the value as
// it is stored, which is the one that codes are made with.
float put_scale(DType dtype, std::byte* base, std::int64_t index, float x) {
  const float largest = dtype == DType::bf16 ? 0x1.fep+127f : 65504.0f;
  const TensorView t{.data = base, .dtype = dtype};
  write(t, index, x > largest ? largest : x < -largest ? -largest : x);  // keeps NaN
  return read(t, index);
}
float smallest_scale(DType dtype) { return dtype == DType::bf16 ? 0x1p-133f : 0x1p-24f; }  // subnormal

void put_code(KvFormat f, std::byte* base, std::int64_t index, int code) {
  if (code_bits(f) == 8) {
    base[index] = static_cast<std::byte>(code);
    return;
  }
  const int shift = static_cast<int>(index % 2) * 4;
  base[index / 2] =
      (base[index / 2] & static_cast<std::byte>(0xf0 >> shift)) | static_cast<std::byte>((code & 15) << shift);
}

// The code nearest to x, which is in units of the scale; ties to even.
int nearest_code(KvFormat f, float x) {
  return is_e4m3(f) ? from_float<E4M3>(x).bits : static_cast<int>(std::nearbyint(x));
}

// One KV head of one cache row, to write.
struct Target {
  const KvCacheView& c;
  std::int64_t row, head;

  std::byte* in_page(const KvCacheView::Plane& plane, std::byte* section, std::int64_t token) const {
    return section + kv_page(c, row, token) * plane.page_stride + head * plane.head_stride;
  }
  // The unquantised token [head_dim] in the ring.
  TensorView ring(std::byte* base, std::int64_t token) const {
    const std::int64_t offset = (row * c.kv_heads + head) * c.ring_size + token % c.ring_size;
    return {.data = base + offset * c.head_dim * static_cast<std::int64_t>(size_of(c.dtype)), .dtype = c.dtype};
  }

  // Encodes value(0) .. value(n - 1) as one quantisation group: scale (and minimum) `index` of the page that holds
  // `token`, and the codes at code_index(0) .. code_index(n - 1).
  template <class Value, class CodeIndex>
  void encode(const KvCacheView::Plane& plane, std::int64_t token, std::int64_t index, int n, const Value& value,
              const CodeIndex& code_index) const {
    float low = value(0), high = low, absmax = 0;
    bool finite = true;
    for (int i = 0; i < n; ++i) {
      const float x = value(i);
      finite = finite && std::isfinite(x);
      low = x < low ? x : low;
      high = x > high ? x : high;
      absmax = std::fabs(x) > absmax ? std::fabs(x) : absmax;
    }
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const bool affine = has_min(c.format);
    const DType stored = kv_scale_dtype(c.dtype);
    const float width = affine ? high - low : absmax;
    const float top = static_cast<float>(max_code(c.format)), bottom = affine ? 0 : -top;
    float scale = width / top;
    if (width > 0 && scale < smallest_scale(stored)) scale = smallest_scale(stored);
    scale = std::min(scale, largest_scale(stored, affine));
    scale = put_scale(stored, in_page(plane, plane.scale, token), index, finite ? scale : nan);
    float minimum = 0;
    if (affine)  // + 0: a group of zeros of both signs has minimum +0
      minimum = put_scale(stored, in_page(plane, plane.min, token), index, finite ? low + 0.0f : nan);
    std::byte* codes = in_page(plane, plane.codes, token);
    for (int i = 0; i < n; ++i) {
      const float ratio = (value(i) - minimum) / scale;
      const float clamped = ratio > top ? top : ratio < bottom ? bottom : ratio;
      put_code(c.format, codes, code_index(i), finite && scale > 0 ? nearest_code(c.format, clamped) : 0);
    }
  }

  // The codes of the padding channels, head_dim .. padded_head_dim, are 0.
  template <class CodeIndex>
  void pad_token(const KvCacheView::Plane& plane, std::int64_t token, const CodeIndex& code_index) const {
    for (int d = c.head_dim; d < padded_head_dim(c.head_dim); ++d)
      put_code(c.format, in_page(plane, plane.codes, token), code_index(d), 0);
  }

  template <class Value>
  void encode_k_token(std::int64_t token, const Value& value) const {
    const int offset = static_cast<int>(token % c.page_size);
    const auto index = [&](int d) { return k_code_index(c.head_dim, offset, d); };
    encode(c.k, token, offset, c.head_dim, value, index);
    pad_token(c.k, token, index);
  }
  template <class Value>
  void encode_v_token(std::int64_t token, const Value& value) const {
    const int offset = static_cast<int>(token % c.page_size);
    const auto index = [&](int d) { return v_code_index(c.format, c.page_size, c.head_dim, offset, d); };
    encode(c.v, token, offset, c.head_dim, value, index);
    pad_token(c.v, token, index);
  }

  // kivi: encodes a group of tokens, [first, first + kv_group), from the ring; K per channel, V per token.
  void close_group(std::int64_t first) const {
    const int offset = static_cast<int>(first % c.page_size), padded = padded_head_dim(c.head_dim);
    for (int d = 0; d < padded; ++d)  // channels past head_dim are groups of zeros
      encode(
          c.k, first, std::int64_t{offset / kv_group} * padded + d, kv_group,
          [&](int i) { return d < c.head_dim ? read(ring(c.ring_k, first + i), d) : 0.0f; },
          [&](int i) { return k_code_index(c.head_dim, offset + i, d); });
    for (std::int64_t token = first; token < first + kv_group; ++token)
      encode_v_token(token, [&](int d) { return read(ring(c.ring_v, token), d); });
  }

  void append(std::int64_t token, const TensorView& k, std::int64_t k_at, const TensorView& v,
              std::int64_t v_at) const {
    const auto value_k = [&](int d) { return read(k, k_at + d * k.last_stride()); };
    const auto value_v = [&](int d) { return read(v, v_at + d * v.last_stride()); };
    if (is_kivi(c.format)) {
      for (int d = 0; d < c.head_dim; ++d) {
        write(ring(c.ring_k, token), d, value_k(d));
        write(ring(c.ring_v, token), d, value_v(d));
      }
      if (token % kv_group == kv_group - 1) close_group(token + 1 - kv_group);
    } else if (is_element_format(c.format)) {
      const auto element = [&](const KvCacheView::Plane& plane) {
        return TensorView{.data = in_page(plane, plane.codes, token) + token % c.page_size * plane.token_stride,
                          .dtype = c.dtype};
      };
      for (int d = 0; d < c.head_dim; ++d) {
        write(element(c.k), d, value_k(d));
        write(element(c.v), d, value_v(d));
      }
    } else {
      encode_k_token(token, value_k);
      encode_v_token(token, value_v);
    }
  }
};

}  // namespace

void kv_append(const Parallel& parallel, const KvCacheView& c, const TensorView& k, const TensorView& v,
               const std::int32_t* rows, const std::int32_t* counts) {
  parallel.run(k.shape[0] * c.kv_heads, [&](std::int64_t task, int) {
    const std::int64_t b = task / c.kv_heads, head = task % c.kv_heads;
    const Target target{c, rows ? rows[b] : b, head};
    const auto offset = [&](const TensorView& t, std::int64_t i) {
      return b * t.stride[0] + i * t.stride[1] + head * t.stride[2];
    };
    for (std::int64_t i = 0; i < (counts ? counts[b] : k.shape[1]); ++i)
      target.append(c.lengths[target.row] + i, k, offset(k, i), v, offset(v, i));
  });
}

}  // namespace rooftile::cpu::reference
