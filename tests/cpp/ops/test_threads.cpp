// SPDX-License-Identifier: Apache-2.0
// Ops from several threads: on one cache under its lock, and on caches of their own at once. What a thread did has the
// bits that it has alone. Small enough for TSan (the preset `tsan`).
#include <gtest/gtest.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "rooftile/attention.h"
#include "rooftile/cache_lock.h"
#include "rooftile/kv_cache.h"
#include "support/kv_arrays.h"

namespace rooftile {
namespace {

constexpr int threads = 4, heads = 2, dim = 32, steps = 45;

struct Array {
  Array(DType dtype, const Shape& shape) : view(contiguous_view(nullptr, dtype, {}, shape)), bytes(bytes_of(view)) {
    view.data = bytes.data();
  }
  TensorView view;
  std::vector<std::byte> bytes;
};

struct Cache {
  explicit Cache(KvFormat format, int rows = threads) {
    const KvCacheShape shape{format, DType::f32, 32, heads, dim, rows, 2};
    const auto allocate = [&](DType t, const Shape& s) { return memory.emplace_back(t, s).view; };
    memory.reserve(8);
    view = kv_cache_view(shape, kv_arrays(shape, {.row = 2, .all = 2 * rows}, allocate));
  }
  std::vector<Array> memory;
  KvCacheView view;
  CacheLock lock;
};

// A thread's tokens, one a step.
std::vector<float> numbers(int thread) {
  std::mt19937 random(static_cast<unsigned>(thread));
  std::normal_distribution<float> values;
  std::vector<float> x(steps * heads * dim);
  for (float& v : x) v = values(random);
  return x;
}

// Fills a row, taking some of it back on the way, and attends to it at every step. Returns what the last one saw.
std::vector<float> fill_row(Cache& cache, int row, std::vector<float> x) {
  const Context ctx{.threads = 2};
  Array rows(DType::i32, {1}), length(DType::i32, {1}), out(DType::f32, {1, heads, dim});
  rows.view.as<std::int32_t>()[0] = row;
  const auto store = [&](int step) {
    const TensorView k = contiguous_view(x.data() + step * heads * dim, DType::f32, {}, {1, 1, heads, dim});
    const std::lock_guard held(cache.lock);
    kv_append(ctx, cache.view, k, k, rows.view, {});
  };
  for (int step = 0; step < steps; ++step) {
    store(step);
    if (step % 10 == 9) {
      length.view.as<std::int32_t>()[0] = step;
      {
        const std::lock_guard held(cache.lock);
        kv_truncate(ctx, cache.view, rows.view, length.view);
      }
      store(step);
    }
    const TensorView q = contiguous_view(x.data(), DType::f32, {}, {1, heads, dim});
    const std::shared_lock held(cache.lock);
    decode_attention(ctx, q, cache.view, out.view, {}, rows.view, {}, {});
  }
  return {out.view.as<float>(), out.view.as<float>() + heads * dim};
}

void at_once(const std::function<void(int)>& body) {
  std::vector<std::thread> all;
  for (int t = 0; t < threads; ++t) all.emplace_back(body, t);
  for (std::thread& t : all) t.join();
}

TEST(Threads, OnTheirOwnRowsOfOneCache) {
  for (KvFormat format : {KvFormat::fp32, KvFormat::int8, KvFormat::int4_kivi}) {
    Cache alone(format), shared(format);
    std::vector<std::vector<float>> expected(threads), got(threads);
    for (int t = 0; t < threads; ++t) expected[static_cast<std::size_t>(t)] = fill_row(alone, t, numbers(t));
    at_once([&](int t) { got[static_cast<std::size_t>(t)] = fill_row(shared, t, numbers(t)); });
    EXPECT_EQ(got, expected) << name(format);
    for (std::size_t i = 0; i < alone.memory.size(); ++i)
      EXPECT_EQ(shared.memory[i].bytes, alone.memory[i].bytes) << name(format) << ' ' << i;
  }
}

TEST(Threads, OnCachesOfTheirOwn) {
  std::vector<std::vector<float>> expected(threads), got(threads);
  for (int t = 0; t < threads; ++t) {
    Cache cache(KvFormat::int4_kivi, 1);
    expected[static_cast<std::size_t>(t)] = fill_row(cache, 0, numbers(t));
  }
  at_once([&](int t) {
    Cache cache(KvFormat::int4_kivi, 1);
    got[static_cast<std::size_t>(t)] = fill_row(cache, 0, numbers(t));
  });
  EXPECT_EQ(got, expected);
}

TEST(Threads, ALengthGrowsByWhatWasStoredAndStopsAtTheCapacity) {
  Cache cache(KvFormat::int4_kivi, 1);
  const std::vector<float> x = numbers(0);
  std::atomic<int> stored{0}, refused{0};
  at_once([&](int) {
    std::vector<float> mine = x;
    const TensorView k = contiguous_view(mine.data(), DType::f32, {}, {1, 3, heads, dim});
    for (int i = 0; i < 10; ++i) {
      const std::lock_guard held(cache.lock);
      try {
        kv_append({.threads = 2}, cache.view, k, k, {}, {});
        ++stored;
      } catch (const std::exception&) { ++refused; }
    }
  });
  EXPECT_EQ(stored, 21);  // of 3 tokens, into 64
  EXPECT_EQ(refused, threads * 10 - 21);
  EXPECT_EQ(cache.view.lengths[0], 63);
}

}  // namespace
}  // namespace rooftile
