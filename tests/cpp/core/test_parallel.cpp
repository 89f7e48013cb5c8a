// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <iterator>
#include <stdexcept>
#include <stop_token>
#include <thread>
#include <vector>

#include "core/parallel.h"
#include "core/thread_pool.h"

namespace rooftile {
namespace {

TEST(Parallel, RunsEveryTaskOnce) {
  for (int threads : {1, 2, 5})
    for (std::int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> seen(static_cast<std::size_t>(tasks));
      Parallel(threads).run(tasks, [&](std::int64_t i, int thread) {
        EXPECT_LT(thread, threads);
        ++seen[static_cast<std::size_t>(i)];
      });
      for (auto& s : seen) ASSERT_EQ(s, 1);
    }
}

TEST(Parallel, AThreadBeginsWithItsPartOfTheTasksAndThenHelps) {
  for (const std::int64_t tasks : {2, 7, 8}) {
    std::atomic<std::int64_t> first[2] = {-1, -1};
    std::atomic<int> done{0};
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    Parallel(2).run(tasks, [&](std::int64_t i, int thread) {
      std::int64_t none = -1;
      if (!first[thread].compare_exchange_strong(none, i)) {
        ++done;
        return;
      }
      while ((first[0] < 0 || first[1] < 0) && std::chrono::steady_clock::now() < end) std::this_thread::yield();
      if (thread == 1)  // thread 0 does all others, those of this one's part too
        while (done < tasks - 2 && std::chrono::steady_clock::now() < end) std::this_thread::yield();
    });
    EXPECT_EQ(first[0], 0) << tasks;
    EXPECT_EQ(first[1], (tasks + 1) / 2) << tasks;
    EXPECT_EQ(done, tasks - 2) << tasks;
  }
}

std::ptrdiff_t threads_here() {
  const std::filesystem::directory_iterator all("/proc/self/task");
  return std::distance(begin(all), end(all));
}

// Whether three tasks of three threads can wait for each other, and two threads are new.
bool three_run_at_once() {
  const std::jthread other([](const std::stop_token& stop) {  // TSan adds a thread to the first one
    while (!stop.stop_requested()) std::this_thread::yield();
  });
  const std::ptrdiff_t before = threads_here();
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  std::atomic<int> here{0};
  std::atomic<bool> late{false};
  Parallel(3).run(3, [&](std::int64_t, int) {
    ++here;
    while (here < 3 && !late) late = late || std::chrono::steady_clock::now() > end;
  });
  return !late && threads_here() == before + 2;
}

TEST(ParallelDeathTest, TasksRunAtOnceOnAsManyThreadsAsAskedFor) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own: the pool keeps the threads of other loops
  EXPECT_EXIT(std::_Exit(three_run_at_once() ? 0 : 1), testing::ExitedWithCode(0), "");
}

TEST(Parallel, AnExceptionReachesTheCallerAndTheNextLoopWorks) {
  EXPECT_THROW(Parallel(3).run(100,
                               [](std::int64_t i, int) {
                                 if (i == 57) throw std::runtime_error("57");
                               }),
               std::runtime_error);
  std::atomic<int> done{0};
  Parallel(3).run(100, [&](std::int64_t, int) { ++done; });
  EXPECT_EQ(done, 100);
}

TEST(Parallel, CallersOnManyThreadsDoNotWaitForEachOther) {
  std::atomic<int> done{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 8; ++c)
    callers.emplace_back([&] {
      for (int i = 0; i < 50; ++i) Parallel(2).run(20, [&](std::int64_t, int) { ++done; });
    });
  for (auto& t : callers) t.join();
  EXPECT_EQ(done, 8 * 50 * 20);
}

TEST(Parallel, LoopsInQuickSuccession) {
  // Threads that come late meet the next loop, of another body and another number of tasks and threads.
  for (int i = 0; i < 20000; ++i) {
    const int tasks = 2 + i % 5, threads = 2 + i % 3;
    std::atomic<int> sum{0};
    Parallel(threads).run(tasks, [&](std::int64_t task, int thread) {
      if (thread < threads) sum += static_cast<int>(task) + i;
    });
    ASSERT_EQ(sum, tasks * i + tasks * (tasks - 1) / 2);
  }
}

TEST(Parallel, ALongLoopBehindAShortOne) {
  // A thread that comes for a task behind the short loop's last one must not take a task of the long one for it: the
  // loop would wait for ever, or one of its tasks run twice.
  ThreadPool pool;
  std::atomic<int> first[2] = {}, second[16] = {};
  const auto count = [](void* hits, std::int64_t task, int) { ++static_cast<std::atomic<int>*>(hits)[task]; };
  for (int i = 1; i <= 500000; ++i) {
    ASSERT_TRUE(pool.run(2, 2, count, first));
    ASSERT_TRUE(pool.run(16, 2, count, second));
    for (auto& hits : first) ASSERT_EQ(hits, i);
    for (auto& hits : second) ASSERT_EQ(hits, i);
  }
}

double cpu_seconds() { return static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }  // of all threads

TEST(Parallel, ThreadsWithoutATaskSleep) {
  Parallel(3).run(3, [](std::int64_t, int) {});
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const double before = cpu_seconds();
  std::this_thread::sleep_for(std::chrono::milliseconds(400));
  EXPECT_LT(cpu_seconds() - before, 0.1);
  std::atomic<int> done{0};
  Parallel(3).run(100, [&](std::int64_t, int) { ++done; });  // and they wake
  EXPECT_EQ(done, 100);
}

}  // namespace
}  // namespace rooftile
