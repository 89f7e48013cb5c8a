// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "rooftile/cache_lock.h"

namespace rooftile {
namespace {

template <class Body>
void in_another_thread(const Body& body) {
  std::thread(body).join();
}

// Whether another thread gets in: with std::unique_lock as a writer, with std::shared_lock as a reader.
template <template <class> class Lock>
bool another_gets(CacheLock& lock) {
  bool in = false;
  in_another_thread([&] { in = Lock<CacheLock>(lock, std::try_to_lock).owns_lock(); });
  return in;
}

TEST(CacheLock, OneWriterOrManyReaders) {
  CacheLock lock;
  lock.lock_shared();
  in_another_thread([&] {
    EXPECT_FALSE(lock.try_lock());
    EXPECT_TRUE(lock.try_lock_shared());
    lock.unlock_shared();
  });
  lock.unlock_shared();
  lock.lock();
  in_another_thread([&] {
    EXPECT_FALSE(lock.try_lock());
    EXPECT_FALSE(lock.try_lock_shared());
  });
  lock.unlock();
  in_another_thread([&] {
    EXPECT_TRUE(lock.try_lock());
    lock.unlock();
  });
}

TEST(CacheLock, TheLastReaderOpensItToAWriter) {
  CacheLock lock;
  for (int readers : {1, 2, 5}) {
    for (int i = 0; i < readers; ++i) ASSERT_TRUE(lock.try_lock_shared());
    for (int i = 0; i < readers; ++i) {
      EXPECT_FALSE(another_gets<std::unique_lock>(lock)) << readers - i << " of " << readers;
      lock.unlock_shared();
    }
    EXPECT_TRUE(another_gets<std::unique_lock>(lock));
  }
}

TEST(CacheLock, ItsWriterLocksItAgain) {
  CacheLock lock;
  lock.lock();
  lock.lock_shared();
  lock.lock();
  lock.unlock();
  lock.unlock_shared();
  EXPECT_TRUE(lock.mine());
  in_another_thread([&] { EXPECT_FALSE(lock.try_lock_shared() || lock.mine()); });
  lock.unlock();
  EXPECT_FALSE(lock.mine());
  in_another_thread([&] {
    EXPECT_TRUE(lock.try_lock());
    lock.unlock();
  });
}

TEST(CacheLock, WhoWaitsTakesNoTimeOfAProcessor) {
  CacheLock lock;
  lock.lock();
  double seconds = 1;
  std::thread waiter([&] {
    lock.lock_shared();
    timespec spent;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &spent);
    seconds = static_cast<double>(spent.tv_sec) + 1e-9 * static_cast<double>(spent.tv_nsec);
    lock.unlock_shared();
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  lock.unlock();
  waiter.join();
  EXPECT_LT(seconds, 0.1);
}

TEST(CacheLock, AWaitingWriterGoesBeforeNewReaders) {
  CacheLock lock;
  lock.lock_shared();
  std::atomic<bool> written{false};
  std::thread writer([&] {
    lock.lock();
    written = true;
    lock.unlock();
  });
  while (another_gets<std::shared_lock>(lock)) std::this_thread::yield();  // until the writer waits
  EXPECT_FALSE(written);
  lock.unlock_shared();
  writer.join();
  EXPECT_TRUE(written);
  EXPECT_TRUE(another_gets<std::shared_lock>(lock));
}

TEST(CacheLock, WritersSeeEachOthersWorkAndReadersAllOfIt) {
  CacheLock lock;
  int left = 0, right = 0;  // equal whenever nobody writes; TSan sees them too
  std::atomic<int> torn{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&, t] {
      for (int i = 0; i < 2000; ++i) {
        if (t % 2) {
          const std::lock_guard held(lock);
          ++left;
          const std::shared_lock again(lock);
          ++right;
        } else {
          const std::shared_lock held(lock);
          torn += left != right;
        }
      }
    });
  for (auto& t : threads) t.join();
  EXPECT_EQ(torn, 0);
  EXPECT_EQ(left, 4000);
  EXPECT_EQ(right, 4000);
}

TEST(CacheLock, IsFreeInAForkedChild) {
  CacheLock lock;
  std::atomic<int> step{0};
  std::thread holder([&] {
    lock.lock();
    step = 1;
    while (step != 2) std::this_thread::yield();
    lock.unlock();
  });
  while (step != 1) std::this_thread::yield();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);  // a lock that stays locked ends the child
    lock.lock();
    lock.lock();
    lock.unlock();
    lock.unlock();
    lock.lock_shared();
    lock.unlock_shared();
    _exit(lock.try_lock() ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_FALSE(lock.try_lock());  // the parent's holder still has it
  step = 2;
  holder.join();
}

}  // namespace
}  // namespace rooftile
