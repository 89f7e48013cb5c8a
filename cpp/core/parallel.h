// SPDX-License-Identifier: Apache-2.0
// One parallel loop for the CPU backend.
//
// If the process has loaded an OpenMP runtime (torch loads one), the loop runs on that runtime's threads, because two
// pools on the same cores would spin against each other. Otherwise the loop runs on the library's pool, created at
// first use. Each thread begins with its own part of the tasks and then helps others; a result must not depend on the
// thread that runs a task.
#pragma once

#include <cstdint>

namespace rooftile {

class Parallel {
 public:
  explicit Parallel(int threads);  // 0: the OpenMP runtime's current maximum, else the cores this process may use
  int threads() const { return threads_; }

  // Calls body(task, thread) for every task in [0, tasks), thread in [0, threads()). Rethrows a task's exception.
  template <class Body>
  void run(std::int64_t tasks, const Body& body) const {
    run_erased(
        tasks, [](const void* b, std::int64_t task, int thread) { (*static_cast<const Body*>(b))(task, thread); },
        &body);
  }

 private:
  using Task = void (*)(const void* body, std::int64_t task, int thread);
  void run_erased(std::int64_t tasks, Task task, const void* body) const;
  int threads_;
};

}  // namespace rooftile
