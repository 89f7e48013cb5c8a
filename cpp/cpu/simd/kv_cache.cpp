// SPDX-License-Identifier: Apache-2.0
// Append: tokens of k, v [B, T, Hkv, D] -> pages, rings and codes.
//
// One task is one (batch entry, KV head): nobody else writes its tokens, and no value depends on another task.
// kivi formats copy every token into the row's ring, raw, and encode 32 of them from the ring when the last of a group
// arrives: every way of splitting tokens over calls goes through the same steps. The arithmetic of an encoding is part
// of the format: subtractions, divisions and roundings that no compiler may contract, so all instruction sets give
// equal bytes.
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

constexpr std::int64_t serial_below = 1 << 14;  // values: fewer are stored sooner than a second thread wakes up

template <class Scale>
constexpr float smallest_scale = std::is_same_v<Scale, BFloat16> ? 0x1p-133f : 0x1p-24f;  // subnormal
template <class Scale>
constexpr float largest_minimum = std::is_same_v<Scale, BFloat16> ? 0x1.fep+127f : 65504.0f;

// ---- sixteen groups, one a lane ----

// What a pass over their values finds.
template <KvFormat f>
struct Range {
  F32 low, high;  // symmetric formats: high is the largest magnitude
  I32 broken;     // holds a NaN or an infinity

  static __attribute__((always_inline)) Range empty() {
    constexpr float inf = std::numeric_limits<float>::infinity();
    return {splat(inf), has_min(f) ? splat(-inf) : F32{}, I32{}};
  }

  __attribute__((always_inline)) void add(F32 x) {
    broken |= ((I32)x & 0x7f800000) == 0x7f800000;
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
    std::int32_t lane[lanes], any = 0;
    store_raw(lane, broken);
    for (int i = 0; i < lanes; ++i) any |= lane[i];
    broken = I32{} + any;
  }
};

// Scales and minima as a reader sees them, and the codes they give.
template <KvFormat f>
struct Grid {
  static constexpr float top = has_min(f) ? 15.0f : static_cast<float>(qmax(f));
  static constexpr float bottom = has_min(f) ? 0.0f : -top;
  F32 scale, minimum;

  // Stores the first n scales and minima.
  template <class Scale>
  static __attribute__((always_inline)) Grid make(const Range<f>& r, Scale* scales, Scale* minima, int n) {
    const F32 nan = splat(std::numeric_limits<float>::quiet_NaN());
    const F32 width = has_min(f) ? r.high - r.low : r.high;
    constexpr float largest = largest_scale(std::is_same_v<Scale, BFloat16> ? DType::bf16 : DType::f16, has_min(f));
    F32 scale = clamp(width / top, smallest_scale<Scale>, largest);
    scale = width > 0.0f ? scale : F32{};
    Grid g{stored(r.broken ? nan : scale, scales, n), F32{}};
    if constexpr (has_min(f)) {  // + 0: a group of zeros of both signs has minimum +0
      const F32 minimum = clamp(r.low + 0.0f, -largest_minimum<Scale>, largest_minimum<Scale>);
      g.minimum = stored(r.broken ? nan : minimum, minima, n);
    }
    return g;
  }

  // Codes of one value of each group; 0 where the scale is 0 or NaN.
  __attribute__((always_inline)) I32 codes(F32 x) const {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest even integer
    if constexpr (has_min(f)) x -= minimum;
    const F32 steps = clamp(x / scale, bottom, top);
    if constexpr (f == KvFormat::fp8) return e4m3_codes(steps) & (scale > 0.0f);
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
    store_raw(block + index, __builtin_convertvector(codes, I8));
  } else {
    const U8 bytes = __builtin_convertvector(codes & 15, U8);
    const U16x8 pairs = load_raw<U16x8>(&bytes);  // the even code in the low byte
    store_raw(block + index / 2, __builtin_convertvector((pairs | (pairs >> 4)) & 0xff, U8x8));
  }
}

// One token's codes, padded to a multiple of 32, one a byte.
template <KvFormat f>
void put_v_codes(std::uint8_t* block, int page_size, int head_dim, int slot, const std::uint8_t* codes) {
  for (int d = 0; d < padded_head_dim(head_dim); d += 32) {  // v_code_index: d, d + 8, d + 16, d + 24 lie together
    const std::int64_t first = v_code_index(f, page_size, head_dim, slot, d);
    const std::int64_t step = v_code_index(f, page_size, head_dim, slot, d + 1) - first;
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
      const std::int64_t slot = position % c_.ring_size * d;
      copy_token(reinterpret_cast<std::byte*>(ring_k_ + slot), k, k_stride, d);
      copy_token(reinterpret_cast<std::byte*>(ring_v_ + slot), v, v_stride, d);
      if (position % kv_group == kv_group - 1) close_group(position + 1 - kv_group);
    } else if constexpr (is_element_format(f)) {
      const std::int64_t page = kv_page(c_, row_, position), slot = position % c_.page_size;
      copy_token(section(c_.k, c_.k.codes, page) + slot * c_.k.token_stride, k, k_stride, d);
      copy_token(section(c_.v, c_.v.codes, page) + slot * c_.v.token_stride, v, v_stride, d);
    } else {
      const std::int64_t page = kv_page(c_, row_, position);
      const int slot = static_cast<int>(position % c_.page_size);
      copy_token(reinterpret_cast<std::byte*>(token_.data()), k, k_stride, d);
      encode_token(c_.k, page, slot, token_.data());
      for (int i = 0; i < padded_head_dim(d); i += lanes)
        put_k_codes<f>(codes_at(c_.k, page), k_code_index(d, slot, i),
                       __builtin_convertvector(load_raw<I8>(codes_.data() + i), I32));
      copy_token(reinterpret_cast<std::byte*>(token_.data()), v, v_stride, d);
      store_v_token(page, slot, token_.data());
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

  // One token as one group: codes into codes_, scale and minimum into the block.
  void encode_token(const KvCacheView::Plane& plane, std::int64_t page, int slot, const T* x) {
    const int n = c_.head_dim;
    const float fill = to_float(x[0]);  // changes no range
    auto range = Range<f>::empty();
    for (int i = 0; i < n; i += lanes) range.add(load_some(x + i, n - i, fill));
    range.join();
    Scale* minima = scales_at(plane, plane.min, page);
    const auto grid =
        Grid<f>::make(range, scales_at(plane, plane.scale, page) + slot, has_min(f) ? minima + slot : nullptr, 1);
    // stored() rounds all lanes alike, so every lane of the grid is this group's
    for (int i = 0; i < n; i += lanes)
      store_raw(codes_.data() + i, __builtin_convertvector(grid.codes(load_some(x + i, n - i, fill)), I8));
    std::memset(codes_.data() + n, 0, codes_.size() - static_cast<std::size_t>(n));
  }

  void store_v_token(std::int64_t page, int slot, const T* x) {
    encode_token(c_.v, page, slot, x);
    put_v_codes<f>(codes_at(c_.v, page), c_.page_size, c_.head_dim, slot, codes_.data());
  }

  // The 32 tokens from `first` on become codes. They are neighbours in the ring: it holds two groups.
  void close_group(std::int64_t first) {
    const int d = c_.head_dim, padded = padded_head_dim(d), slot = static_cast<int>(first % c_.page_size);
    const std::int64_t page = kv_page(c_, row_, first), ring = first % c_.ring_size * d;
    Scale* scales = scales_at(c_.k, c_.k.scale, page) + std::int64_t{slot / kv_group} * padded;
    Scale* minima = has_min(f) ? scales_at(c_.k, c_.k.min, page) + std::int64_t{slot / kv_group} * padded : nullptr;
    for (int i = 0; i < padded; i += lanes) {  // channels past head_dim are groups of zeros
      F32 x[kv_group];
      auto range = Range<f>::empty();
      for (int t = 0; t < kv_group; ++t) {
        x[t] = i < d ? load_some(ring_k_ + ring + std::int64_t{t} * d + i, d - i) : F32{};
        range.add(x[t]);
      }
      const auto grid = Grid<f>::make(range, scales + i, has_min(f) ? minima + i : nullptr, lanes);
      for (int t = 0; t < kv_group; ++t)
        put_k_codes<f>(codes_at(c_.k, page), k_code_index(d, slot + t, i), grid.codes(x[t]));
    }
    for (int t = 0; t < kv_group; ++t) store_v_token(page, slot + t, ring_v_ + ring + std::int64_t{t} * d);
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
  switch (c.format) {
    case KvFormat::fp32:
      return append_as<KvFormat::fp32>(p, c, k, v, rows, counts);
    case KvFormat::fp16:
      return append_as<KvFormat::fp16>(p, c, k, v, rows, counts);
    case KvFormat::bf16:
      return append_as<KvFormat::bf16>(p, c, k, v, rows, counts);
    case KvFormat::int8:
      return append_as<KvFormat::int8>(p, c, k, v, rows, counts);
    case KvFormat::int4:
      return append_as<KvFormat::int4>(p, c, k, v, rows, counts);
    case KvFormat::int4_kivi_sym:
      return append_as<KvFormat::int4_kivi_sym>(p, c, k, v, rows, counts);
    case KvFormat::int4_kivi:
      return append_as<KvFormat::int4_kivi>(p, c, k, v, rows, counts);
    case KvFormat::fp8:
      return append_as<KvFormat::fp8>(p, c, k, v, rows, counts);
  }
}

}  // namespace rooftile::cpu::ROOFTILE_ISA
