// SPDX-License-Identifier: Apache-2.0
// One parallel loop for the CPU backend.
//
// If the process already has an OpenMP runtime (torch brings one), the loop runs on that runtime's own threads: two
// pools on the same cores would spin against each other. Otherwise it runs on the library's pool, made at first use.
// Tasks are handed out dynamically; a result must not depend on which thread ran which task.
#pragma once

#include <cstdint>

namespace rooftile {

class Parallel {
 public:
  explicit Parallel(int threads);  // 0: the OpenMP runtime's current maximum, else the cores this process may use
  int threads() const { return threads_; }

  // body(task, thread) for every task in [0, tasks); thread in [0, threads()). An exception of a task is rethrown here.
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
