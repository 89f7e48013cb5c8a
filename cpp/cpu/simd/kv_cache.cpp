// SPDX-License-Identifier: Apache-2.0
// kv_append: stores tokens of k, v [B, T, Hkv, D] in pages, rings and codes.
//
// A task of the thread pool is one (batch entry, KV head); tasks write disjoint memory and do not depend on each other.
// kivi formats copy every token, raw, into the row's ring and encode a group of 32 tokens from the ring when the last
// token of the group is appended, so the bytes do not depend on how tokens are divided over calls. The arithmetic of
// the encoding is part of the format: subtractions, divisions and roundings that the compiler must not contract, so
// that all instruction sets produce equal bytes.
#include <cstring>
#include <limits>
#include <type_traits>
#include <vector>

#include "core/kv_layout.h"
#include "cpu/element.h"
#include "cpu/kernels.h"
#include "cpu/simd/isa.h"
#include "cpu/simd/kernels_isa.h"
#include "cpu/simd/vec.h"

namespace rooftile::cpu::ROOFTILE_ISA {
namespace {

typedef std::uint8_t U8x8 __attribute__((vector_size(8)));
typedef std::uint16_t U16x8 __attribute__((vector_size(16)));

constexpr std::int64_t serial_below = 1 << 14;  // values: storing fewer takes less time than waking a second thread

template <class Scale>
constexpr float smallest_scale = std::is_same_v<Scale, BFloat16> ? 0x1p-133f : 0x1p-24f;  // subnormal
template <class Scale>
constexpr float largest_minimum = std::is_same_v<Scale, BFloat16> ? 0x1.fep+127f : 65504.0f;

// ---- sixteen groups, one a lane ----

// Range of the values of sixteen groups.
template <KvFormat f>
struct Range {
  F32 low, high;  // symmetric formats: high is the largest magnitude
  I32 nonfinite;  // holds a NaN or an infinity

  static __attribute__((always_inline)) Range empty() {
    constexpr float inf = std::numeric_limits<float>::infinity();
    return {splat(inf), has_min(f) ? splat(-inf) : F32{}, I32{}};
  }

  __attribute__((always_inline)) void add(F32 x) {
    nonfinite |= ((I32)x & 0x7f800000) == 0x7f800000;
    if constexpr (has_min(f)) {
      low = x < low ? x : low;
      high = x > high ? x : high;
    } else {
      high = vmax(magnitude(x), high);
    }
  }

  // All sixteen lanes belong to one group.
  __attribute__((always_inline)) void join() {
    if constexpr (has_min(f)) low = splat(-max(-low));
    high = splat(max(high));
    std::int64_t pairs[lanes / 2], any = 0;
    store_raw(pairs, nonfinite);
    for (const std::int64_t pair : pairs) any |= pair;
    nonfinite = I32{} + (any ? -1 : 0);
  }
};

// Scales and minima of sixteen groups as a reader of the cache sees them, and the codes they yield.
template <KvFormat f>
struct Quantizer {
  static constexpr float top = static_cast<float>(max_code(f));
  static constexpr float bottom = has_min(f) ? 0.0f : -top;
  F32 scale, minimum;

  // Stores the first n scales and minima.
  template <class Scale>
  static __attribute__((always_inline)) Quantizer make(const Range<f>& r, Scale* scales, Scale* minima, int n) {
    const F32 nan = splat(std::numeric_limits<float>::quiet_NaN());
    const F32 width = has_min(f) ? r.high - r.low : r.high;
    constexpr float largest = largest_scale(std::is_same_v<Scale, BFloat16> ? DType::bf16 : DType::f16, has_min(f));
    F32 scale = clamp(width / top, smallest_scale<Scale>, largest);
    scale = width > 0.0f ? scale : F32{};
    Quantizer g{stored(r.nonfinite ? nan : scale, scales, n), F32{}};
    if constexpr (has_min(f)) {  // + 0 makes the minimum +0 in a group that holds zeros of both signs
      const F32 minimum = clamp(r.low + 0.0f, -largest_minimum<Scale>, largest_minimum<Scale>);
      g.minimum = stored(r.nonfinite ? nan : minimum, minima, n);
    }
    return g;
  }

  // Codes of one value of each group; 0 where the scale is 0 or NaN.
  __attribute__((always_inline)) I32 codes(F32 x) const {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest even integer
    if constexpr (has_min(f)) x -= minimum;
    const F32 steps = clamp(x / scale, bottom, top);
    if constexpr (is_e4m3(f)) return e4m3_codes(steps) & (scale > 0.0f);
    const F32 shifted = steps + magic;
    return ((I32)shifted - (I32)splat(magic)) & (scale > 0.0f);
  }

 private:
  template <class Scale>
  static __attribute__((always_inline)) F32 stored(F32 x, Scale* to, int n) {
    Scale rounded[lanes];
    store(rounded, x);
    std::memcpy(to, rounded, sizeof(Scale) * static_cast<std::size_t>(n));
    return load(rounded);
  }
};

// ---- codes into a block ----

template <KvFormat f>
ROOFTILE_INLINE void put_k_codes(std::uint8_t* block, std::int64_t index, I32 codes) {  // sixteen neighbours
  if constexpr (code_bits(f) == 8) {
    store_raw(block + index, lowest_bytes(codes));
  } else {
    const U8 bytes = (U8)lowest_bytes(codes & 15);
    const U16x8 pairs = load_raw<U16x8>(&bytes);  // the even code in the low byte
    store_raw(block + index / 2, __builtin_convertvector((pairs | (pairs >> 4)) & 0xff, U8x8));
  }
}

// One token's codes, padded to a multiple of 32, one a byte.
template <KvFormat f>
void put_v_codes(std::uint8_t* block, int page_size, int head_dim, int offset, const std::uint8_t* codes) {
  for (int d = 0; d < padded_head_dim(head_dim); d += 32) {  // v_code_index stores d, d + 8, d + 16, d + 24 together
    const std::int64_t first = v_code_index(f, page_size, head_dim, offset, d);
    const std::int64_t step = v_code_index(f, page_size, head_dim, offset, d + 1) - first;
    if constexpr (code_bits(f) == 8) {
      for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 4; ++j) block[first + i * step + j * 4] = codes[d + i + 8 * j];
    } else {
      const auto eight = [&](int j) { return __builtin_convertvector(load_raw<U8x8>(codes + d + 8 * j) & 15, U16x8); };
      const U16x8 words = eight(0) | (eight(1) << 4) | (eight(2) << 8) | (eight(3) << 12);
      for (int i = 0; i < 8; ++i)
        std::memcpy(block + (first + i * step) / 2, reinterpret_cast<const char*>(&words) + 2 * i, 2);
    }
  }
}

// ---- one row's one head ----

template <class T>
void copy_token(std::byte* to, const T* from, std::int64_t stride, int head_dim) {
  if (stride == 1) {
    std::memcpy(to, from, sizeof(T) * static_cast<std::size_t>(head_dim));
  } else {
    for (int d = 0; d < head_dim; ++d) std::memcpy(to + d * sizeof(T), from + d * stride, sizeof(T));
  }
}

template <KvFormat f, class T>
class Writer {
  using Scale = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16, Half>;

 public:
  Writer(const KvCacheView& c, std::int64_t row, std::int64_t head)
      : c_(c),
        row_(row),
        head_(head),
        token_(static_cast<std::size_t>(c.head_dim)),
        codes_(static_cast<std::size_t>(padded_head_dim(c.head_dim))) {
    const std::int64_t ring = (row * c.kv_heads + head) * c.ring_size * c.head_dim;
    if constexpr (is_kivi(f)) {
      ring_k_ = reinterpret_cast<T*>(c.ring_k) + ring;
      ring_v_ = reinterpret_cast<T*>(c.ring_v) + ring;
    }
  }

  void append(std::int64_t position, const T* k, std::int64_t k_stride, const T* v, std::int64_t v_stride) {
    const int d = c_.head_dim;
    if constexpr (is_kivi(f)) {
      const std::int64_t offset = position % c_.ring_size * d;
      copy_token(reinterpret_cast<std::byte*>(ring_k_ + offset), k, k_stride, d);
      copy_token(reinterpret_cast<std::byte*>(ring_v_ + offset), v, v_stride, d);
      if (position % kv_group == kv_group - 1) close_group(position + 1 - kv_group);
    } else if constexpr (is_element_format(f)) {
      const std::int64_t page = kv_page(c_, row_, position), offset = position % c_.page_size;
      copy_token(section(c_.k, c_.k.codes, page) + offset * c_.k.token_stride, k, k_stride, d);
      copy_token(section(c_.v, c_.v.codes, page) + offset * c_.v.token_stride, v, v_stride, d);
    } else {
      const std::int64_t page = kv_page(c_, row_, position);
      const int offset = static_cast<int>(position % c_.page_size);
      copy_token(reinterpret_cast<std::byte*>(token_.data()), k, k_stride, d);
      encode_token(c_.k, page, offset, token_.data());
      for (int i = 0; i < padded_head_dim(d); i += lanes)
        put_k_codes<f>(codes_at(c_.k, page), k_code_index(d, offset, i), widen(load_raw<I8>(codes_.data() + i)));
      copy_token(reinterpret_cast<std::byte*>(token_.data()), v, v_stride, d);
      store_v_token(page, offset, token_.data());
    }
  }

 private:
  std::byte* section(const KvCacheView::Plane& plane, std::byte* base, std::int64_t page) const {
    return base + page * plane.page_stride + head_ * plane.head_stride;
  }
  std::uint8_t* codes_at(const KvCacheView::Plane& plane, std::int64_t page) const {
    return reinterpret_cast<std::uint8_t*>(section(plane, plane.codes, page));
  }
  Scale* scales_at(const KvCacheView::Plane& plane, std::byte* base, std::int64_t page) const {
    return base ? reinterpret_cast<Scale*>(section(plane, base, page)) : nullptr;
  }

  // Encodes one token as one group: codes into codes_, scale and minimum into the page.
  void encode_token(const KvCacheView::Plane& plane, std::int64_t page, int offset, const T* x) {
    const int n = c_.head_dim;
    const float fill = to_float(x[0]);  // changes no range
    auto range = Range<f>::empty();
    for (int i = 0; i < n; i += lanes) range.add(load_some(x + i, n - i, fill));
    range.join();
    Scale* minima = scales_at(plane, plane.min, page);
    const auto quantizer = Quantizer<f>::make(range, scales_at(plane, plane.scale, page) + offset,
                                              has_min(f) ? minima + offset : nullptr, 1);
    // stored() rounds all lanes alike, so every lane of the quantizer holds this group's values
    for (int i = 0; i < n; i += lanes)
      store_raw(codes_.data() + i, lowest_bytes(quantizer.codes(load_some(x + i, n - i, fill))));
    std::memset(codes_.data() + n, 0, codes_.size() - static_cast<std::size_t>(n));
  }

  void store_v_token(std::int64_t page, int offset, const T* x) {
    encode_token(c_.v, page, offset, x);
    put_v_codes<f>(codes_at(c_.v, page), c_.page_size, c_.head_dim, offset, codes_.data());
  }

  // Encodes the 32 tokens from `first` on. They are contiguous in the ring, which holds two groups.
  void close_group(std::int64_t first) {
    const int d = c_.head_dim, padded = padded_head_dim(d), offset = static_cast<int>(first % c_.page_size);
    const std::int64_t page = kv_page(c_, row_, first), ring = first % c_.ring_size * d;
    Scale* scales = scales_at(c_.k, c_.k.scale, page) + std::int64_t{offset / kv_group} * padded;
    Scale* minima = has_min(f) ? scales_at(c_.k, c_.k.min, page) + std::int64_t{offset / kv_group} * padded : nullptr;
    for (int i = 0; i < padded; i += lanes) {  // channels past head_dim are groups of zeros
      F32 x[kv_group];
      auto range = Range<f>::empty();
      for (int t = 0; t < kv_group; ++t) {
        x[t] = i < d ? load_some(ring_k_ + ring + std::int64_t{t} * d + i, d - i) : F32{};
        range.add(x[t]);
      }
      const auto quantizer = Quantizer<f>::make(range, scales + i, has_min(f) ? minima + i : nullptr, lanes);
      for (int t = 0; t < kv_group; ++t)
        put_k_codes<f>(codes_at(c_.k, page), k_code_index(d, offset + t, i), quantizer.codes(x[t]));
    }
    for (int t = 0; t < kv_group; ++t) store_v_token(page, offset + t, ring_v_ + ring + std::int64_t{t} * d);
  }

  const KvCacheView& c_;
  std::int64_t row_, head_;
  T *ring_k_ = nullptr, *ring_v_ = nullptr;
  std::vector<T> token_;
  std::vector<std::uint8_t> codes_;
};

template <KvFormat f>
void append_as(const Parallel& parallel, const KvCacheView& c, const TensorView& k, const TensorView& v,
               const std::int32_t* rows, const std::int32_t* counts) {
  with_element(k.dtype, [&](auto element) {
    using T = decltype(element);
    parallel.run(k.shape[0] * c.kv_heads, [&](std::int64_t task, int) {
      const std::int64_t b = task / c.kv_heads, head = task % c.kv_heads, row = rows ? rows[b] : b;
      const auto token = [&](const TensorView& t, std::int64_t i) {
        return t.as<const T>() + b * t.stride[0] + i * t.stride[1] + head * t.stride[2];
      };
      Writer<f, T> writer(c, row, head);
      for (std::int64_t i = 0, n = counts ? counts[b] : k.shape[1]; i < n; ++i)
        writer.append(c.lengths[row] + i, token(k, i), k.last_stride(), token(v, i), v.last_stride());
    });
  });
}

}  // namespace

void kv_append(const Parallel& parallel, const KvCacheView& c, const TensorView& k, const TensorView& v,
               const std::int32_t* rows, const std::int32_t* counts) {
  const Parallel p = k.numel() < serial_below ? Parallel(1) : parallel;
  with_kv_format(c.format, [&](auto f) { append_as<f()>(p, c, k, v, rows, counts); });
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
