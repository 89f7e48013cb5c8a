// SPDX-License-Identifier: Apache-2.0
#include "harness.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>

#include "rooftile/error.h"
#include "rooftile/roof.h"
#include "support/kv_arrays.h"

namespace rooftile::bench {
namespace {

#define CHECK_CUDA(call) check_cuda((call), #call)

Array owned(TensorView view, void* memory, void (*release)(void*)) {
  view.data = memory;
  return {std::shared_ptr<void>(memory, release), view};
}
// An allocation of no bytes would be null.
std::size_t room_for(const TensorView& t) { return std::max<std::size_t>(bytes_of(t), 1); }

constexpr int threads = 256;

// A mix of the index and the seed: the high bits of splitmix64.
__device__ std::uint32_t random_bits(std::uint64_t seed, std::int64_t i) {
  std::uint64_t x = seed * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(i);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return static_cast<std::uint32_t>((x ^ (x >> 31)) >> 32);
}

template <class T>
__global__ void fill_random(T* x, std::int64_t n, std::uint64_t seed, float low, float high) {
  for (std::int64_t i = std::int64_t{blockIdx.x} * threads + threadIdx.x; i < n;
       i += std::int64_t{gridDim.x} * threads) {
    const std::uint32_t bits = random_bits(seed, i);
    if constexpr (std::is_same_v<T, std::uint8_t>) x[i] = static_cast<std::uint8_t>(bits);
    else x[i] = from_float<T>(low + (high - low) * (static_cast<float>(bits >> 8) * 0x1p-24f));
  }
}

__global__ void nothing() {}

double median(std::vector<double> x) {
  std::nth_element(x.begin(), x.begin() + static_cast<std::ptrdiff_t>(x.size() / 2), x.end());
  return x[x.size() / 2];
}

}  // namespace

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  (void)cudaGetLastError();
  fail(ErrorKind::device, what, " failed: ", cudaGetErrorString(status));
}

Array host_array(DType dtype, const Shape& shape) {
  const TensorView t = contiguous_view(nullptr, dtype, {}, shape);
  return owned(t, std::calloc(room_for(t), 1), std::free);
}

Array pinned_array(DType dtype, const Shape& shape) {
  const TensorView t = contiguous_view(nullptr, dtype, {}, shape);
  void* memory = nullptr;
  CHECK_CUDA(cudaMallocHost(&memory, room_for(t)));
  std::memset(memory, 0, room_for(t));
  return owned(t, memory, [](void* p) { (void)cudaFreeHost(p); });
}

double difference(const Array& a, const Array& expected) {
  double largest = 0, size = std::numeric_limits<float>::min();
  for (std::int64_t i = 0; i < expected.view.numel(); ++i) {
    const double x = cpu::read(a.view, i), y = cpu::read(expected.view, i);
    if (!std::isfinite(x) || !std::isfinite(y)) return INFINITY;
    largest = std::max(largest, std::abs(x - y));
    size = std::max(size, std::abs(y));
  }
  return largest / size;
}

double tolerance(DType t) { return t == DType::bf16 ? 2e-2 : 4e-3; }

TensorView narrow(TensorView t, int dim, std::int64_t first, std::int64_t count) {
  t.data = static_cast<std::byte*>(t.data) + first * t.stride[dim] * static_cast<std::int64_t>(size_of(t.dtype));
  t.shape[dim] = count;
  return t;
}

// ---- the device ----

Gpu::Gpu() {
  int device = 0;
  CHECK_CUDA(cudaGetDevice(&device));
  CHECK_CUDA(cudaGetDeviceProperties(&properties_, device));
  CHECK_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  const Array big = random(DType::u8, {std::int64_t{1} << 30}, 1), sink = array(DType::i32, {1});
  Replay replay(*this, 1, [&](int) { read_bytes(context(), big.view, sink.view); }, 4);
  std::vector<double> seconds(20);
  for (double& s : seconds) s = replay.seconds();
  read_gb_s_ = static_cast<double>(big.bytes()) / median(seconds) / 1e9;
}

Gpu::~Gpu() { (void)cudaStreamDestroy(stream_); }

Context Gpu::context(const Array& workspace) const {
  Context ctx;
  CHECK_CUDA(cudaGetDevice(&ctx.device.index));
  ctx.device.type = DeviceType::cuda;
  ctx.stream = stream_;
  if (workspace.memory) {
    ctx.workspace = workspace.view.data;
    ctx.workspace_bytes = workspace.bytes();
  }
  return ctx;
}

Array Gpu::array(DType dtype, const Shape& shape) const {
  const TensorView t = contiguous_view(nullptr, dtype, context().device, shape);
  void* memory = nullptr;
  CHECK_CUDA(cudaMalloc(&memory, room_for(t)));
  const Array a = owned(t, memory, [](void* p) { (void)cudaFree(p); });
  CHECK_CUDA(cudaMemsetAsync(memory, 0, room_for(t), stream_));
  return a;
}

Array Gpu::random(DType dtype, const Shape& shape, std::uint64_t seed, float low, float high) const {
  const Array a = array(dtype, shape);
  const std::int64_t n = a.view.numel();
  const auto fill = [&](auto* x) {
    fill_random<<<8 * properties_.multiProcessorCount, threads, 0, stream_>>>(x, n, seed, low, high);
    CHECK_CUDA(cudaGetLastError());
  };
  switch (dtype) {
    case DType::f16:
      fill(a.view.as<Half>());
      break;
    case DType::bf16:
      fill(a.view.as<BFloat16>());
      break;
    case DType::f32:
      fill(a.view.as<float>());
      break;
    default:
      fill(a.view.as<std::uint8_t>());
      break;
  }
  return a;
}

Array Gpu::ints(const std::vector<std::int32_t>& values) const {
  const Array a = array(DType::i32, {static_cast<std::int64_t>(values.size())});
  copy(a.view.data, values.data(), values.size() * sizeof(std::int32_t));
  return a;
}

Array Gpu::to_host(const TensorView& t) const {
  Array a = host_array(t.dtype, {t.numel()});
  copy(a.view.data, t.data, a.bytes());
  std::copy(t.shape, t.shape + t.ndim, a.view.shape);
  std::copy(t.stride, t.stride + t.ndim, a.view.stride);
  a.view.ndim = t.ndim;
  return a;
}

void Gpu::copy(void* to, const void* from, std::size_t bytes) const {
  CHECK_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_));
  wait();
}

void Gpu::wait() const { CHECK_CUDA(cudaStreamSynchronize(stream_)); }

int Gpu::copies(double bytes, bool cold) const {
  return cold ? 1 + static_cast<int>(3.0 * properties_.l2CacheSize / std::max(bytes, 1.0)) : 1;
}

void Gpu::launch_nothing() const {
  nothing<<<1, 32, 0, stream_>>>();
  CHECK_CUDA(cudaGetLastError());
}

// ---- timing ----

Replay::Replay(const Gpu& gpu, int copies, const std::function<void(int)>& call, int at_least)
    : gpu_(gpu), copies_(copies), rounds_((at_least + copies - 1) / copies) {
  CHECK_CUDA(cudaEventCreate(&begin_));
  CHECK_CUDA(cudaEventCreate(&end_));
  call(0);  // loads the kernels, which a capture must not do
  gpu_.wait();
  CHECK_CUDA(cudaStreamBeginCapture(gpu_.stream(), cudaStreamCaptureModeThreadLocal));
  cudaGraph_t graph = nullptr;
  try {
    for (int i = 0; i < rounds_ * copies_; ++i) call(i % copies_);
  } catch (...) {
    (void)cudaStreamEndCapture(gpu_.stream(), &graph);
    throw;
  }
  CHECK_CUDA(cudaStreamEndCapture(gpu_.stream(), &graph));
  const cudaError_t made = cudaGraphInstantiate(&graph_, graph, 0);
  (void)cudaGraphDestroy(graph);
  CHECK_CUDA(made);
}

Replay::~Replay() {
  if (graph_) (void)cudaGraphExecDestroy(graph_);
  (void)cudaEventDestroy(begin_);
  (void)cudaEventDestroy(end_);
}

double Replay::seconds() {
  CHECK_CUDA(cudaEventRecord(begin_, gpu_.stream()));
  CHECK_CUDA(cudaGraphLaunch(graph_, gpu_.stream()));
  CHECK_CUDA(cudaEventRecord(end_, gpu_.stream()));
  CHECK_CUDA(cudaEventSynchronize(end_));
  float milliseconds = 0;
  CHECK_CUDA(cudaEventElapsedTime(&milliseconds, begin_, end_));
  return milliseconds * 1e-3 / (rounds_ * copies_);
}

void time_calls(benchmark::State& state, const Gpu& gpu, Replay& replay, const Work& work,
                const std::function<void()>& before) {
  const auto once = [&] {
    if (before) before();
    return replay.seconds();
  };
  for (int i = 0; i < 3; ++i) once();
  std::vector<double> seconds;
  for (auto _ : state) {
    seconds.push_back(once());
    state.SetIterationTime(seconds.back());
  }
  const double median_seconds = median(seconds);
  const auto [least, most] = std::minmax_element(seconds.begin(), seconds.end());
  state.counters["us"] = median_seconds * 1e6;
  state.counters["us_min"] = *least * 1e6;
  state.counters["us_max"] = *most * 1e6;
  state.counters["bytes"] = work.bytes;
  state.counters["gb_s"] = work.bytes / median_seconds / 1e9;
  state.counters["percent_of_roof"] = 100 * work.bytes / median_seconds / 1e9 / gpu.read_gb_s();
  if (work.flops > 0) {
    state.counters["flops"] = work.flops;
    state.counters["tflop_s"] = work.flops / median_seconds / 1e12;
  }
}

void add(const std::string& name, const std::function<void(benchmark::State&)>& body) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [body](benchmark::State& state) {
                                 try {
                                   body(state);
                                 } catch (const std::exception& error) { state.SkipWithError(error.what()); }
                               })
      ->UseManualTime()
      ->Iterations(50)
      ->Unit(benchmark::kMicrosecond);
}

int run(int argc, char** argv, const std::function<void(const Gpu&)>& add_all) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  int devices = 0;
  if (const cudaError_t status = cudaGetDeviceCount(&devices); status != cudaSuccess || devices == 0) {
    std::fprintf(stderr, "no GPU to measure: %s\n", status != cudaSuccess ? cudaGetErrorString(status) : "no device");
    return 1;
  }
  const Gpu gpu;
  benchmark::AddCustomContext("gpu", gpu.properties().name);
  benchmark::AddCustomContext("read_gb_s", std::to_string(gpu.read_gb_s()));
  benchmark::AddCustomContext("l2_bytes", std::to_string(gpu.properties().l2CacheSize));
  benchmark::AddCustomContext("harness", "CUDA-graph replay, rotating inputs > 3x L2, median of 50");
  add_all(gpu);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
}

// ---- KV caches ----

Cache::Cache(const Gpu* gpu, const CacheShape& shape, std::uint64_t seed) : shape_(shape) {
  KvPages pages = deal_pages(shape.capacity, shape.page_size, shape.paged, static_cast<unsigned>(seed));
  const KvCacheShape sizes{shape.format,   shape.dtype,    shape.page_size,
                           shape.kv_heads, shape.head_dim, static_cast<std::int64_t>(shape.capacity.size()),
                           pages.row};
  KvCacheArrays a = kv_arrays(sizes, pages, [&](DType dtype, const Shape& dims) {
    return arrays_.emplace_back(gpu ? gpu->array(dtype, dims) : host_array(dtype, dims)).view;
  });
  table_ = std::move(pages.table);
  if (gpu && shape.paged) gpu->copy(a.block_table.data, table_.data(), bytes_of(a.block_table));
  else if (shape.paged) std::memcpy(a.block_table.data, table_.data(), bytes_of(a.block_table));
  if (gpu) a.fault = (fault_ = pinned_array(DType::i32, {1})).view;
  view_ = kv_cache_view(sizes, a);
}

void Cache::fill(const Gpu& gpu, const std::vector<std::int32_t>& lengths, std::uint64_t seed) {
  const std::int64_t rows = view_.max_rows, longest = *std::max_element(lengths.begin(), lengths.end());
  const std::int64_t step = std::max<std::int64_t>(kv_group, 65536 / rows / kv_group * kv_group);
  for (std::int64_t done = 0; done < longest; done += step) {
    const std::int64_t tokens = std::min(step, longest - done);
    const Array k = gpu.random(shape_.dtype, {rows, tokens, shape_.kv_heads, shape_.head_dim},
                               2 * ((seed << 32) + static_cast<std::uint64_t>(done)));
    const Array v = gpu.random(shape_.dtype, {rows, tokens, shape_.kv_heads, shape_.head_dim},
                               2 * ((seed << 32) + static_cast<std::uint64_t>(done)) + 1);
    std::vector<std::int32_t> counts;
    for (std::int32_t length : lengths)
      counts.push_back(static_cast<std::int32_t>(std::clamp<std::int64_t>(length - done, 0, tokens)));
    const Array on_device = gpu.ints(counts);
    kv_append(gpu.context(), view_, k.view, v.view, {}, on_device.view);
    gpu.wait();
  }
}

Cache Cache::row_on_host(const Gpu& gpu, int row, int kv_head) const {
  const auto read = [&](auto* to, const void* from, std::size_t bytes) { gpu.copy(to, from, bytes); };
  std::int32_t length = 0, raw_from = 0;
  read(&length, view_.lengths + row, sizeof length);
  CacheShape shape = shape_;
  shape.kv_heads = 1;
  shape.paged = false;
  shape.capacity = {length};
  Cache one(nullptr, shape);
  one.view_.lengths[0] = length;
  for (int i = 0; i < one.view_.max_pages; ++i) {
    const std::int64_t page = table_.empty() ? std::int64_t{row} * view_.max_pages + i
                                             : table_[static_cast<std::size_t>(row * view_.max_pages + i)];
    if (!is_element_format(shape.format)) {
      const KvCacheView::Plane& p = view_.k;  // the block begins with the codes of K
      read(one.view_.k.codes + i * one.view_.k.page_stride, p.codes + page * p.page_stride + kv_head * p.head_stride,
           kv_block_bytes(shape.format, shape.page_size, shape.head_dim));
      continue;
    }
    for (const auto& [to, from] : {std::pair{&one.view_.k, &view_.k}, {&one.view_.v, &view_.v}})
      check_cuda(
          cudaMemcpy2DAsync(to->codes + i * to->page_stride, static_cast<std::size_t>(to->token_stride),
                            from->codes + page * from->page_stride + kv_head * from->head_stride,
                            static_cast<std::size_t>(from->token_stride), static_cast<std::size_t>(to->token_stride),
                            static_cast<std::size_t>(shape.page_size), cudaMemcpyDefault, gpu.stream()),
          "copy of a page");
  }
  if (is_kivi(shape.format)) {
    const std::size_t bytes = static_cast<std::size_t>(kv_ring * shape.head_dim) * size_of(shape.dtype),
                      offset = static_cast<std::size_t>(row * view_.kv_heads + kv_head) * bytes;
    read(one.view_.ring_k, view_.ring_k + offset, bytes);
    read(one.view_.ring_v, view_.ring_v + offset, bytes);
    read(&raw_from, view_.raw_from + row, sizeof raw_from);
    one.view_.raw_from[0] = raw_from;
  }
  gpu.wait();
  return one;
}

bool Cache::same_bytes(const Gpu& gpu, const Cache& other) const {
  for (std::size_t i = 0; i < arrays_.size(); ++i) {
    const Array here = gpu.to_host(arrays_[i].view);
    if (std::memcmp(here.view.data, other.arrays_[i].view.data, here.bytes()) != 0) return false;
  }
  return true;
}

double row_bytes(const CacheShape& shape, int tokens) {
  const double element = 2.0 * shape.head_dim * static_cast<double>(size_of(shape.dtype));
  if (is_element_format(shape.format)) return tokens * element;
  const int stored = is_kivi(shape.format) && tokens > 0 ? (tokens - 1) / kv_group * kv_group : tokens;
  return stored * static_cast<double>(kv_block_bytes(shape.format, shape.page_size, shape.head_dim)) / shape.page_size +
         (tokens - stored) * element;
}

}  // namespace rooftile::bench
