// SPDX-License-Identifier: Apache-2.0
// Common parts of the benchmark binaries: inputs on the device, comparison with the reference, timing inside a CUDA
// graph, and the measured roof.
//
// A call is timed as one of many in a CUDA graph: the time of its kernels without the host's launch cost. For a cold L2
// the calls rotate over copies of the inputs that together exceed three times the L2. A flush would leave dirty lines,
// and the next kernel would pay for their write-back. Every run measures the roof again, with the same harness.
#pragma once

#include <benchmark/benchmark.h>
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <vector>

#include "rooftile/context.h"
#include "rooftile/kv_cache.h"
#include "rooftile/tensor.h"
#include "support/tensors.h"

namespace rooftile::bench {

void check_cuda(cudaError_t status, const char* what);  // throws a device error

// An array with memory of its own, zeros at first. Copies share the memory.
struct Array {
  std::shared_ptr<void> memory;
  TensorView view;

  std::size_t bytes() const { return bytes_of(view); }
};
Array host_array(DType, const Shape&);
Array pinned_array(DType, const Shape&);  // on the host, and the device can write it
// The largest difference, relative to the largest value of `expected`; infinite where one is not a number.
double difference(const Array& on_host, const Array& expected);
double tolerance(DType);  // for difference() of an attention or a product: two roundings of large sums, and some slack

// A part of a tensor: `count` entries of one dimension from `first` on.
TensorView narrow(TensorView, int dim, std::int64_t first, std::int64_t count);

// The device of a run: its stream and its roof.
class Gpu {
 public:
  Gpu();  // the current device; measures the roof
  ~Gpu();
  Gpu(const Gpu&) = delete;

  const cudaDeviceProp& properties() const { return properties_; }
  cudaStream_t stream() const { return stream_; }
  double read_gb_s() const { return read_gb_s_; }
  Context context(const Array& workspace = {}) const;

  Array array(DType, const Shape&) const;
  Array random(DType, const Shape&, std::uint64_t seed, float low = -1, float high = 1) const;  // of u8: any byte
  Array ints(const std::vector<std::int32_t>&) const;                                           // int32 [n]
  Array to_host(const TensorView& contiguous) const;
  void copy(void* to, const void* from, std::size_t bytes) const;  // either way, and waits
  void wait() const;

  // Copies of an input of that size which together are larger than three times the L2; 1 for a warm one.
  int copies(double bytes, bool cold) const;
  void launch_nothing() const;  // an empty kernel

 private:
  cudaDeviceProp properties_ = {};
  cudaStream_t stream_ = nullptr;
  double read_gb_s_ = 0;
};

// Calls 0, 1, ... `copies` - 1 as one CUDA graph, repeated until it holds at least `at_least` of them.
class Replay {
 public:
  Replay(const Gpu&, int copies, const std::function<void(int)>& call, int at_least = 20);
  ~Replay();
  Replay(const Replay&) = delete;

  double seconds();                       // of one call: one replay between two events
  int rounds() const { return rounds_; }  // calls on each copy in one replay

 private:
  const Gpu& gpu_;
  int copies_, rounds_;
  cudaGraphExec_t graph_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

// The least bytes one call must move, and its flops.
struct Work {
  double bytes = 0, flops = 0;
};
// The benchmark's loop: one replay an iteration. before: enqueued in front of every replay, outside its time.
void time_calls(benchmark::State&, const Gpu&, Replay&, const Work&, const std::function<void()>& before = {});

// Concatenates the parts to the name of a case.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream all;
  (all << ... << parts);
  return all.str();
}
// Registers a benchmark; an error it throws skips it.
void add(const std::string& name, const std::function<void(benchmark::State&)>& body);
// The main function: `add_all` registers what the binary measures. Fails without a device.
int run(int argc, char** argv, const std::function<void(const Gpu&)>& add_all);

// ---- KV caches ----

struct CacheShape {
  KvFormat format = KvFormat::fp16;
  DType dtype = DType::f16;
  int page_size = 64, kv_heads = 8, head_dim = 128;
  bool paged = false;                  // pages in random order, no more than the rows need
  std::vector<std::int32_t> capacity;  // tokens, of every row
};
// A cache and its memory, empty at first. Contiguous ones give every row the longest row's pages.
class Cache {
 public:
  Cache(const Gpu*, const CacheShape&, std::uint64_t seed = 0);  // null: on the host

  const KvCacheView& view() const { return view_; }
  // Appends random tokens up to each row's length.
  void fill(const Gpu&, const std::vector<std::int32_t>& lengths, std::uint64_t seed);
  // One row's one head as a cache of its own on the host.
  Cache row_on_host(const Gpu&, int row, int kv_head) const;
  bool same_bytes(const Gpu&, const Cache& on_host) const;  // of two caches of one shape

 private:
  CacheShape shape_;
  std::vector<Array> arrays_;
  Array fault_;
  std::vector<std::int32_t> table_;  // on the host; empty for a contiguous cache
  KvCacheView view_;
};

// Bytes that a query at the end of a row of so many tokens reads, of one KV head.
double row_bytes(const CacheShape&, int tokens);

}  // namespace rooftile::bench
