// SPDX-License-Identifier: Apache-2.0
// A list of calls with their arguments as the bindings took them, which are made again in one go: a decode step on the
// CPU, some 240 ops, whose arguments would otherwise be taken from Python objects at each step.
//
// What the arguments point to is the caller's to keep where it is, but for caches: their arrays are looked at each
// time.
#pragma once

#include <functional>
#include <utility>
#include <vector>

#include "bind.h"
#include "kv_cache_handle.h"

namespace rooftile::python {

class Calls {
 public:
  // Makes the calls, objects without arguments of which each is one repeatable binding on the CPU, and keeps them.
  // Returns what they return. After an exception it keeps none.
  nanobind::list record(nanobind::list calls);
  // Makes them again, in order, without the GIL. An exception of one ends it.
  void run() const;

  // The list that this thread's record() fills, or null.
  static Calls* recording();
  using Op = std::function<KernelName(const Context&, const KvCacheView*)>;
  // cache: the op's argument, or no object.
  void add(const Context&, nanobind::object cache, CacheUse, Op op);

 private:
  struct Call {
    Context ctx;
    int cache;  // index, or -1
    CacheUse use;
    Op op;
  };
  std::vector<Call> calls_;
  std::vector<nanobind::object> caches_;
};

// run() of an op that Calls may keep: op(ctx) is copied, with all that it takes.
template <class Op>
nanobind::str run_repeatable(const Context& ctx, const Op& op) {
  const nanobind::str kernel = run([&] { return op(ctx); });
  if (Calls* const list = Calls::recording())
    list->add(ctx, nanobind::object(), CacheUse::reads, [op](const Context& c, const KvCacheView*) { return op(c); });
  return kernel;
}

// The same of an op on a cache, under its locks: op(ctx, view).
template <class Op>
nanobind::str run_repeatable(const Context& ctx, nanobind::handle cache, const LockedCache& on, CacheUse use,
                             const Op& op) {
  const nanobind::str kernel = kernel_of(run_locked(on, use, [&] { return op(ctx, on.view); }));
  if (Calls* const list = Calls::recording())
    list->add(ctx, nanobind::borrow(cache), use,
              [op](const Context& c, const KvCacheView* view) { return op(c, *view); });
  return kernel;
}

void bind_calls(nanobind::module_& m);

}  // namespace rooftile::python
