// SPDX-License-Identifier: Apache-2.0
#include "rooftile/cache_lock.h"

#include <pthread.h>

namespace rooftile {
namespace {

// waited_for is set only while the lock is held, and cleared when the writer or the last reader unlocks.
constexpr std::uint64_t waited_for = 1u << 31, writer = 1u << 30, readers = writer - 1;

// Forks between the creation of the first lock and this process.
std::atomic<std::uint32_t> forks{0};

std::uint64_t free_state() { return std::uint64_t{forks.load(std::memory_order_relaxed)} << 32; }
bool of_this_process(std::uint64_t state) { return state >> 32 == forks.load(std::memory_order_relaxed); }

bool open_to_writer(std::uint64_t s) { return !of_this_process(s) || (s & (writer | readers)) == 0; }
bool open_to_reader(std::uint64_t s) { return !of_this_process(s) || (s & (writer | waited_for)) == 0; }

// An address that is unique to the calling thread.
const void* this_thread() {
  static thread_local const char here = 0;
  return &here;
}

}  // namespace

CacheLock::CacheLock() {
  static const int registered = pthread_atfork(nullptr, nullptr, [] { forks.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  state_.store(free_state(), std::memory_order_relaxed);
}

bool CacheLock::mine() const {
  const void* const owner = owner_.load(std::memory_order_relaxed);
  return owner && owner == this_thread() && of_this_process(state_.load(std::memory_order_relaxed));
}

bool CacheLock::try_lock() {
  if (mine()) {
    ++depth_;
    return true;
  }
  std::uint64_t s = state_.load(std::memory_order_relaxed);
  while (open_to_writer(s)) {
    if (!state_.compare_exchange_weak(s, free_state() | writer, std::memory_order_acquire, std::memory_order_relaxed))
      continue;
    owner_.store(this_thread(), std::memory_order_relaxed);
    depth_ = 1;
    return true;
  }
  return false;
}

bool CacheLock::try_lock_shared() {
  if (mine()) {
    ++depth_;
    return true;
  }
  std::uint64_t s = state_.load(std::memory_order_relaxed);
  while (open_to_reader(s)) {
    const std::uint64_t held = of_this_process(s) ? s : free_state();
    if (state_.compare_exchange_weak(s, held + 1, std::memory_order_acquire, std::memory_order_relaxed)) return true;
  }
  return false;
}

// Blocks until `open` may hold; spurious returns are allowed.
void CacheLock::wait(bool (*open)(std::uint64_t)) {
  std::uint64_t s = state_.load(std::memory_order_relaxed);
  if (open(s)) return;
  if ((s & waited_for) == 0 && !state_.compare_exchange_strong(s, s | waited_for, std::memory_order_relaxed)) return;
  state_.wait(s | waited_for, std::memory_order_relaxed);
}

void CacheLock::lock() {
  while (!try_lock()) wait(open_to_writer);
}

void CacheLock::lock_shared() {
  while (!try_lock_shared()) wait(open_to_reader);
}

void CacheLock::unlock() {
  if (--depth_ > 0) return;
  owner_.store(nullptr, std::memory_order_relaxed);
  if (state_.exchange(free_state(), std::memory_order_release) & waited_for) state_.notify_all();
}

void CacheLock::unlock_shared() {
  if (mine()) return unlock();
  std::uint64_t s = state_.load(std::memory_order_relaxed), left;
  do {
    if (!of_this_process(s)) return;                   // locked before the fork: the child's lock is free
    left = (s & readers) == 1 ? free_state() : s - 1;  // the last reader wakes the waiting threads
  } while (!state_.compare_exchange_weak(s, left, std::memory_order_release, std::memory_order_relaxed));
  if ((s & readers) == 1 && (s & waited_for)) state_.notify_all();
}

}  // namespace rooftile
