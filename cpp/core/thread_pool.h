// SPDX-License-Identifier: Apache-2.0
// The library's own threads, for a process without an OpenMP runtime.
//
// A loop ends when its tasks are done, not when every thread has come: nobody waits for a thread that the system has
// not run yet, so on a busy machine a loop takes what its caller alone would take and not much more. Threads without a
// task watch for the next loop for 50 us, because ops come in quick succession, and then sleep.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace rooftile {

class ThreadPool {
 public:
  using Task = void (*)(void* body, std::int64_t task, int thread);  // throws nothing
  ~ThreadPool();

  // Whether the threads belong to another process: this one is its forked child.
  bool of_parent() const;

  // Calls task(body, i, thread) for every i in [0, tasks) on the caller (thread 0) and up to threads - 1 workers. False
  // if nothing was called: another loop runs, the threads are another process', or there are 2^32 - 1 tasks or more.
  bool run(std::int64_t tasks, int threads, Task task, void* body);

 private:
  void start_workers(int count);
  void serve(int thread, std::uint32_t seen);
  void take_tasks(std::uint32_t loop, int thread);

  std::atomic<bool> running_{false};
  std::vector<std::thread> workers_;
  pid_t owner_ = 0;
  std::atomic<bool> stop_{false};

  // The current loop. A worker may read this while the next loop is written: what it read counts only if its ticket is
  // of the loop that it read it for.
  std::atomic<Task> task_{nullptr};
  std::atomic<void*> body_{nullptr};
  std::atomic<std::uint32_t> tasks_{0};
  std::atomic<int> threads_{0};
  // Each on a cache line of its own.
  alignas(64) std::atomic<std::uint64_t> ticket_{0};  // number of the loop << 32 | its next task
  alignas(64) std::atomic<std::uint32_t> done_{0};    // tasks of the loop that are done
  alignas(64) std::atomic<std::uint32_t> loop_{0};    // number of the loop, for sleeping workers
};

}  // namespace rooftile
