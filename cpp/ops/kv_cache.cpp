// SPDX-License-Identifier: Apache-2.0
#include "rooftile/constants.h"
#include "rooftile/kv_cache.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

#include "core/kernel_name.h"
#include "core/kv_layout.h"
#include "cpu/kv_read.h"
#include "kernels/backend.h"
#include "ops/append.h"
#include "ops/check.h"

namespace rooftile {
namespace {

using check::Arg;

// A copy of an int32 [n] argument on the host: what a call writes may be the memory that the argument lies in.
class Ints {
 public:
  Ints() = default;
  Ints(const char* op, const char* argument, const TensorView& t, std::int64_t n, const char* names) {
    Arg(op, argument, t).given().dtype({DType::i32}).shape({n}, names);
    read(op, argument, t);
  }
  // Of any length up to `most`: bounded before memory is made for it.
  static Ints up_to(std::int64_t most, const char* of, const char* op, const char* argument, const TensorView& t) {
    Ints list;
    Arg(op, argument, t).given().dtype({DType::i32}).ndim(1, 1);
    ROOFTILE_CHECK(t.shape[0] <= most, op, ": ", argument, " must have at most ", most, " entries, the cache's ", of,
                   ", got ", describe(t));
    list.read(op, argument, t);
    return list;
  }
  std::int64_t size() const { return static_cast<std::int64_t>(values_.size()); }
  const std::int32_t* data() const { return values_.data(); }
  std::int32_t operator[](std::int64_t i) const { return values_[static_cast<std::size_t>(i)]; }

 private:
  void read(const char* op, const char* argument, const TensorView& t) {
    ROOFTILE_CHECK(t.device.type == DeviceType::cpu, op, ": ", argument, " must be on the host, got ", describe(t));
    values_.resize(static_cast<std::size_t>(t.shape[0]));
    for (std::int64_t i = 0; i < size(); ++i)
      values_[static_cast<std::size_t>(i)] = t.as<const std::int32_t>()[i * t.stride[0]];
  }
  std::vector<std::int32_t> values_;
};

// The first position whose raw value a kivi cache still holds.
std::int64_t raw_begin(const KvCacheView& c, std::int64_t row) {
  return std::max<std::int64_t>(c.raw_from[row], std::int64_t{c.lengths[row]} - c.ring_size);
}

void check_row(const char* op, const char* argument, const KvCacheView& c, std::int64_t row) {
  ROOFTILE_CHECK(row >= 0 && row < c.max_rows, op, ": ", argument, " must lie in [0, ", c.max_rows, "), got ", row);
}

// The stored length of a row. A serving engine may share the array, so its values are checked at every use.
std::int64_t length_of(const char* op, const KvCacheView& c, std::int64_t row) {
  const std::int64_t length = c.lengths[row];
  ROOFTILE_CHECK(length >= 0 && length <= c.capacity(), op, ": cache lengths[", row, "] must lie in [0, ", c.capacity(),
                 "], got ", length);
  return length;
}

void check_batch(const char* op, const KvCacheView& c, std::int64_t batch, const TensorView& rows) {
  ROOFTILE_CHECK(rows.given() || batch <= c.max_rows, op, ": k has batch ", batch, ", but the cache has ", c.max_rows,
                 " rows; pass rows= to say which");
}

// The pages of tokens [begin, end) of a row exist. Entries of other tokens are not read.
void check_pages(const char* op, const KvCacheView& c, std::int64_t row, std::int64_t begin, std::int64_t end) {
  if (!c.block_table || begin >= end) return;
  for (std::int64_t i = begin / c.page_size; i <= (end - 1) / c.page_size; ++i) {
    const std::int32_t page = c.block_table[row * c.table_stride + i];
    ROOFTILE_CHECK(page >= 0 && page < c.pages, op, ": block_table[", row, ", ", i, "] must be a page in [0, ", c.pages,
                   "), got ", page);
  }
}

// Pages that one call writes. A page of two places would hold what came last, so each must be of one alone. (Below what
// is written rows may share pages.)
class WrittenPages {
 public:
  // The pages that storing tokens [begin, end) of a row writes: a kivi format writes groups, those that close.
  void add(const KvCacheView& c, std::int64_t row, std::int64_t begin, std::int64_t end) {
    if (!c.block_table) return;
    if (is_kivi(c.format)) {
      begin = kivi_code_end(begin);
      end = kivi_code_end(end);
    }
    for (std::int64_t i = begin / c.page_size; i * c.page_size < end && begin < end; ++i)
      places_.push_back({c.block_table[row * c.table_stride + i], row, i});
  }
  void check(const char* op) {
    std::ranges::sort(places_);
    const auto twice = std::ranges::adjacent_find(places_, {}, &Place::page);
    if (twice == places_.end()) return;
    const Place &a = *twice, &b = *(twice + 1);
    fail(ErrorKind::value, op, ": block_table[", b.row, ", ", b.index, "] must be a page that this call writes for no ",
         "other tokens, got ", b.page, ", which block_table[", a.row, ", ", a.index, "] is too");
  }

 private:
  struct Place {
    std::int32_t page;
    std::int64_t row, index;
    auto operator<=>(const Place&) const = default;
  };
  std::vector<Place> places_;
};

// For ops that read single values of a cache: the host must be able to read the memory.
void check_on_host(const char* op, const KvCacheView& c) {
  ROOFTILE_CHECK_KIND(not_supported, c.device.type == DeviceType::cpu, op, ": the cache is on ", name(c.device),
                      "; copy it to the host first");
}

// A cache whose small arrays (lengths, raw_from, table rows) the host can read and write: its own, or copies of a GPU
// cache's that commit() writes back. Pools and rings stay where they are; copy() moves their bytes.
class HostAccess {
 public:
  HostAccess(const char* op, const Context& ctx, const KvCacheView& cache)
      : view(cache), op_(op), ctx_(ctx), cache_(cache) {
    if (!remote()) return;
    view.block_table = nullptr;
    stage(cache.lengths, lengths_, view.lengths);
    if (cache.raw_from) stage(cache.raw_from, raw_from_, view.raw_from);
    check::raise_fault(op, cache);  // now that the calls before this one are done
  }
  // From here on view.block_table has these rows.
  void stage_table(std::initializer_list<std::int64_t> rows) {
    if (!remote() || !cache_.block_table) return;
    const auto wide = static_cast<std::size_t>(cache_.max_pages);
    table_.resize(wide * static_cast<std::size_t>(cache_.max_rows));
    for (std::int64_t row : rows)
      copy(table_.data() + static_cast<std::size_t>(row) * wide, cache_.block_table + row * cache_.table_stride,
           cache_.max_pages * std::int64_t{sizeof(std::int32_t)});
    view.block_table = table_.data();
    view.table_stride = cache_.max_pages;
  }
  // To or from the host's memory, done on return; within the cache, in stream order.
  void copy(void* to, const void* from, std::int64_t bytes) const { copy(to, from, bytes, true); }
  void copy_within(void* to, const void* from, std::int64_t bytes) const { copy(to, from, bytes, false); }
  void commit() const {
    if (!remote()) return;
    copy(cache_.lengths, lengths_.data(), bytes_of_rows());
    if (cache_.raw_from) copy(cache_.raw_from, raw_from_.data(), bytes_of_rows());
  }

  KvCacheView view;

 private:
  void copy(void* to, const void* from, std::int64_t bytes, bool wait) const {
    if (remote()) gpu::copy_bytes(op_, ctx_, to, from, static_cast<std::size_t>(bytes), wait);
    else std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
  bool remote() const { return cache_.device.type != DeviceType::cpu; }
  std::int64_t bytes_of_rows() const { return cache_.max_rows * std::int64_t{sizeof(std::int32_t)}; }
  void stage(const std::int32_t* from, std::vector<std::int32_t>& values, std::int32_t*& seen) {
    values.resize(static_cast<std::size_t>(cache_.max_rows));
    copy(values.data(), from, bytes_of_rows());
    seen = values.data();
  }

  const char* op_;
  const Context& ctx_;
  const KvCacheView& cache_;
  std::vector<std::int32_t> lengths_, raw_from_, table_;
};

// visit(address in page 0, page stride, bytes) for every contiguous range of bytes of a page.
template <class Visit>
void for_each_contiguous(const KvCacheView& c, const Visit& visit) {
  struct Dimension {
    std::int64_t count, stride;
  };
  const bool elements = is_element_format(c.format);
  for (const KvCacheView::Plane* plane : {&c.k, &c.v}) {
    std::int64_t bytes = elements ? c.head_dim * static_cast<std::int64_t>(size_of(c.dtype))
                                  : kv_block(c.format, c.page_size, c.head_dim).bytes;
    Dimension inner{elements ? c.page_size : 1, plane->token_stride}, outer{c.kv_heads, plane->head_stride};
    if (elements && outer.stride < inner.stride) std::swap(inner, outer);
    for (Dimension* d : {&inner, &outer})
      if (d->stride == bytes || d->count == 1) {  // neighbours are contiguous
        bytes *= d->count;
        d->count = 1;
      } else {
        break;
      }
    for (std::int64_t i = 0; i < outer.count; ++i)
      for (std::int64_t j = 0; j < inner.count; ++j)
        visit(plane->codes + i * outer.stride + j * inner.stride, plane->page_stride, bytes);
    if (!elements) return;  // a block holds K and V, codes and scales
  }
}

void copy_page(const HostAccess& host, std::int64_t from, std::int64_t to) {
  if (from == to) return;
  for_each_contiguous(host.view, [&](std::byte* base, std::int64_t stride, std::int64_t bytes) {
    host.copy_within(base + to * stride, base + from * stride, bytes);
  });
}

std::int64_t ring_bytes(const KvCacheView& c) {
  return std::int64_t{c.kv_heads} * c.ring_size * c.head_dim * static_cast<std::int64_t>(size_of(c.dtype));
}

void copy_ring(const HostAccess& host, std::int64_t from, std::int64_t to) {
  const KvCacheView& c = host.view;
  if (!is_kivi(c.format)) return;
  const std::int64_t bytes = ring_bytes(c);
  for (std::byte* ring : {c.ring_k, c.ring_v}) host.copy_within(ring + to * bytes, ring + from * bytes, bytes);
  c.raw_from[to] = c.raw_from[from];
}

std::int64_t pages_for(const KvCacheView& c, std::int64_t tokens) { return (tokens + c.page_size - 1) / c.page_size; }

void check_quantised(const char* op, const KvCacheView& c) {
  ROOFTILE_CHECK(!is_element_format(c.format), op, ": a cache of format ", name(c.format),
                 " stores elements, not codes");
}

// How many tokens of a row are stored as codes.
std::int64_t coded_tokens(const char* op, const KvCacheView& c, std::int64_t row) {
  const std::int64_t length = length_of(op, c, row);
  return is_kivi(c.format) ? kivi_code_end(length) : length;
}

std::int64_t bytes_between(const TensorView& t, int dimension) {
  return t.stride[dimension] * static_cast<std::int64_t>(size_of(t.dtype));
}

// A writable int32 array of the cache, its inner dimension contiguous.
void check_table(const char* op, const char* argument, const TensorView& t, std::initializer_list<std::int64_t> shape,
                 const char* names, Device device) {
  Arg(op, argument, t).given().dtype({DType::i32}).shape(shape, names).device(device, "the pool").writable();
  ROOFTILE_CHECK(t.last() <= 1 || t.last_stride() == 1, op, ": ", argument,
                 " must have neighbouring elements in its last dimension, got stride ", t.last_stride());
}

}  // namespace

KvCacheView kv_cache_view(const KvCacheShape& s, const KvCacheArrays& a, const char* op) {
  constexpr std::int64_t most = check::max_count;
  const auto count = [&](const char* argument, std::int64_t value, std::int64_t at_least,
                         std::int64_t at_most = check::max_count) {
    ROOFTILE_CHECK(value >= at_least && value <= at_most, op, ": ", argument, " must lie in [", at_least, ", ", at_most,
                   "], got ", value);
    return static_cast<int>(value);
  };
  ROOFTILE_CHECK_KIND(type, is_activation(s.dtype), op, ": dtype must be float32, float16 or bfloat16, got ",
                      name(s.dtype));
  const DType element = s.format == KvFormat::fp32 ? DType::f32 : s.format == KvFormat::fp16 ? DType::f16 : DType::bf16;
  ROOFTILE_CHECK_KIND(type, !is_element_format(s.format) || s.dtype == element, op, ": format ", name(s.format),
                      " stores ", name(element), ", so dtype cannot be ", name(s.dtype));
  KvCacheView c;
  c.format = s.format;
  c.dtype = s.dtype;
  c.page_size = count("page_size", s.page_size, 1);
  c.kv_heads = count("kv_heads", s.kv_heads, 1, check::max_heads);
  c.head_dim = count("head_dim", s.head_dim, 1);
  ROOFTILE_CHECK_KIND(not_supported, c.head_dim <= max_head_dim, op, ": head_dim must be 1 to ", max_head_dim, ", got ",
                      c.head_dim);
  c.max_rows = count("max_rows", s.max_rows, 0);
  c.max_pages = count("max_pages", s.max_pages, 0);
  ROOFTILE_CHECK(std::ranges::count(kv_page_sizes(), c.page_size) > 0, op,
                 ": page_size must be 16, 32, 64 or 128, got ", c.page_size);
  ROOFTILE_CHECK(!is_kivi(c.format) || c.page_size % kv_group == 0, op, ": format ", name(c.format),
                 " stores groups of 32 tokens, so page_size must be 32, 64 or 128, got ", c.page_size);
  ROOFTILE_CHECK(c.capacity() <= most, op, ": a row would hold ", c.capacity(), " tokens, at most ", most,
                 " are counted");

  std::int64_t pages = 0;
  if (is_element_format(c.format)) {
    const struct {
      const char* argument;
      const TensorView& t;
      KvCacheView::Plane& plane;
    } sides[] = {{"k_pool", a.k_pool, c.k}, {"v_pool", a.v_pool, c.v}};
    pages = a.k_pool.given() && a.k_pool.ndim == 4 ? a.k_pool.shape[0] : 0;
    for (const auto& [argument, t, plane] : sides) {
      Arg(op, argument, t).given().dtype({c.dtype}).ndim(4, 4);
      Arg(op, argument, t)
          .shape({pages, c.page_size, c.kv_heads, c.head_dim}, "[pages, page_size, kv_heads, head_dim]")
          .device(a.k_pool.device, "k_pool")
          .writable();
      ROOFTILE_CHECK(c.head_dim == 1 || t.last_stride() == 1, op, ": ", argument,
                     " must have neighbouring elements in its last dimension, got stride ", t.last_stride());
      ROOFTILE_CHECK(reinterpret_cast<std::uintptr_t>(t.data) % size_of(c.dtype) == 0, op, ": ", argument,
                     " is not aligned to its elements");
      plane = {.codes = static_cast<std::byte*>(t.data),
               .page_stride = bytes_between(t, 0),
               .head_stride = bytes_between(t, 2),
               .token_stride = bytes_between(t, 1)};
    }
    c.device = a.k_pool.device;
  } else {
    const TensorView& t = a.pool;
    Arg(op, "pool", t).given().dtype({DType::u8}).ndim(3, 3);
    const KvBlock block = kv_block(c.format, c.page_size, c.head_dim);
    pages = t.shape[0];
    Arg(op, "pool", t).shape({pages, c.kv_heads, block.bytes}, "[pages, kv_heads, block_bytes]").writable();
    ROOFTILE_CHECK(t.last_stride() == 1, op, ": pool must have neighbouring bytes in its last dimension, got stride ",
                   t.last_stride());
    ROOFTILE_CHECK(reinterpret_cast<std::uintptr_t>(t.data) % 16 == 0 && (t.shape[0] <= 1 || t.stride[0] % 16 == 0) &&
                       (t.shape[1] <= 1 || t.stride[1] % 16 == 0),
                   op, ": every block of pool must start at a multiple of 16 bytes, got strides ", t.stride[0], " and ",
                   t.stride[1], " at address ...", reinterpret_cast<std::uintptr_t>(t.data) % 16, " modulo 16");
    auto* base = static_cast<std::byte*>(t.data);
    c.k = {.codes = base,
           .scale = base + block.k_scale,
           .min = has_min(c.format) ? base + block.k_min : nullptr,
           .page_stride = t.stride[0],
           .head_stride = t.stride[1]};
    c.v = {.codes = base + block.v_codes,
           .scale = base + block.v_scale,
           .min = has_min(c.format) ? base + block.v_min : nullptr,
           .page_stride = t.stride[0],
           .head_stride = t.stride[1]};
    c.device = t.device;
  }
  c.pages = count("pages", pages, 0);

  if (a.block_table.given()) {
    check_table(op, "block_table", a.block_table, {c.max_rows, c.max_pages}, "[max_rows, max_pages]", c.device);
    c.block_table = a.block_table.as<const std::int32_t>();
    c.table_stride = a.block_table.stride[0];
  } else {
    ROOFTILE_CHECK(pages == std::int64_t{c.max_rows} * c.max_pages, op,
                   ": a pool without block_table must hold max_rows * max_pages = ",
                   std::int64_t{c.max_rows} * c.max_pages, " pages, got ", pages);
  }
  check_table(op, a.block_table.given() ? "seq_lens" : "lengths", a.lengths, {c.max_rows}, "[max_rows]", c.device);
  c.lengths = a.lengths.as<std::int32_t>();
  if (is_kivi(c.format)) {
    c.ring_size = kv_ring;
    for (const auto& [argument, t] : {std::pair{"ring_k", &a.ring_k}, {"ring_v", &a.ring_v}}) {
      Arg(op, argument, *t)
          .given()
          .dtype({c.dtype})
          .shape({c.max_rows, c.kv_heads, kv_ring, c.head_dim}, "[max_rows, kv_heads, 64, head_dim]")
          .device(c.device, "the pool")
          .writable();
      std::int64_t contiguous = 1;
      for (int i = 3; i >= 0; contiguous *= t->shape[i--])
        ROOFTILE_CHECK(t->shape[i] <= 1 || t->stride[i] == contiguous, op, ": ", argument,
                       " must be contiguous, got stride ", t->stride[i], " in dimension ", i);
    }
    c.ring_k = a.ring_k.as<std::byte>();
    c.ring_v = a.ring_v.as<std::byte>();
    check_table(op, "raw_from", a.raw_from, {c.max_rows}, "[max_rows]", c.device);
    c.raw_from = a.raw_from.as<std::int32_t>();
  }
  ROOFTILE_CHECK_KIND(type, a.fault.given() || c.device.type == DeviceType::cpu, op,
                      ": fault must be given for a cache on ", name(c.device), ", got None");
  if (a.fault.given()) {
    Arg(op, "fault", a.fault).dtype({DType::i32}).shape({1}, "[1]").device({}, "the host").writable();
    ROOFTILE_CHECK(c.device.type != DeviceType::cpu, op, ": fault belongs to caches on a GPU, the pool is on ",
                   name(c.device));
    c.fault = a.fault.as<std::int32_t>();
  }
  check::check_arrays_disjoint(op, c);
  return c;
}

namespace check {

void check_append(const char* op, const KvCacheView& c, const TensorView& k, const TensorView& v,
                  const TensorView& rows, const TensorView& counts) {
  Arg(op, "k", k).given().dtype({c.dtype}).ndim(4, 4).countable();
  check_sequences(op, "k", k);
  Arg(op, "k", k)
      .shape({k.shape[0], k.shape[1], c.kv_heads, c.head_dim}, "[batch, tokens, kv_heads, head_dim]")
      .device(c.device, "the cache");
  Arg(op, "v", v).given().dtype({c.dtype}).shape_of(k, "k").device(c.device, "the cache");
  check_disjoint(op, {{"k", k}, {"v", v}, {"rows", rows}, {"counts", counts}}, c);
}

AppendArgs gpu_append(const char* op, const Context& ctx, const KvCacheView& c, const TensorView& k,
                      const TensorView& v, const TensorView& rows, const TensorView& counts) {
  check_gpu(op, ctx, "k", k, true);
  check_append(op, c, k, v, rows, counts);
  const std::int64_t batch = k.shape[0];
  check_batch(op, c, batch, rows);
  AppendArgs a{.cache = &c, .k = k, .v = v};
  a.rows = device_values(op, "rows", rows, batch, c.device);
  a.counts = device_values(op, "counts", counts, batch, c.device);
  raise_fault(op, c);
  return a;
}

}  // namespace check

KernelName kv_append(const Context& ctx, const KvCacheView& c, TensorView k, TensorView v, TensorView rows,
                     TensorView counts) {
  return append("append", ctx, c, k, v, rows, counts);
}

KernelName append(const char* op, const Context& ctx, const KvCacheView& c, TensorView k, TensorView v, TensorView rows,
                  TensorView counts) {
  if (check::on_gpu(ctx)) return gpu::kv_append(op, ctx, check::gpu_append(op, ctx, c, k, v, rows, counts));
  check::check_append(op, c, k, v, rows, counts);
  const std::int64_t batch = k.shape[0], tokens = k.shape[1];
  const cpu::Kernels& kernels = check::cpu_kernels(op, ctx);
  const Ints row_list = rows.given() ? Ints(op, "rows", rows, batch, "[batch]") : Ints{};
  const Ints count_list = counts.given() ? Ints(op, "counts", counts, batch, "[batch]") : Ints{};
  check_batch(op, c, batch, rows);
  std::vector<bool> seen(rows.given() ? static_cast<std::size_t>(c.max_rows) : 0);
  WrittenPages written;
  for (std::int64_t b = 0; b < batch; ++b) {
    const std::int64_t row = rows.given() ? row_list[b] : b, n = counts.given() ? count_list[b] : tokens;
    if (rows.given()) check_row(op, "rows", c, row);
    ROOFTILE_CHECK(n >= 0 && n <= tokens, op, ": counts must lie in [0, ", tokens, "], got ", n, " at index ", b);
    if (n == 0) continue;  // a padding row; it may name a row that another entry writes
    if (rows.given()) {
      ROOFTILE_CHECK(!seen[static_cast<std::size_t>(row)], op, ": rows names row ", row, " twice");
      seen[static_cast<std::size_t>(row)] = true;
    }
    const std::int64_t length = length_of(op, c, row);
    ROOFTILE_CHECK(length + n <= c.capacity(), op, ": ", counts.given() ? "counts" : "k", " has ", n,
                   " tokens for row ", row, ", which holds ", length, " and has room for ", c.capacity(),
                   "; they do not fit");
    check_pages(op, c, row, length, length + n);
    written.add(c, row, length, length + n);
  }
  written.check(op);
  const std::int32_t* row_data = rows.given() ? row_list.data() : nullptr;
  const std::int32_t* count_data = counts.given() ? count_list.data() : nullptr;
  kernels.kv_append(Parallel(ctx.threads), c, k, v, row_data, count_data);
  for (std::int64_t b = 0; b < batch; ++b)
    c.lengths[row_data ? row_data[b] : b] += static_cast<std::int32_t>(count_data ? count_data[b] : tokens);
  return kernel_name("cpu_", kernels.variant, "_append_", name(c.dtype), "_", name(c.format));
}

void kv_truncate(const Context& ctx, const KvCacheView& cache, TensorView rows, TensorView lengths) {
  const char* op = "truncate";
  const HostAccess host(op, ctx, cache);
  const KvCacheView& c = host.view;
  const Ints row_list = Ints::up_to(c.max_rows, "rows", op, "rows", rows);
  const Ints length_list(op, "lengths", lengths, row_list.size(), "[rows]");
  std::vector<bool> seen(static_cast<std::size_t>(c.max_rows));
  for (std::int64_t i = 0; i < row_list.size(); ++i) {
    const std::int64_t row = row_list[i], to = length_list[i];
    check_row(op, "rows", c, row);
    ROOFTILE_CHECK(!seen[static_cast<std::size_t>(row)], op, ": rows names row ", row, " twice");
    seen[static_cast<std::size_t>(row)] = true;
    const std::int64_t from = length_of(op, c, row);
    ROOFTILE_CHECK(to >= 0 && to <= from, op, ": lengths must lie in [0, ", from, "] for row ", row, ", which holds ",
                   from, " tokens, got ", to);
    if (!is_kivi(c.format) || to % kv_group == 0 || to == from) continue;
    ROOFTILE_CHECK(from - to <= kv_step_back, op, ": a cache of format ", name(c.format),
                   " can be cut to a multiple of 32 tokens, or by at most 16; row ", row, " holds ", from,
                   " and lengths asks for ", to);
    ROOFTILE_CHECK(kivi_code_end(to) >= raw_begin(c, row), op, ": row ", row, " holds raw tokens from position ",
                   raw_begin(c, row),
                   " on, after earlier cuts; lengths can be that, a multiple of 32 below it, or more, got ", to);
  }
  for (std::int64_t i = 0; i < row_list.size(); ++i) {
    const std::int64_t row = row_list[i];
    if (is_kivi(c.format))
      c.raw_from[row] = static_cast<std::int32_t>(
          std::min<std::int64_t>(std::max<std::int64_t>(raw_begin(c, row), 0), length_list[i]));
    c.lengths[row] = length_list[i];
  }
  host.commit();
}

namespace {

// The validated index of kv_reorder.
Ints checked_index(const char* op, const KvCacheView& c, const TensorView& index) {
  Ints list(op, "index", index, c.max_rows, "[rows]");
  for (std::int64_t i = 0; i < c.max_rows; ++i) {
    check_row(op, "index", c, list[i]);
    length_of(op, c, i);
  }
  return list;
}

}  // namespace

void kv_check(const char* op, const Context& ctx, const KvCacheView& cache, TensorView index) {
  const HostAccess host(op, ctx, cache);
  if (index.given()) checked_index(op, host.view, index);
}

void kv_reset(const Context& ctx, const KvCacheView& cache, TensorView rows) {
  const char* op = "reset";
  const HostAccess host(op, ctx, cache);
  const KvCacheView& c = host.view;
  const auto clear = [&](std::int64_t row) {
    c.lengths[row] = 0;
    if (is_kivi(c.format)) c.raw_from[row] = 0;
  };
  if (!rows.given()) {
    for (std::int64_t row = 0; row < c.max_rows; ++row) clear(row);
  } else {
    const Ints list = Ints::up_to(c.max_rows, "rows", op, "rows", rows);
    for (std::int64_t i = 0; i < list.size(); ++i) check_row(op, "rows", c, list[i]);
    for (std::int64_t i = 0; i < list.size(); ++i) clear(list[i]);
  }
  host.commit();
}

void kv_copy_pages(const Context& ctx, const KvCacheView& c, TensorView src, TensorView dst) {
  const char* op = "copy_pages";
  const Ints from = Ints::up_to(c.pages, "pages", op, "src", src), to(op, "dst", dst, from.size(), "[src]");
  for (const auto& [argument, list] : {std::pair{"src", &from}, {"dst", &to}})
    for (std::int64_t i = 0; i < list->size(); ++i)
      ROOFTILE_CHECK((*list)[i] >= 0 && (*list)[i] < c.pages, op, ": ", argument, " must lie in [0, ", c.pages,
                     "), got ", (*list)[i]);
  const HostAccess host(op, ctx, c);
  for (std::int64_t i = 0; i < from.size(); ++i) copy_page(host, from[i], to[i]);
}

void kv_copy_row(const Context& ctx, const KvCacheView& cache, int src, int dst, int first_page) {
  const char* op = "fork";
  check_row(op, "src", cache, src);
  check_row(op, "dst", cache, dst);
  HostAccess host(op, ctx, cache);
  host.stage_table({src, dst});
  const KvCacheView& c = host.view;
  const std::int64_t length = length_of(op, c, src), begin = std::int64_t{first_page} * c.page_size;
  ROOFTILE_CHECK(first_page >= 0, op, ": first_page must be at least 0, got ", first_page);
  check_pages(op, c, src, begin, length);
  check_pages(op, c, dst, begin, length);
  if (src == dst) return;
  for (std::int64_t token = begin; token < length; token += c.page_size)
    copy_page(host, kv_page(c, src, token), kv_page(c, dst, token));
  copy_ring(host, src, dst);
  c.lengths[dst] = c.lengths[src];
  host.commit();
}

namespace {

// A saved copy of one row, so that a cycle of rows can be permuted.
class SavedRow {
 public:
  SavedRow(const HostAccess& host, std::int64_t row, bool pages)
      : host_(host), c_(host.view), pages_(pages ? pages_for(c_, c_.lengths[row]) : 0) {
    length_ = c_.lengths[row];
    walk(row, [this](std::byte* p, std::int64_t n) {
      bytes_.resize(bytes_.size() + static_cast<std::size_t>(n));
      host_.copy(bytes_.data() + bytes_.size() - n, p, n);
    });
    if (is_kivi(c_.format)) raw_from_ = c_.raw_from[row];
  }
  void put(std::int64_t row) {
    std::size_t at = 0;
    walk(row, [&](std::byte* p, std::int64_t n) {
      host_.copy(p, bytes_.data() + at, n);
      at += static_cast<std::size_t>(n);
    });
    if (is_kivi(c_.format)) c_.raw_from[row] = raw_from_;
    c_.lengths[row] = length_;
  }

 private:
  template <class Visit>
  void walk(std::int64_t row, const Visit& visit) const {
    for (std::int64_t i = 0; i < pages_; ++i)
      for_each_contiguous(c_, [&](std::byte* base, std::int64_t stride, std::int64_t bytes) {
        visit(base + kv_page(c_, row, i * c_.page_size) * stride, bytes);
      });
    if (!is_kivi(c_.format)) return;
    const std::int64_t bytes = ring_bytes(c_);
    for (std::byte* ring : {c_.ring_k, c_.ring_v}) visit(ring + row * bytes, bytes);
  }

  const HostAccess& host_;
  const KvCacheView& c_;
  std::int64_t pages_;
  std::vector<std::byte> bytes_;
  std::int32_t length_ = 0, raw_from_ = 0;
};

}  // namespace

void kv_reorder(const Context& ctx, const KvCacheView& cache, TensorView index, bool move_pages) {
  const char* op = "reorder";
  const HostAccess host(op, ctx, cache);
  const KvCacheView& c = host.view;
  const Ints list = checked_index(op, c, index);
  ROOFTILE_CHECK(!move_pages || !cache.block_table, op, ": rows of a paged cache are reordered by their table");
  const auto move = [&](std::int64_t from, std::int64_t to) {
    if (move_pages)
      for (std::int64_t t = 0; t < c.lengths[from]; t += c.page_size)
        copy_page(host, kv_page(c, from, t), kv_page(c, to, t));
    copy_ring(host, from, to);
    c.lengths[to] = c.lengths[from];
  };
  // Rows without readers are overwritten first. The remaining rows form cycles; each cycle is moved through one saved
  // row.
  std::vector<int> readers(static_cast<std::size_t>(c.max_rows), 0);
  std::vector<bool> done(static_cast<std::size_t>(c.max_rows), false);
  const auto at = [](std::int64_t i) { return static_cast<std::size_t>(i); };
  for (std::int64_t i = 0; i < c.max_rows; ++i)
    if (list[i] == i) done[at(i)] = true;
    else ++readers[at(list[i])];
  for (std::int64_t start = 0; start < c.max_rows; ++start)
    for (std::int64_t i = start; !done[at(i)] && readers[at(i)] == 0; i = list[i]) {
      move(list[i], i);
      done[at(i)] = true;
      --readers[at(list[i])];
    }
  for (std::int64_t start = 0; start < c.max_rows; ++start) {
    if (done[at(start)]) continue;
    SavedRow saved(host, start, move_pages);
    std::int64_t i = start;
    for (; list[i] != start; i = list[i]) {
      move(list[i], i);
      done[at(i)] = true;
    }
    saved.put(i);
    done[at(i)] = true;
  }
  host.commit();
}

void kv_dequantize(const Context& ctx, const KvCacheView& c, int row, std::int64_t at, TensorView out_k,
                   TensorView out_v, const char* op) {
  check_on_host(op, c);
  check_row(op, "row", c, row);
  const std::int64_t length = length_of(op, c, row);
  ROOFTILE_CHECK(at >= 0 && at <= length, op, ": at must lie in [0, ", length, "] for row ", row, ", got ", at);
  const std::int64_t tokens = std::min(at + 1, length);
  const std::int64_t coded = is_kivi(c.format) ? kivi_code_end(at) : is_element_format(c.format) ? 0 : tokens;
  ROOFTILE_CHECK(!is_kivi(c.format) || coded >= raw_begin(c, row), op, ": the query at position ", at, " of row ", row,
                 " sees raw tokens from position ", coded, " on, but the cache holds them only from position ",
                 raw_begin(c, row), " on");
  check_pages(op, c, row, 0, tokens);
  for (const auto& [argument, t] : {std::pair{"out_k", &out_k}, {"out_v", &out_v}})
    Arg(op, argument, *t)
        .given()
        .dtype({DType::f32})
        .shape({tokens, c.kv_heads, c.head_dim}, "[tokens, kv_heads, head_dim]")
        .device({}, "the host")
        .writable();
  check::check_disjoint(op, "out_v", out_v, {{"out_k", out_k}});
  check::check_disjoint(op, {{"out_k", out_k}, {"out_v", out_v}}, c);
  cpu::kv_dequantize(Parallel(ctx.threads), c, row, coded, out_k, out_v);
}

void kv_dump_codes(const Context&, const KvCacheView& c, int row, TensorView out_k, TensorView out_v) {
  const char* op = "dump";
  check_on_host(op, c);
  check_row(op, "row", c, row);
  check_quantised(op, c);
  const std::int64_t tokens = coded_tokens(op, c, row);
  check_pages(op, c, row, 0, tokens);
  for (const auto& [argument, t] : {std::pair{"out_k", &out_k}, {"out_v", &out_v}})
    Arg(op, argument, *t)
        .given()
        .dtype({is_e4m3(c.format) ? DType::u8 : DType::i8})
        .shape({tokens, c.kv_heads, c.head_dim}, "[tokens, kv_heads, head_dim]")
        .device({}, "the host")
        .writable();
  check::check_disjoint(op, "out_v", out_v, {{"out_k", out_k}});
  check::check_disjoint(op, {{"out_k", out_k}, {"out_v", out_v}}, c);
  cpu::kv_dump_codes(c, row, out_k, out_v);
}

void kv_dump_scales(const Context&, const KvCacheView& c, int row, KvSide side, bool minima, TensorView out) {
  const char* op = "dump";
  check_on_host(op, c);
  check_row(op, "row", c, row);
  check_quantised(op, c);
  ROOFTILE_CHECK(!minima || has_min(c.format), op, ": a cache of format ", name(c.format), " has no minima");
  const std::int64_t tokens = coded_tokens(op, c, row);
  check_pages(op, c, row, 0, tokens);
  const int step = side == KvSide::k && is_kivi(c.format) ? kv_group : 1, width = step == 1 ? 1 : c.head_dim;
  Arg(op, "out", out)
      .given()
      .dtype({DType::f32})
      .shape({tokens / step, c.kv_heads, width}, "[groups, kv_heads, channels]")
      .device({}, "the host")
      .writable();
  check::check_disjoint(op, {{"out", out}}, c);
  cpu::kv_dump_scales(c, row, side, minima, out);
}

}  // namespace rooftile
