// SPDX-License-Identifier: Apache-2.0
#include "calls.h"

#include <cstddef>

#include "rooftile/error.h"

namespace rooftile::python {

namespace nb = nanobind;

namespace {
constexpr const char* name = "Calls";
thread_local Calls* list_of_thread = nullptr;

// This thread's record() fills a list while it lives.
class Recording {
 public:
  explicit Recording(Calls* list) : outer_(std::exchange(list_of_thread, list)) {}
  ~Recording() { list_of_thread = outer_; }
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;

 private:
  Calls* outer_;
};
}  // namespace

Calls* Calls::recording() { return list_of_thread; }

void Calls::add(const Context& ctx, nb::object cache, CacheUse use, Op op) {
  ROOFTILE_CHECK_KIND(not_supported, ctx.device.type == DeviceType::cpu, name,
                      ": calls on a GPU cannot be kept; capture them in a CUDA graph");
  int index = -1;
  if (cache.is_valid()) {
    index = 0;
    while (index < static_cast<int>(caches_.size()) && !caches_[static_cast<std::size_t>(index)].is(cache)) ++index;
    if (index == static_cast<int>(caches_.size())) caches_.push_back(std::move(cache));
  }
  Context own = ctx;
  own.lender = nullptr;  // of the call alone; the CPU needs none
  calls_.push_back({own, index, use, std::move(op)});
}

nb::list Calls::record(nb::list calls) {
  calls_.clear();
  caches_.clear();
  nb::list results;
  try {
    const Recording recording(this);
    for (nb::handle call : calls) {
      const std::size_t before = calls_.size();
      results.append(call());
      ROOFTILE_CHECK_KIND(not_supported, calls_.size() == before + 1, name, ": call ", results.size() - 1,
                          " is none that can be kept");
    }
  } catch (...) {
    calls_.clear();
    caches_.clear();
    throw;
  }
  return results;
}

void Calls::run() const {
  Args args(name);
  std::vector<LockedCache> caches;
  caches.reserve(caches_.size());
  for (const nb::object& cache : caches_) caches.push_back(locked_cache(args, cache));
  const nb::gil_scoped_release unlocked;
  for (const Call& call : calls_) {
    if (call.cache < 0) {
      call.op(call.ctx, nullptr);
      continue;
    }
    const LockedCache& on = caches[static_cast<std::size_t>(call.cache)];
    with_locks(on, call.use, [&] { return call.op(call.ctx, &on.view); });
  }
}

void bind_calls(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<Calls>(m, "Calls", nb::is_final())
      .def(nb::init<>())
      .def("record", &Calls::record, "calls"_a)
      .def("run", &Calls::run);
}

}  // namespace rooftile::python
