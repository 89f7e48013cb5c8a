// SPDX-License-Identifier: Apache-2.0
// The cache argument of an op: a checked view of arrays that it keeps alive, and the lock of calls on them.
#pragma once

#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>

#include "bind.h"
#include "rooftile/cache_lock.h"
#include "rooftile/kv_cache.h"
#include "tensor_caster.h"

namespace rooftile::python {

struct PoolLock : CacheLock {
  std::string undivided;  // while it is held: the call in progress that no other may enter, empty if there is none
};

struct LockedCache {
  KvCacheView view;
  std::shared_ptr<PoolLock> lock;  // of all caches over the same pool
};

// What is behind a cache argument: a `_C.KvCache`, or an object that holds one as `_handle` (rooftile.KVCache and the
// others of rooftile.kv_cache), or the lock of one that is held. Anything else is a type error. Valid as long as the
// argument lives.
LockedCache locked_cache(Args&, nanobind::handle cache);

// Runs a call on a cache under the cache's lock, without the GIL; no thread waits for the lock while it holds the GIL.
// Reading calls share the lock on the CPU. On a GPU they lock exclusively, because they may raise and clear a fault.
enum class CacheUse { reads, writes };
template <class Op>
auto run_locked(const LockedCache& cache, CacheUse use, const Op& op) {
  nanobind::gil_scoped_release unlocked;
  if (use == CacheUse::reads && cache.view.device.type == DeviceType::cpu) {
    const std::shared_lock held(*cache.lock);
    return op();
  }
  const std::lock_guard held(*cache.lock);
  return op();
}

}  // namespace rooftile::python
