// SPDX-License-Identifier: Apache-2.0
// The cache argument of an op: a checked view of arrays that it keeps alive, and the locks of calls on them.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "bind.h"
#include "rooftile/cache_lock.h"
#include "rooftile/kv_cache.h"
#include "tensor_caster.h"

namespace rooftile::python {

struct PoolLock : CacheLock {
  std::string undivided;  // while it is held: the call in progress that no other may enter, empty if there is none
};

// The locks of one cache, at least one: two caches over common memory have a lock in common. Nearly always it is one;
// more where a cache lies over the memory of caches that have none in common. A thread that waits for one of them holds
// none of the others, as with std::lock.
class PoolLocks {
 public:
  using List = std::vector<std::shared_ptr<PoolLock>>;
  explicit PoolLocks(List each) : each_(std::move(each)) {}
  const List& each() const { return each_; }

  bool try_lock() { return busy<&CacheLock::try_lock, &CacheLock::unlock>(each_.size()) == each_.size(); }
  void lock() { take<&CacheLock::lock, &CacheLock::try_lock, &CacheLock::unlock>(); }
  void unlock() {
    for (const auto& lock : each_) lock->unlock();
  }
  void lock_shared() { take<&CacheLock::lock_shared, &CacheLock::try_lock_shared, &CacheLock::unlock_shared>(); }
  void unlock_shared() {
    for (const auto& lock : each_) lock->unlock_shared();
  }

 private:
  // Takes all locks but `held`. Where one is busy: takes none and returns its index, else each_.size().
  template <auto try_one, auto unlock_one>
  std::size_t busy(std::size_t held) {
    for (std::size_t i = 0; i < each_.size(); ++i) {
      if (i == held || ((*each_[i]).*try_one)()) continue;
      for (std::size_t taken = 0; taken < i; ++taken)
        if (taken != held) ((*each_[taken]).*unlock_one)();
      return i;
    }
    return each_.size();
  }
  template <auto lock_one, auto try_one, auto unlock_one>
  void take() {
    for (std::size_t first = 0;;) {
      ((*each_[first]).*lock_one)();
      const std::size_t next = busy<try_one, unlock_one>(first);
      if (next == each_.size()) return;
      ((*each_[first]).*unlock_one)();
      first = next;
    }
  }

  List each_;
};

struct LockedCache {
  KvCacheView view;
  std::shared_ptr<PoolLocks> locks;
};

// What is behind a cache argument: a `_C.KvCache`, or an object that holds one as `_handle` (rooftile.KVCache and the
// others of rooftile.kv_cache), or the locks of one that are held. Anything else is a type error. Valid as long as the
// argument lives, and where it is until Python code runs: taken behind all arguments that may run some (__dlpack__).
LockedCache locked_cache(Args&, nanobind::handle cache);

// Runs a call on a cache under the cache's locks, without the GIL; no thread waits for a lock while it holds the GIL.
// Reading calls share the locks on the CPU. On a GPU they lock exclusively, because they may raise and clear a fault.
enum class CacheUse { reads, writes };
template <class Op>
auto with_locks(const LockedCache& cache, CacheUse use, const Op& op) {  // the caller has released the GIL
  if (use == CacheUse::reads && cache.view.device.type == DeviceType::cpu) {
    const std::shared_lock held(*cache.locks);
    return op();
  }
  const std::lock_guard held(*cache.locks);
  return op();
}
template <class Op>
auto run_locked(const LockedCache& cache, CacheUse use, const Op& op) {
  const nanobind::gil_scoped_release unlocked;
  return with_locks(cache, use, op);
}

}  // namespace rooftile::python
