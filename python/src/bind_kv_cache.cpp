// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <vector>

#include "bind.h"
#include "kv_cache_handle.h"
#include "rooftile/error.h"
#include "rooftile/names.h"
#include "tensor_caster.h"

namespace rooftile::python {

using namespace nb::literals;
using nb::handle;

namespace {

// One cache: its shape, its arrays, and the view made from them.
class KvCache {
 public:
  enum { pool, k_pool, v_pool, block_table, lengths, ring_k, ring_v, raw_from, fault, array_count };
  static constexpr const char* names[] = {"pool",   "k_pool", "v_pool",   "block_table", "lengths",
                                          "ring_k", "ring_v", "raw_from", "fault"};

  // shared: names of the arrays that somebody else can reach, and so move, whatever else becomes of them. sources: of a
  // view on elements, the caller's pool or its two, of which k_pool and v_pool are views; else empty.
  KvCache(Args& args, const KvCacheShape& shape, const handle (&arrays)[array_count], handle shared, handle sources)
      : shape_(shape) {
    for (int i = 0; i < array_count; ++i) {
      const bool renamed = i == lengths && !arrays[block_table].is_none();
      arrays_.emplace_back(arrays[i], renamed ? "seq_lens" : names[i],
                           i == block_table ? HeldArray::Use::read : HeldArray::Use::written);
      if (!arrays[i].is_none() && PySequence_Contains(shared.ptr(), nb::str(names[i]).ptr()) == 1) shared_.push_back(i);
    }
    for (handle source : sources) sources_.emplace_back(source, "pool", HeldArray::Use::written);
    take(args);
  }
  ~KvCache() { leave_memory(); }

  const LockedCache& now(Args& args) {
    bool same = taken_;
    for (std::size_t i = 0; same && i < shared_.size(); ++i) same = arrays_[shared_[i]].as_taken();
    for (std::size_t i = 0; same && i < sources_.size(); ++i) same = sources_[i].as_taken();
    if (!same) take(args);
    return cache_;
  }
  // A counter that changes whenever arrays are taken again.
  std::int64_t times_taken() const { return times_taken_; }

 private:
  void take(Args& args) {
    taken_ = false;
    TensorView t[array_count];
    std::vector<Memory> memory;  // that calls on this cache write, and so may those on another one
    for (std::size_t i = 0; i < array_count; ++i) {
      const bool pages = i == pool || i == k_pool || i == v_pool;
      const bool whole = pages || std::find(shared_.begin(), shared_.end(), i) != shared_.end();
      t[i] = whole ? arrays_[i].take(args) : arrays_[i].read(args);
      if (t[i].given() && i != block_table) memory.push_back(pages ? arrays_[i].memory() : Memory::of(t[i]));
    }
    cache_.view = kv_cache_view(shape_,
                                {.pool = t[pool],
                                 .k_pool = t[k_pool],
                                 .v_pool = t[v_pool],
                                 .block_table = t[block_table],
                                 .lengths = t[lengths],
                                 .ring_k = t[ring_k],
                                 .ring_v = t[ring_v],
                                 .raw_from = t[raw_from],
                                 .fault = t[fault]},
                                args.op());
    for (std::size_t i = 0; i < sources_.size(); ++i) {
      const TensorView source = sources_[i].take(args);
      // The sides that lie in it: both in one pool, or one each.
      const auto first = i == 1 ? v_pool : k_pool, last = sources_.size() == 2 ? first : v_pool;
      const auto& side = first == v_pool ? cache_.view.v : cache_.view.k;
      const Memory& now = sources_[i].memory();
      const auto holds = [&](std::size_t pages) { return !t[pages].given() || Memory::of(t[pages]).end <= now.end; };
      ROOFTILE_CHECK(
          source.data == side.codes && holds(first) && holds(last), args.op(),
          ": pool has other memory (data=, swap_tensors) than when this view was made; make a view on it as it is now");
    }
    if (!cache_.locks || memory != memory_) share_locks(std::move(memory));
    taken_ = true;
    ++times_taken_;
  }

  // Takes the locks of all caches over any of this memory. Where there are none this cache keeps its own: views on a
  // pool that is moved find each other again.
  void share_locks(std::vector<Memory> memory) {
    leave_memory();
    PoolLocks::List found;
    for (const KvCache* other : caches())
      if (std::any_of(memory.begin(), memory.end(), [&](const Memory& m) { return other->lies_over(m); }))
        for (const auto& lock : other->cache_.locks->each())
          if (std::find(found.begin(), found.end(), lock) == found.end()) found.push_back(lock);
    if (found.empty() && !cache_.locks) found.push_back(std::make_shared<PoolLock>());
    if (!found.empty()) cache_.locks = std::make_shared<PoolLocks>(std::move(found));
    memory_ = std::move(memory);
    caches().push_back(this);
  }
  void leave_memory() { std::erase(caches(), this); }
  bool lies_over(const Memory& other) const {
    return std::any_of(memory_.begin(), memory_.end(), [&](const Memory& m) { return m.overlaps(other); });
  }
  // All that have locks. Guarded by the GIL.
  static std::vector<KvCache*>& caches() {
    static auto* const all = new std::vector<KvCache*>;  // outlives those that the interpreter's shutdown destroys
    return *all;
  }

  KvCacheShape shape_;
  std::vector<HeldArray> arrays_, sources_;
  std::vector<std::size_t> shared_;  // of arrays_
  LockedCache cache_;
  std::vector<Memory> memory_;  // as of share_locks
  bool taken_ = false;          // cache_ is of the arrays as they were taken
  std::int64_t times_taken_ = 0;
};

// A cache's locks, held by the thread that made this: `with handle.exclusive(op) as held:` around several calls. Those
// that take `held` for the cache see its arrays as they were when the locks were taken, and do not ask for them once
// more. undivided: the thread, which may run a signal handler or a finaliser inside the block, begins no other
// undivided one there.
class Exclusive {
 public:
  Exclusive(Args& args, nb::handle_t<KvCache> owner, bool undivided)
      : owner_(nb::borrow(owner)), cache_(nb::inst_ptr<KvCache>(owner)->now(args)), undivided_(undivided) {
    PoolLocks::List taken;  // here, by no block around this one
    for (const auto& lock : cache_.locks->each()) {
      if (!lock->mine()) taken.push_back(lock);
      else if (undivided && !lock->undivided.empty())
        fail(ErrorKind::not_supported, args.op(), ": this cache is in the middle of ", lock->undivided,
             ", which a signal handler or a finaliser (__del__) of the same thread interrupts; call ", args.op(),
             " after ", lock->undivided, " has returned");
    }
    if (!cache_.locks->try_lock()) {
      const nb::gil_scoped_release unlocked;
      cache_.locks->lock();
    }
    for (const auto& lock : taken) lock->undivided.clear();  // a forked child's copy may hold the parent's name
    if (undivided)
      for (const auto& lock : cache_.locks->each()) lock->undivided = args.op();
  }
  Exclusive(Exclusive&&) = default;
  ~Exclusive() { leave(); }
  void leave() {
    if (!cache_.locks) return;
    if (undivided_)
      for (const auto& lock : cache_.locks->each()) lock->undivided.clear();
    cache_.locks->unlock();
    cache_.locks.reset();
  }
  bool held() const { return cache_.locks != nullptr; }
  const LockedCache& cache() const { return cache_; }

 private:
  nb::object owner_;  // of what cache_ points to
  LockedCache cache_;
  bool undivided_;
};

DType dtype_from_name(const char* op, const char* text) {
  for (DType d : {DType::f32, DType::f16, DType::bf16})
    if (std::string(name(d)) == text) return d;
  fail(ErrorKind::type, op, ": dtype must be float32, float16 or bfloat16, got ", quoted(text));
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

}  // namespace

LockedCache locked_cache(Args& args, handle cache) {
  // Both types are final, so a comparison is enough.
  static const handle cache_type = nb::type<KvCache>(), exclusive_type = nb::type<Exclusive>();
  if (cache.type().is(cache_type)) return nb::inst_ptr<KvCache>(cache)->now(args);
  if (cache.type().is(exclusive_type) && nb::inst_ptr<Exclusive>(cache)->held())
    return nb::inst_ptr<Exclusive>(cache)->cache();
  static PyObject* const name = PyUnicode_InternFromString("_handle");
  nb::object inner = nb::getattr(cache, nb::handle(name), nb::none());
  if (inner.type().is(cache_type)) return nb::inst_ptr<KvCache>(inner)->now(args);  // the owner keeps it alive
  const nb::object type_name = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(cache.ptr()))).attr("__name__");
  fail(ErrorKind::type, args.op(), ": cache must be a rooftile KVCache or PagedKVCache, got ",
       nb::str(type_name).c_str());
}

void bind_kv_cache(nb::module_& m) {
  m.attr("kv_fault_raised") = kv_fault_raised;
  nb::class_<KvCache>(m, "KvCache", nb::is_final())
      .def(
          "__init__",
          [](KvCache* self, handle format, handle dtype, handle page_size, handle head_dim, handle kv_heads,
             handle max_rows, handle max_pages, handle pool, handle k_pool, handle v_pool, handle block_table,
             handle lengths, handle ring_k, handle ring_v, handle raw_from, handle fault, const char* op, handle shared,
             handle sources) {
            Args args(op);
            KvCacheShape shape;
            shape.format = kv_format_from_name(op, args.text(format, "format"));
            shape.dtype = dtype_from_name(op, args.text(dtype, "dtype"));
            shape.page_size = args.integer(page_size, "page_size");
            shape.head_dim = args.integer(head_dim, "head_dim");
            shape.kv_heads = args.integer(kv_heads, "kv_heads");
            shape.max_rows = args.integer(max_rows, "max_rows");
            shape.max_pages = args.integer(max_pages, "max_pages");
            const handle arrays[] = {pool, k_pool, v_pool, block_table, lengths, ring_k, ring_v, raw_from, fault};
            new (self) KvCache(args, shape, arrays, shared, sources);
          },
          "format"_a, "dtype"_a, "page_size"_a, "head_dim"_a, "kv_heads"_a, "max_rows"_a, "max_pages"_a,
          "pool"_a.none(), "k_pool"_a.none(), "v_pool"_a.none(), "block_table"_a.none(), "lengths"_a.none(),
          "ring_k"_a.none(), "ring_v"_a.none(), "raw_from"_a.none(), "fault"_a.none() = nb::none(), "op"_a = "KVCache",
          "shared"_a = nb::make_tuple(), "sources"_a = nb::make_tuple())
      .def(
          "exclusive",
          [](nb::handle_t<KvCache> self, const char* op, bool undivided) {
            Args args(op);
            return Exclusive(args, self, undivided);
          },
          "op"_a, "undivided"_a = false)
      .def_prop_ro("times_taken", &KvCache::times_taken);
  nb::class_<Exclusive>(m, "Exclusive", nb::is_final())
      .def("__enter__", [](nb::handle_t<Exclusive> self) { return nb::borrow<nb::object>(self); })
      .def(
          "__exit__", [](Exclusive& self, handle, handle, handle) { self.leave(); }, "kind"_a.none(), "error"_a.none(),
          "trace"_a.none());

  m.def(
      "kv_block_bytes",
      [](handle format, handle page_size, handle head_dim, const char* op) {
        Args args(op);
        return kv_block_bytes(kv_format_from_name(args.op(), args.text(format, "format")),
                              small(args, page_size, "page_size"), small(args, head_dim, "head_dim"), op);
      },
      "format"_a, "page_size"_a, "head_dim"_a, "op"_a = "KVCache");
  m.def(
      "check_kv_format",
      [](const char* op, handle format) {
        Args args(op);
        kv_format_from_name(op, args.text(format, "format"));
      },
      "op"_a, "format"_a.none());
  m.def(
      "kv_append",
      [](handle cache, handle k, handle v, handle rows, handle counts, handle stream, handle plan) {
        Args args("append");
        const TensorView tk = args.in(k, "k"), tv = args.in(v, "v");
        const TensorView tr = args.optional(rows, "rows"), tc = args.optional(counts, "counts");
        const LockedCache on = locked_cache(args, cache);
        const Context ctx = args.context(tk, stream, plan);
        return kernel_of(run_locked(on, CacheUse::writes, [&] { return kv_append(ctx, on.view, tk, tv, tr, tc); }));
      },
      "cache"_a.none(), "k"_a.none(), "v"_a.none(), "rows"_a.none(), "counts"_a.none(), "stream"_a.none(),
      "plan"_a.none());

  m.def(
      "kv_check",
      [](const char* op, handle cache, handle index, handle stream) {
        Args args(op);
        const TensorView list = args.optional(index, "index");
        const LockedCache on = locked_cache(args, cache);
        const Context ctx = cache_context(args, on.view, stream);
        run_locked(on, CacheUse::writes, [&] { kv_check(op, ctx, on.view, list); });
      },
      "op"_a, "cache"_a.none(), "index"_a.none(), "stream"_a.none());
  m.def(
      "kv_truncate",
      [](handle cache, handle rows, handle lengths, handle stream) {
        Args args("truncate");
        const TensorView tr = args.in(rows, "rows"), tl = args.in(lengths, "lengths");
        const LockedCache on = locked_cache(args, cache);
        const Context ctx = cache_context(args, on.view, stream);
        run_locked(on, CacheUse::writes, [&] { kv_truncate(ctx, on.view, tr, tl); });
      },
      "cache"_a.none(), "rows"_a.none(), "lengths"_a.none(), "stream"_a.none());
  m.def(
      "kv_reset",
      [](handle cache, handle rows, handle stream) {
        Args args("reset");
        const TensorView tr = args.optional(rows, "rows");
        const LockedCache on = locked_cache(args, cache);
        const Context ctx = cache_context(args, on.view, stream);
        run_locked(on, CacheUse::writes, [&] { kv_reset(ctx, on.view, tr); });
      },
      "cache"_a.none(), "rows"_a.none(), "stream"_a.none());
  m.def(
      "kv_reorder",
      [](handle cache, handle index, handle move_pages, handle stream) {
        Args args("reorder");
        const TensorView list = args.in(index, "index");
        const bool pages_too = args.integer(move_pages, "move_pages") != 0;
        const LockedCache on = locked_cache(args, cache);
        const Context ctx = cache_context(args, on.view, stream);
        run_locked(on, CacheUse::writes, [&] { kv_reorder(ctx, on.view, list, pages_too); });
      },
      "cache"_a.none(), "index"_a.none(), "move_pages"_a, "stream"_a.none());
  m.def(
      "kv_copy_row",
      [](handle cache, handle src, handle dst, handle first_page, handle stream) {
        Args args("fork");
        const int from = small(args, src, "src"), to = small(args, dst, "dst"),
                  first = small(args, first_page, "first_page");
        const LockedCache on = locked_cache(args, cache);
        const Context ctx = cache_context(args, on.view, stream);
        run_locked(on, CacheUse::writes, [&] { kv_copy_row(ctx, on.view, from, to, first); });
      },
      "cache"_a.none(), "src"_a.none(), "dst"_a.none(), "first_page"_a, "stream"_a.none());
  m.def(
      "kv_copy_pages",
      [](handle cache, handle src, handle dst, handle stream) {
        Args args("copy_pages");
        const TensorView from = args.in(src, "src"), to = args.in(dst, "dst");
        const LockedCache on = locked_cache(args, cache);
        const Context ctx = cache_context(args, on.view, stream);
        run_locked(on, CacheUse::writes, [&] { kv_copy_pages(ctx, on.view, from, to); });
      },
      "cache"_a.none(), "src"_a.none(), "dst"_a.none(), "stream"_a.none());

  m.def(
      "kv_dequantize",
      [](const char* op, handle cache, handle row, handle at, handle out_k, handle out_v) {
        Args args(op);
        const int r = small(args, row, "row");
        const std::int64_t position = args.integer(at, "at");
        const TensorView k = args.out(out_k, "out_k"), v = args.out(out_v, "out_v");
        const LockedCache on = locked_cache(args, cache);
        const Context ctx = cache_context(args, on.view);
        run_locked(on, CacheUse::reads, [&] { kv_dequantize(ctx, on.view, r, position, k, v, op); });
      },
      "op"_a, "cache"_a.none(), "row"_a, "at"_a, "out_k"_a.none(), "out_v"_a.none());
  m.def(
      "kv_dump_codes",
      [](handle cache, handle row, handle out_k, handle out_v) {
        Args args("dump");
        const int r = small(args, row, "row");
        const TensorView k = args.out(out_k, "out_k"), v = args.out(out_v, "out_v");
        const LockedCache on = locked_cache(args, cache);
        const Context ctx = cache_context(args, on.view);
        run_locked(on, CacheUse::reads, [&] { kv_dump_codes(ctx, on.view, r, k, v); });
      },
      "cache"_a.none(), "row"_a, "out_k"_a.none(), "out_v"_a.none());
  m.def(
      "kv_dump_scales",
      [](handle cache, handle row, handle values, handle minima, handle out) {
        Args args("dump");
        const int r = small(args, row, "row");
        const KvSide side = args.integer(values, "values") != 0 ? KvSide::v : KvSide::k;
        const bool of_minima = args.integer(minima, "minima") != 0;
        const TensorView to = args.out(out, "out");
        const LockedCache on = locked_cache(args, cache);
        const Context ctx = cache_context(args, on.view);
        run_locked(on, CacheUse::reads, [&] { kv_dump_scales(ctx, on.view, r, side, of_minima, to); });
      },
      "cache"_a.none(), "row"_a, "values"_a, "minima"_a, "out"_a.none());
}

}  // namespace rooftile::python
