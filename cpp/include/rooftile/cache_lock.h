// SPDX-License-Identifier: Apache-2.0
// Serialises the calls of several threads on one cache. Ops do not lock: a caller that shares a cache among threads
// holds the cache's CacheLock around each call, shared if the call only reads the cache.
#pragma once

#include <atomic>
#include <cstdint>

namespace rooftile {

// Many readers or one writer; the writer may lock again, for reading too. A waiting writer keeps new readers out. An
// uncontended lock is one atomic operation. In a forked child every lock is free, because the threads that held it do
// not exist there. Satisfies the requirements of std::unique_lock and std::shared_lock.
class CacheLock {
 public:
  CacheLock();
  CacheLock(const CacheLock&) = delete;

  bool try_lock();
  void lock();
  void unlock();

  bool try_lock_shared();
  void lock_shared();
  void unlock_shared();

  // Whether the calling thread is the writer that holds it.
  bool mine() const;

 private:
  void wait(bool (*open)(std::uint64_t state));

  // forks of the process before it was locked << 32 | somebody waits | a writer holds it | number of readers
  std::atomic<std::uint64_t> state_{0};
  std::atomic<const void*> owner_{nullptr};  // the writer's thread
  int depth_ = 0;                            // how often the writer has locked it
};

}  // namespace rooftile
