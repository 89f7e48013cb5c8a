// SPDX-License-Identifier: Apache-2.0
// Reference attention: one query and one head at a time, in double precision, read from the cache one value at a time.
#include <cmath>
#include <limits>
#include <vector>

#include "core/kv_layout.h"
#include "cpu/element.h"
#include "cpu/ref/kernels_ref.h"

namespace rooftile::cpu::reference {
namespace {

constexpr double infinity = std::numeric_limits<double>::infinity();

// One KV head of one cache row.
struct CachedHead {
  const KvCacheView& c;
  std::int64_t row, head;
  std::int64_t code_end;  // tokens before it are read from the pages, later ones unquantised from the ring

  // Channel d of K or V of a token. Codes: fp32(code * scale), with a minimum fp32(fp32(code * scale) + min).
  float value(bool is_k, std::int64_t token, int d) const {
    if (token >= code_end) {
      const std::int64_t offset = (row * c.kv_heads + head) * c.ring_size + token % c.ring_size;
      return element(is_k ? c.ring_k : c.ring_v, offset * c.head_dim + d);
    }
    const KvCacheView::Plane& plane = is_k ? c.k : c.v;
    const std::int64_t base = kv_page(c, row, token) * plane.page_stride + head * plane.head_stride;
    const int offset = static_cast<int>(token % c.page_size);
    if (is_element_format(c.format)) return element(plane.codes + base + offset * plane.token_stride, d);
    const int scale_index = is_k && is_kivi(c.format) ? offset / kv_group * padded_head_dim(c.head_dim) + d : offset;
    const float product =
        code_value(c.format, code(is_k, plane.codes + base, offset, d)) * sixteen_bit(plane.scale + base, scale_index);
    return plane.min ? product + sixteen_bit(plane.min + base, scale_index) : product;
  }

 private:
  float element(const std::byte* p, std::int64_t i) const {
    TensorView t;
    t.data = const_cast<std::byte*>(p);
    t.dtype = c.dtype;
    return read(t, i);
  }
  float sixteen_bit(const std::byte* p, std::int64_t i) const {
    TensorView t;
    t.data = const_cast<std::byte*>(p);
    t.dtype = kv_scale_dtype(c.dtype);
    return read(t, i);
  }
  int code(bool is_k, const std::byte* codes, int offset, int d) const {
    const std::int64_t i =
        is_k ? k_code_index(c.head_dim, offset, d) : v_code_index(c.format, c.page_size, c.head_dim, offset, d);
    if (code_bits(c.format) == 8) return static_cast<std::int8_t>(codes[i]);
    const int nibble = (static_cast<int>(codes[i / 2]) >> (i % 2 * 4)) & 15;
    return has_min(c.format) || nibble < 8 ? nibble : nibble - 16;
  }
};

// One query [D] of head `head`: softmax over the logits of keys first .. last (inclusive), then the weighted sum of
// their values. A query of padding (not `real`) has no keys and no attention sink.
template <class Key, class Value>
void attend(bool real, std::int64_t q_offset, const TensorView& q, const LogitParams& p, std::int64_t position,
            std::int64_t head, std::int64_t first, std::int64_t last, const Key& key, const Value& value,
            const TensorView& out, std::int64_t out_offset, const TensorView& lse, std::int64_t lse_offset) {
  const int dim = static_cast<int>(q.last());
  const double sink = p.sinks && real ? read(*p.sinks, head * p.sinks->stride[0]) : -infinity;
  const double slope = p.alibi_slopes ? read(*p.alibi_slopes, head * p.alibi_slopes->stride[0]) : 0.0;
  std::vector<double> weight;
  double top = sink;
  for (std::int64_t j = first; j <= last; ++j) {
    double s = 0;
    for (int d = 0; d < dim; ++d) s += static_cast<double>(read(q, q_offset + d * q.last_stride())) * key(j, d);
    s *= p.scale;
    if (p.softcap > 0) s = p.softcap * std::tanh(s / p.softcap);
    s += slope * static_cast<double>(j - position);
    weight.push_back(s);
    top = s > top || std::isnan(s) ? s : top;
  }
  double total = top == -infinity ? 0 : std::exp(sink - top);
  for (double& w : weight) {
    w = top == -infinity ? 0 : std::exp(w - top);
    total += w;
  }
  for (int d = 0; d < dim; ++d) {
    double o = 0;
    for (std::int64_t j = first; j <= last; ++j) o += weight[static_cast<std::size_t>(j - first)] * value(j, d);
    write(out, out_offset + d * out.last_stride(), total == 0 ? 0.0f : static_cast<float>(o / total));
  }
  if (lse.given()) write(lse, lse_offset, static_cast<float>(total == 0 ? -infinity : top + std::log(total)));
}

}  // namespace

// q, out [B, T, Hq, D]; the last count[b] tokens of the cache row are those of the queries. Padding queries come last.
void decode_attention(const Parallel& parallel, const DecodeArgs& a) {
  const KvCacheView& c = *a.cache;
  const std::int64_t batch = a.q.shape[0], tokens = a.q.shape[1], heads = a.q.shape[2];
  parallel.run(batch * heads, [&](std::int64_t task, int) {
    const std::int64_t b = task / heads, h = task % heads;
    const std::int64_t row = a.rows ? a.rows[b] : b, count = a.counts ? a.counts[b] : tokens;
    for (std::int64_t i = 0; i < tokens; ++i) {
      const std::int64_t position = i < count ? c.lengths[row] - count + i : -1;
      std::int64_t first = 0;
      if (a.logits.window > 0 && position - a.logits.window + 1 > 0) first = position - a.logits.window + 1;
      const CachedHead kv{c, row, h / (heads / c.kv_heads), is_kivi(c.format) ? kivi_code_end(position) : position + 1};
      attend(
          i < count, a.q.row_offset((b * tokens + i) * heads + h), a.q, a.logits, position, h, first, position,
          [&](std::int64_t j, int d) { return kv.value(true, j, d); },
          [&](std::int64_t j, int d) { return kv.value(false, j, d); }, a.out,
          a.out.row_offset((b * tokens + i) * heads + h), a.lse,
          a.lse.given() ? b * a.lse.stride[0] + i * a.lse.stride[1] + h * a.lse.stride[2] : 0);
    }
  });
}

// q, out [token, Hq, D], k, v [token, Hkv, D]; of every sequence the cached tokens precede those of k and v.
void prefill_attention(const Parallel& parallel, const PrefillArgs& a) {
  const std::int64_t heads = a.q.shape[1], kv_heads = a.k.shape[1];
  parallel.run(a.batch * heads, [&](std::int64_t task, int) {
    const PrefillSequence& s = a.sequences[task / heads];
    const std::int64_t h = task % heads, kv_head = h / (heads / kv_heads), window = a.logits.window;
    const auto new_token = [&](const TensorView& t, std::int64_t base, std::int64_t j, int d) {
      return read(t, base + j * t.stride[0] + kv_head * t.stride[1] + d * t.stride[2]);
    };
    for (std::int64_t i = 0; i < s.queries; ++i) {
      const std::int64_t position = s.position(i);
      std::int64_t first = 0, last = s.cached + s.keys - 1;
      if (window > 0 && position - window + 1 > 0) first = position - window + 1;
      if (a.causal && position < last) last = position;
      if (!a.causal && window > 0 && position + window - 1 < last) last = position + window - 1;
      if (i >= s.real) last = -1;
      const auto value = [&](bool is_k, std::int64_t j, int d) {
        if (j >= s.cached) return is_k ? new_token(a.k, s.k, j - s.cached, d) : new_token(a.v, s.v, j - s.cached, d);
        return CachedHead{*a.cache, s.row, kv_head, is_kivi(a.cache->format) ? kivi_code_end(s.cached) : s.cached}
            .value(is_k, j, d);
      };
      attend(
          i < s.real, s.q + i * a.q.stride[0] + h * a.q.stride[1], a.q, a.logits, position, h, first, last,
          [&](std::int64_t j, int d) { return value(true, j, d); },
          [&](std::int64_t j, int d) { return value(false, j, d); }, a.out,
          s.out + i * a.out.stride[0] + h * a.out.stride[1], a.lse,
          a.lse.given() ? s.lse + i * a.lse.stride[0] + h * a.lse.stride[1] : 0);
    }
  });
}

// out [.., D] and lse [..] of the union of two disjoint sets of keys, from the results over each. A partial result with
// lse = -inf saw no key, and its out is not used.
void merge_attention(const Parallel& parallel, const TensorView& out_a, const TensorView& lse_a,
                     const TensorView& out_b, const TensorView& lse_b, const TensorView& out, const TensorView& lse) {
  parallel.run(out.rows(), [&](std::int64_t row, int) {
    // lse has one dimension less than out, so its elements are out's rows in the same order
    const double a = read(lse_a, element_offset(lse_a, row)), b = read(lse_b, element_offset(lse_b, row));
    const double top = a > b || std::isnan(a) ? a : b;
    const double total = std::exp(a - top) + std::exp(b - top);
    for (std::int64_t d = 0; d < out.last(); ++d) {
      const auto element = [&](const TensorView& t) {
        return static_cast<double>(read(t, t.row_offset(row) + d * t.last_stride()));
      };
      double o = 0;
      if (b == -infinity && a != -infinity) o = element(out_a);
      else if (a == -infinity && b != -infinity) o = element(out_b);
      else if (top != -infinity) o = (element(out_a) * std::exp(a - top) + element(out_b) * std::exp(b - top)) / total;
      write(out, out.row_offset(row) + d * out.last_stride(), static_cast<float>(o));
    }
    if (lse.given())
      write(lse, element_offset(lse, row),
            static_cast<float>(top == -infinity ? top
                               : a == -infinity ? b
                               : b == -infinity ? a
                                                : top + std::log(total)));
  });
}

}  // namespace rooftile::cpu::reference
