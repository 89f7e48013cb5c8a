// SPDX-License-Identifier: Apache-2.0
#include "core/thread_pool.h"

#include <unistd.h>

#include <chrono>
#include <exception>
#include <limits>

namespace rooftile {
namespace {

// As the next task of a loop: it is closed, no ticket of it is taken any more.
constexpr std::uint32_t no_task = std::numeric_limits<std::uint32_t>::max();

// Hints to the core that this thread waits for another one's store.
void relax() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

// Waits until `here` has another value than `old`: watches it for 50 us, then sleeps. While it watches it lets other
// threads of a busy core run.
void wait_for_change(const std::atomic<std::uint32_t>& here, std::uint32_t old) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(50);
  do {
    for (int i = 0; i < 64; ++i) {
      if (here.load(std::memory_order_acquire) != old) return;
      relax();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
  here.wait(old, std::memory_order_acquire);
}

}  // namespace

ThreadPool::~ThreadPool() {
  stop_.store(true, std::memory_order_relaxed);
  loop_.fetch_add(1, std::memory_order_release);
  loop_.notify_all();
  for (std::thread& t : workers_) t.join();
}

bool ThreadPool::of_parent() const { return !workers_.empty() && owner_ != getpid(); }

void ThreadPool::start_workers(int count) {
  owner_ = getpid();
  try {
    while (static_cast<int>(workers_.size()) < count) {
      const int thread = static_cast<int>(workers_.size()) + 1;
      workers_.emplace_back([this, thread, seen = loop_.load(std::memory_order_relaxed)] { serve(thread, seen); });
    }
  } catch (const std::exception&) {  // no more threads, or no memory for one: the existing ones run the loop
  }
}

bool ThreadPool::run(std::int64_t tasks, int threads, Task task, void* body) {
  if (tasks >= no_task || running_.exchange(true, std::memory_order_acquire)) return false;
  if (of_parent()) {
    running_.store(false, std::memory_order_relaxed);
    return false;
  }
  start_workers(threads - 1);
  const auto count = static_cast<std::uint32_t>(tasks);
  const std::uint32_t loop = loop_.load(std::memory_order_relaxed) + 1;
  task_.store(task, std::memory_order_relaxed);
  body_.store(body, std::memory_order_relaxed);
  tasks_.store(count, std::memory_order_release);  // who reads it finds the last loop closed
  threads_.store(threads, std::memory_order_relaxed);
  done_.store(0, std::memory_order_relaxed);
  ticket_.store(std::uint64_t{loop} << 32, std::memory_order_release);
  loop_.store(loop, std::memory_order_release);
  loop_.notify_all();
  take_tasks(loop, 0);
  for (std::uint32_t done; (done = done_.load(std::memory_order_acquire)) != count;) wait_for_change(done_, done);
  ticket_.store(std::uint64_t{loop} << 32 | no_task, std::memory_order_relaxed);
  running_.store(false, std::memory_order_release);
  return true;
}

void ThreadPool::serve(int thread, std::uint32_t seen) {
  for (;;) {
    wait_for_change(loop_, seen);
    if (stop_.load(std::memory_order_relaxed)) return;
    seen = loop_.load(std::memory_order_acquire);
    take_tasks(seen, thread);
  }
}

void ThreadPool::take_tasks(std::uint32_t loop, int thread) {
  std::uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while (ticket >> 32 == loop) {
    const Task task = task_.load(std::memory_order_relaxed);
    void* body = body_.load(std::memory_order_relaxed);
    const std::uint32_t tasks = tasks_.load(std::memory_order_acquire), i = static_cast<std::uint32_t>(ticket);
    if (i >= tasks || thread >= threads_.load(std::memory_order_relaxed)) return;
    // It succeeds only in the loop that was read above. The next loop is not written before this one is closed: whoever
    // has read the next one's number of tasks, which may be larger, finds another ticket here.
    if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel, std::memory_order_acquire))
      continue;
    task(body, i, thread);
    if (done_.fetch_add(1, std::memory_order_acq_rel) + 1 == tasks) done_.notify_one();
    ticket = ticket_.load(std::memory_order_acquire);
  }
}

}  // namespace rooftile
