// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "bind.h"
#include "kv_cache_handle.h"
#include "rooftile/error.h"
#include "tensor_caster.h"

namespace rooftile::python {

using namespace nb::literals;
using nb::handle;

namespace {

struct KvCache {
  KvCacheView view;
  std::vector<nb::object> arrays;   // whose memory the view points into
};

DType dtype_from_name(const char* op, const char* text) {
  for (DType d : {DType::f32, DType::f16, DType::bf16})
    if (std::string(name(d)) == text) return d;
  fail(ErrorKind::type, op, ": dtype must be float32, float16 or bfloat16, got ", text);
}

// A row or page number.
int small(Args& args, handle h, const char* argument) {
  const std::int64_t value = args.integer(h, argument);
  ROOFTILE_CHECK(value == static_cast<int>(value), args.op(), ": ", argument, " does not fit 32 bits: ", value);
  return static_cast<int>(value);
}

// Where the cache lies. stream: an integer handle, or None on the CPU.
Context cache_context(Args& args, const KvCacheView& c, handle stream = nb::none()) {
  Context ctx;
  ctx.device = c.device;
  if (!stream.is_none()) ctx.stream = reinterpret_cast<void*>(args.integer(stream, "stream"));
  return ctx;
}

}   // namespace

const KvCacheView& cache_view(handle cache, const char* op) {
  if (nb::isinstance<KvCache>(cache)) return nb::inst_ptr<KvCache>(cache)->view;
  nb::object inner = nb::getattr(cache, "_handle", nb::none());
  if (nb::isinstance<KvCache>(inner)) return nb::inst_ptr<KvCache>(inner)->view;   // the owner keeps it alive
  const nb::object type_name = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(cache.ptr()))).attr("__name__");
  fail(ErrorKind::type, op, ": cache must be a rooftile KVCache or PagedKVCache, got ", nb::str(type_name).c_str());
}

void bind_kv_cache(nb::module_& m) {
  m.attr("kv_fault_raised") = kv_fault_raised;
  nb::class_<KvCache>(m, "KvCache")
      .def(
          "__init__",
          [](KvCache* self, handle format, handle dtype, handle page_size, handle head_dim, handle kv_heads,
             handle max_rows, handle max_pages, handle pool, handle k_pool, handle v_pool, handle block_table,
             handle lengths, handle ring_k, handle ring_v, handle raw_from, handle fault, const char* op) {
            Args args(op);
            KvCacheShape shape;
            shape.format = kv_format_from_name(op, args.text(format, "format"));
            shape.dtype = dtype_from_name(op, args.text(dtype, "dtype"));
            shape.page_size = args.integer(page_size, "page_size");
            shape.head_dim = args.integer(head_dim, "head_dim");
            shape.kv_heads = args.integer(kv_heads, "kv_heads");
            shape.max_rows = args.integer(max_rows, "max_rows");
            shape.max_pages = args.integer(max_pages, "max_pages");
            KvCacheArrays arrays;
            arrays.pool = args.optional_out(pool, "pool");
            arrays.k_pool = args.optional_out(k_pool, "k_pool");
            arrays.v_pool = args.optional_out(v_pool, "v_pool");
            arrays.block_table = args.optional(block_table, "block_table");
            arrays.lengths = args.optional_out(lengths, block_table.is_none() ? "lengths" : "seq_lens");
            arrays.ring_k = args.optional_out(ring_k, "ring_k");
            arrays.ring_v = args.optional_out(ring_v, "ring_v");
            arrays.raw_from = args.optional_out(raw_from, "raw_from");
            arrays.fault = args.optional_out(fault, "fault");
            const KvCacheView view = kv_cache_view(shape, arrays, op);
            new (self) KvCache{view, {}};
            for (handle h : {pool, k_pool, v_pool, block_table, lengths, ring_k, ring_v, raw_from, fault})
              self->arrays.push_back(nb::borrow(h));
          },
          "format"_a, "dtype"_a, "page_size"_a, "head_dim"_a, "kv_heads"_a, "max_rows"_a, "max_pages"_a,
          "pool"_a.none(), "k_pool"_a.none(), "v_pool"_a.none(), "block_table"_a.none(), "lengths"_a.none(),
          "ring_k"_a.none(), "ring_v"_a.none(), "raw_from"_a.none(), "fault"_a.none() = nb::none(), "op"_a = "KVCache");

  m.def(
      "kv_block_bytes",
      [](handle format, handle page_size, handle head_dim, const char* op) {
        Args args(op);
        return kv_block_bytes(kv_format_from_name(args.op(), args.text(format, "format")), small(args, page_size, "page_size"),
                              small(args, head_dim, "head_dim"), op);
      },
      "format"_a, "page_size"_a, "head_dim"_a, "op"_a = "KVCache");
  m.def("kv_formats", [] {
    nb::list names;
    for (int i = 0; i < kv_format_count; ++i) names.append(name(static_cast<KvFormat>(i)));
    return names;
  });

  m.def(
      "kv_append",
      [](handle cache, handle k, handle v, handle rows, handle counts, handle stream, handle plan) {
        Args args("append");
        const KvCacheView& c = cache_view(cache, "append");
        const TensorView tk = args.in(k, "k"), tv = args.in(v, "v");
        const TensorView tr = args.optional(rows, "rows"), tc = args.optional(counts, "counts");
        const Context ctx = args.context(tk, stream, plan);
        return run([&] { return kv_append(ctx, c, tk, tv, tr, tc); });
      },
      "cache"_a.none(), "k"_a.none(), "v"_a.none(), "rows"_a.none(), "counts"_a.none(), "stream"_a.none(),
      "plan"_a.none());

  m.def(
      "kv_check",
      [](const char* op, handle cache, handle index, handle stream) {
        Args args(op);
        const KvCacheView& c = cache_view(cache, op);
        const TensorView list = args.optional(index, "index");
        const Context ctx = cache_context(args, c, stream);
        const nb::gil_scoped_release unlocked;
        kv_check(op, ctx, c, list);
      },
      "op"_a, "cache"_a.none(), "index"_a.none(), "stream"_a.none());
  m.def(
      "kv_truncate",
      [](handle cache, handle rows, handle lengths, handle stream) {
        Args args("truncate");
        const KvCacheView& c = cache_view(cache, "truncate");
        const TensorView tr = args.in(rows, "rows"), tl = args.in(lengths, "lengths");
        const Context ctx = cache_context(args, c, stream);
        const nb::gil_scoped_release unlocked;
        kv_truncate(ctx, c, tr, tl);
      },
      "cache"_a.none(), "rows"_a.none(), "lengths"_a.none(), "stream"_a.none());
  m.def(
      "kv_reset",
      [](handle cache, handle rows, handle stream) {
        Args args("reset");
        const KvCacheView& c = cache_view(cache, "reset");
        const TensorView tr = args.optional(rows, "rows");
        const Context ctx = cache_context(args, c, stream);
        const nb::gil_scoped_release unlocked;
        kv_reset(ctx, c, tr);
      },
      "cache"_a.none(), "rows"_a.none(), "stream"_a.none());
  m.def(
      "kv_reorder",
      [](handle cache, handle index, handle move_pages, handle stream) {
        Args args("reorder");
        const KvCacheView& c = cache_view(cache, "reorder");
        const TensorView list = args.in(index, "index");
        const bool pages_too = args.integer(move_pages, "move_pages") != 0;
        const Context ctx = cache_context(args, c, stream);
        const nb::gil_scoped_release unlocked;
        kv_reorder(ctx, c, list, pages_too);
      },
      "cache"_a.none(), "index"_a.none(), "move_pages"_a, "stream"_a.none());
  m.def(
      "kv_copy_row",
      [](handle cache, handle src, handle dst, handle first_page, handle stream) {
        Args args("fork");
        const KvCacheView& c = cache_view(cache, "fork");
        const int from = small(args, src, "src"), to = small(args, dst, "dst"), first = small(args, first_page, "first_page");
        const Context ctx = cache_context(args, c, stream);
        const nb::gil_scoped_release unlocked;
        kv_copy_row(ctx, c, from, to, first);
      },
      "cache"_a.none(), "src"_a.none(), "dst"_a.none(), "first_page"_a, "stream"_a.none());
  m.def(
      "kv_copy_pages",
      [](handle cache, handle src, handle dst, handle stream) {
        Args args("copy_pages");
        const KvCacheView& c = cache_view(cache, "copy_pages");
        const TensorView from = args.in(src, "src"), to = args.in(dst, "dst");
        const Context ctx = cache_context(args, c, stream);
        const nb::gil_scoped_release unlocked;
        kv_copy_pages(ctx, c, from, to);
      },
      "cache"_a.none(), "src"_a.none(), "dst"_a.none(), "stream"_a.none());

  m.def(
      "kv_dequantize",
      [](handle cache, handle row, handle at, handle out_k, handle out_v) {
        Args args("dequantize");
        const KvCacheView& c = cache_view(cache, "dequantize");
        const int r = small(args, row, "row");
        const std::int64_t position = args.integer(at, "at");
        const TensorView k = args.out(out_k, "out_k"), v = args.out(out_v, "out_v");
        const Context ctx = cache_context(args, c);
        const nb::gil_scoped_release unlocked;
        kv_dequantize(ctx, c, r, position, k, v);
      },
      "cache"_a.none(), "row"_a, "at"_a, "out_k"_a.none(), "out_v"_a.none());
  m.def(
      "kv_dump_codes",
      [](handle cache, handle row, handle out_k, handle out_v) {
        Args args("dump");
        const KvCacheView& c = cache_view(cache, "dump");
        kv_dump_codes(cache_context(args, c), c, small(args, row, "row"), args.out(out_k, "out_k"), args.out(out_v, "out_v"));
      },
      "cache"_a.none(), "row"_a, "out_k"_a.none(), "out_v"_a.none());
  m.def(
      "kv_dump_scales",
      [](handle cache, handle row, handle values, handle minima, handle out) {
        Args args("dump");
        const KvCacheView& c = cache_view(cache, "dump");
        kv_dump_scales(cache_context(args, c), c, small(args, row, "row"),
                       args.integer(values, "values") != 0 ? KvSide::v : KvSide::k, args.integer(minima, "minima") != 0,
                       args.out(out, "out"));
      },
      "cache"_a.none(), "row"_a, "values"_a, "minima"_a, "out"_a.none());
}

}   // namespace rooftile::python
