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

// Do two strided tensors share a byte? A sum of c * stride over the dimensions of both (b's counted backwards, so that
// all terms are positive) would have to meet the distance between them: a search from the largest stride down, in which
// the smaller strides leave at most a few c to try where dimensions nest.
class Meeting {
 public:
  Meeting(const TensorView& a, const TensorView& b) {
    target_ = reinterpret_cast<std::intptr_t>(b.data) - reinterpret_cast<std::intptr_t>(a.data);
    before_ =
        static_cast<std::int64_t>(size_of(b.dtype)) - 1;  // bytes by which an element of b may start before one of a
    after_ = static_cast<std::int64_t>(size_of(a.dtype)) - 1;
    add(a, true);
    add(b, false);
    std::sort(terms_, terms_ + count_, [](const Term& x, const Term& y) { return x.stride > y.stride; });
    int merged = 0;  // rows of one buffer have one stride in both: together they are one term
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
      if (--work_ < 0 || possible(k + 1, rest - c * stride)) return true;  // too tangled to tell: as if they met
    return false;
  }

  Term terms_[2 * TensorView::max_ndim];
  int count_ = 0, work_ = 10000;
  std::int64_t target_, before_, after_;
};

// Where a tensor's bytes begin and end. Doubles: addresses are exact in them, and strides may be vast.
struct Span {
  double begin, end;
};
Span span(const TensorView& t) {
  const auto size = static_cast<double>(size_of(t.dtype));
  Span s{static_cast<double>(reinterpret_cast<std::uintptr_t>(t.data)), 0};
  s.end = s.begin + size;
  for (int i = 0; i < t.ndim; ++i) {
    const double reach = static_cast<double>(t.stride[i]) * static_cast<double>(t.shape[i] - 1) * size;
    (reach < 0 ? s.begin : s.end) += reach;
  }
  return s;
}

// Ends first: only where they meet are the strides looked at. x, y: the spans of a and b, which have elements.
bool lie_apart(const TensorView& a, const Span& x, const TensorView& b, const Span& y) {
  return x.end <= y.begin || y.end <= x.begin || !Meeting(a, b).possible();
}
bool lie_apart(const TensorView& a, const TensorView& b) {
  return a.numel() == 0 || b.numel() == 0 || lie_apart(a, span(a), b, span(b));
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

void check_apart(const char* op, const char* out_name, const TensorView& out, std::initializer_list<Named> others) {
  if (out.numel() == 0) return;
  const Span ends = span(out);
  for (const auto& [name, t] : others)
    ROOFTILE_CHECK(t.numel() == 0 || lie_apart(out, ends, t, span(t)), op, ": ", out_name,
                   " must not share memory with ", name);
}

void check_apart(const char* op, std::initializer_list<Named> tensors, const KvCacheView& cache) {
  constexpr int most = 16;
  Span ends[most];
  int count = 0;
  for (const Named& named : tensors)
    ends[count++] = named.t.numel() == 0 ? Span{0, 0} : span(named.t);  // which meets nothing
  for_each_array(cache, [&](const char* name, const TensorView& t) {
    if (t.numel() == 0) return;
    const Span of_cache = span(t);
    for (int i = 0; i < count; ++i) {
      const auto& [argument, tensor] = tensors.begin()[i];
      ROOFTILE_CHECK(lie_apart(tensor, ends[i], t, of_cache), op, ": ", argument,
                     " must not share memory with the cache's ", name);
    }
  });
}

void check_arrays_apart(const char* op, const KvCacheView& cache) {
  struct Part {
    const char* name;
    TensorView t;
  };
  Part parts[8];
  int count = 0;
  for_each_array(cache, [&](const char* name, const TensorView& t) {
    for (int i = 0; i < count; ++i)
      ROOFTILE_CHECK(lie_apart(t, parts[i].t), op, ": ", name, " must not share memory with ", parts[i].name);
    parts[count++] = {name, t};
  });
}

void check_overlap(const char* op, const char* out_name, const TensorView& out, const char* in_name,
                   const TensorView& in) {
  ROOFTILE_CHECK(same_memory(out, in) || lie_apart(out, in), op, ": ", out_name, " overlaps ", in_name,
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
  const int code = *cache.fault % 16, row = *cache.fault / 16;
  *cache.fault = kv_fault_raised;
  const char* why = "something that cannot be";
  switch (static_cast<KvFault>(code)) {
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
  const bool named = code != static_cast<int>(KvFault::row);  // a row that is none has no number
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
  check_apart(op, "out", y, {{"x", x}, {"bias", bias}});
  if (!residual.given()) return;
  like_y("residual", residual);
  check_overlap(op, "out", y, "residual", residual);
}

}  // namespace rooftile::check
