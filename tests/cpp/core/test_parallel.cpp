// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <atomic>
#include <stdexcept>
#include <thread>
#include <vector>

#include "core/parallel.h"

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

}  // namespace
}  // namespace rooftile
