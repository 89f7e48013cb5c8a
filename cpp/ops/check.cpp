// SPDX-License-Identifier: Apache-2.0
#include "ops/check.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "core/kv_layout.h"

namespace rooftile::check {
namespace {

bool same_memory(const TensorView& a, const TensorView& b) {
  if (a.data != b.data || a.dtype != b.dtype || a.ndim != b.ndim) return false;
  for (int i = 0; i < a.ndim; ++i)
    if (a.stride[i] != b.stride[i] && a.shape[i] > 1) return false;
  return true;
}

// Decides whether two strided tensors share a byte. They do if a sum of c * stride over the dimensions of both equals
// the distance between their starts (b's dimensions are counted backwards, so all terms are positive). The search goes
// from the largest stride down; in nested dimensions the smaller strides leave only a few values of c to try.
class OverlapSearch {
 public:
  OverlapSearch(const TensorView& a, const TensorView& b) {
    target_ = reinterpret_cast<std::intptr_t>(b.data) - reinterpret_cast<std::intptr_t>(a.data);
    before_ =
        static_cast<std::int64_t>(size_of(b.dtype)) - 1;  // bytes an element of b may start before an element of a
    after_ = static_cast<std::int64_t>(size_of(a.dtype)) - 1;
    add(a, true);
    add(b, false);
    std::sort(terms_, terms_ + count_, [](const Term& x, const Term& y) { return x.stride > y.stride; });
    int merged = 0;  // equal strides, as of two views of one buffer, merge into one term
    for (int i = 1; i < count_; ++i)
      if (terms_[i].stride == terms_[merged].stride) terms_[merged].steps += terms_[i].steps;
      else terms_[++merged] = terms_[i];
    if (count_ > 0) count_ = merged + 1;
  }
  bool possible() { return possible(0, target_); }

 private:
  struct Term {
    std::int64_t stride, steps;  // c in [0, steps]
  };

  void add(const TensorView& t, bool forwards) {
    for (int i = 0; i < t.ndim; ++i) {
      const std::int64_t steps = t.shape[i] - 1;
      if (steps == 0 || t.stride[i] == 0) continue;
      const std::int64_t stride = t.stride[i] * static_cast<std::int64_t>(size_of(t.dtype));
      if ((stride > 0) != forwards) target_ += std::abs(stride) * steps;  // counted from the other end
      terms_[count_++] = {std::abs(stride), steps};
    }
  }

  bool possible(int k, std::int64_t rest) {
    if (k == count_) return -before_ <= rest && rest <= after_;
    std::int64_t reach = after_;
    for (int i = k + 1; i < count_; ++i) reach += terms_[i].stride * terms_[i].steps;
    const std::int64_t stride = terms_[k].stride;
    const std::int64_t first = rest > reach ? (rest - reach + stride - 1) / stride : 0;
    const std::int64_t last = rest + before_ < 0 ? -1 : std::min(terms_[k].steps, (rest + before_) / stride);
    for (std::int64_t c = first; c <= last; ++c)
      if (--work_ < 0 || possible(k + 1, rest - c * stride)) return true;  // search budget spent: assume an overlap
    return false;
  }

  Term terms_[2 * TensorView::max_ndim];
  int count_ = 0, work_ = 10000;
  std::int64_t target_, before_, after_;
};

// The range of a tensor's bytes, as doubles: they hold addresses exactly and do not overflow for huge strides.
struct ByteRange {
  double begin, end;
};
ByteRange byte_range(const TensorView& t) {
  const auto size = static_cast<double>(size_of(t.dtype));
  ByteRange s{static_cast<double>(reinterpret_cast<std::uintptr_t>(t.data)), 0};
  s.end = s.begin + size;
  for (int i = 0; i < t.ndim; ++i) {
    const double reach = static_cast<double>(t.stride[i]) * static_cast<double>(t.shape[i] - 1) * size;
    (reach < 0 ? s.begin : s.end) += reach;
  }
  return s;
}

// Whether two non-empty tensors share no byte. x, y: their byte ranges; strides are compared only if the ranges
// overlap.
bool disjoint(const TensorView& a, const ByteRange& x, const TensorView& b, const ByteRange& y) {
  return x.end <= y.begin || y.end <= x.begin || !OverlapSearch(a, b).possible();
}
bool disjoint(const TensorView& a, const TensorView& b) {
  return a.numel() == 0 || b.numel() == 0 || disjoint(a, byte_range(a), b, byte_range(b));
}

struct Dimension {
  std::int64_t size, stride;  // in bytes
};
TensorView array(const void* data, DType dtype, std::initializer_list<Dimension> dimensions) {
  TensorView t;
  t.data = const_cast<void*>(data);
  t.dtype = dtype;
  t.ndim = 0;
  for (const Dimension& d : dimensions) {
    t.shape[t.ndim] = d.size;
    t.stride[t.ndim++] = d.stride / static_cast<std::int64_t>(size_of(dtype));
  }
  return t;
}

// visit(name, array) for each array of a cache; names are those of KvCacheArrays' makers.
template <class Visit>
void for_each_array(const KvCacheView& c, const Visit& visit) {
  constexpr std::int64_t i32 = sizeof(std::int32_t);
  const auto element = static_cast<std::int64_t>(size_of(c.dtype));
  const std::int64_t rows = c.max_rows;
  if (is_element_format(c.format)) {
    for (const auto& [name, plane] : {std::pair{"k_pool", &c.k}, {"v_pool", &c.v}})
      visit(name, array(plane->codes, c.dtype,
                        {{c.pages, plane->page_stride},
                         {c.page_size, plane->token_stride},
                         {c.kv_heads, plane->head_stride},
                         {c.head_dim, element}}));
  } else {
    visit("pool", array(c.k.codes, DType::u8,
                        {{c.pages, c.k.page_stride},
                         {c.kv_heads, c.k.head_stride},
                         {kv_block(c.format, c.page_size, c.head_dim).bytes, 1}}));
  }
  if (c.block_table)
    visit("block_table", array(c.block_table, DType::i32, {{rows, c.table_stride * i32}, {c.max_pages, i32}}));
  visit(c.block_table ? "seq_lens" : "lengths", array(c.lengths, DType::i32, {{rows, i32}}));
  if (!is_kivi(c.format)) return;
  for (const auto& [name, ring] : {std::pair{"ring_k", c.ring_k}, {"ring_v", c.ring_v}})
    visit(name, array(ring, c.dtype, {{rows * c.kv_heads * c.ring_size * c.head_dim, element}}));
  visit("raw_from", array(c.raw_from, DType::i32, {{rows, i32}}));
}

}  // namespace

void check_disjoint(const char* op, const char* out_name, const TensorView& out, std::initializer_list<Named> others) {
  if (out.numel() == 0) return;
  const ByteRange range = byte_range(out);
  for (const auto& [name, t] : others)
    ROOFTILE_CHECK(t.numel() == 0 || disjoint(out, range, t, byte_range(t)), op, ": ", out_name,
                   " must not share memory with ", name);
}

void check_disjoint(const char* op, std::initializer_list<Named> tensors, const KvCacheView& cache) {
  constexpr int most = 16;
  ByteRange ranges[most];
  int count = 0;
  for (const Named& named : tensors)
    ranges[count++] = named.t.numel() == 0 ? ByteRange{0, 0} : byte_range(named.t);  // an empty tensor overlaps nothing
  for_each_array(cache, [&](const char* name, const TensorView& t) {
    if (t.numel() == 0) return;
    const ByteRange cache_range = byte_range(t);
    for (int i = 0; i < count; ++i) {
      const auto& [argument, tensor] = tensors.begin()[i];
      ROOFTILE_CHECK(disjoint(tensor, ranges[i], t, cache_range), op, ": ", argument,
                     " must not share memory with the cache's ", name);
    }
  });
}

void check_arrays_disjoint(const char* op, const KvCacheView& cache) {
  struct NamedArray {
    const char* name;
    TensorView t;
  };
  NamedArray arrays[8];
  int count = 0;
  for_each_array(cache, [&](const char* name, const TensorView& t) {
    for (int i = 0; i < count; ++i)
      ROOFTILE_CHECK(disjoint(t, arrays[i].t), op, ": ", name, " must not share memory with ", arrays[i].name);
    arrays[count++] = {name, t};
  });
}

void check_overlap(const char* op, const char* out_name, const TensorView& out, const char* in_name,
                   const TensorView& in) {
  ROOFTILE_CHECK(same_memory(out, in) || disjoint(out, in), op, ": ", out_name, " overlaps ", in_name,
                 " in memory; it must be ", in_name, " itself (same strides) or lie apart from it");
}

bool overlaps_itself(const TensorView& t) {
  if (t.numel() == 0) return false;
  // From the smallest stride up, each dimension must step over all that lies inside it. Doubles: products may be vast.
  double reach = 0;
  bool done[TensorView::max_ndim] = {};
  for (int round = 0; round < t.ndim; ++round) {
    int next = -1;
    for (int i = 0; i < t.ndim; ++i)
      if (!done[i] && t.shape[i] > 1 && (next < 0 || std::abs(t.stride[i]) < std::abs(t.stride[next]))) next = i;
    if (next < 0) break;
    done[next] = true;
    const double stride = std::abs(static_cast<double>(t.stride[next]));
    if (stride <= reach) return true;
    reach += static_cast<double>(t.shape[next] - 1) * stride;
  }
  return false;
}

const std::int32_t* device_values(const char* op, const char* argument, const TensorView& t, std::int64_t batch,
                                  Device device) {
  if (!t.given()) return nullptr;
  Arg(op, argument, t).dtype({DType::i32}).shape({batch}, "[batch]").device(device, "the cache");
  ROOFTILE_CHECK(batch <= 1 || t.stride[0] == 1, op, ": ", argument, " must be contiguous on a GPU, got stride ",
                 t.stride[0]);
  return t.as<std::int32_t>();
}

void raise_fault(const char* op, const KvCacheView& cache) {
  if (!cache.fault || *cache.fault <= 0) return;
  const std::int32_t word = *cache.fault, row = kv_fault_row(word);
  *cache.fault = kv_fault_raised;
  const char* why = "something that cannot be";
  switch (kv_fault_of(word)) {
    case KvFault::row:
      why = "rows named a row that the cache does not have";
      break;
    case KvFault::length:
      why = "the row's stored length was not in [0, capacity]";
      break;
    case KvFault::capacity:
      why = "the new tokens did not fit the row's capacity";
      break;
    case KvFault::count:
      why = "counts was not in [0, T]";
      break;
    case KvFault::page:
      why = "block_table named a page that the pool does not have";
      break;
    case KvFault::position:
      why = "positions must lie in [0, rows of cos)";
      break;
    case KvFault::twice:
      why = "rows named it twice";
      break;
    case KvFault::raw:
      why = "the raw tokens it needed were cut away by an earlier truncate";
      break;
    case KvFault::none:
      break;
  }
  const bool named = kv_fault_of(word) != KvFault::row;  // a row that is none has no number
  fail(ErrorKind::value, op, ": an earlier call on this cache left ", named ? "row " : "batch entry ", row,
       " alone: ", why);
}

void check_product(const char* op, const TensorView& x, std::int64_t n, bool gated, const TensorView& y,
                   const TensorView& bias, const TensorView& residual) {
  ROOFTILE_CHECK(x.rows() <= max_count, op, ": x must have at most ", max_count, " rows, got ", describe(x));
  const std::int64_t outputs = gated ? n / 2 : n;
  TensorView expected = x;
  expected.shape[x.ndim - 1] = outputs;
  const auto like_y = [&](const char* argument, const TensorView& t) {
    Arg(op, argument, t).given().dtype({x.dtype}).device(x.device, "x");
    ROOFTILE_CHECK(same_shape(t, expected), op, ": ", argument, " must be x's shape with N", gated ? " / 2 = " : " = ",
                   outputs, " last, ", shape_text(expected), ", got ", describe(t));
  };
  like_y("out", y);
  Arg(op, "out", y).writable();
  if (bias.given()) Arg(op, "bias", bias).shape({n}, "[N]").dtype({x.dtype}).device(x.device, "x");
  check_disjoint(op, "out", y, {{"x", x}, {"bias", bias}});
  if (!residual.given()) return;
  like_y("residual", residual);
  check_overlap(op, "out", y, "residual", residual);
}

}  // namespace rooftile::check
