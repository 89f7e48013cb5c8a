// SPDX-License-Identifier: Apache-2.0
// Append to a cache: append_b{rows}_t{new tokens}, 8 KV heads, head_dim 128.
//
// The check compares bytes with the reference on a smaller case of the same kernel: two appends, the second of which
// starts inside a page and a group. Each layer of a model has its own cache, so the calls rotate over 32 caches. k and
// v are warm in L2, as after the kernel that computes them. The lengths are reset before every replay.
#include <algorithm>
#include <memory>
#include <vector>

#include "harness.h"

namespace {

using namespace rooftile;

constexpr int kv_heads = 8, head_dim = 128, layers = 32;

bool matches_reference(const bench::Gpu& gpu, KvFormat format, DType dtype, std::int64_t tokens) {
  const std::int64_t rows = 3, new_tokens = std::min<std::int64_t>(tokens, 90), before = 45;
  const bench::CacheShape shape{.format = format,
                                .dtype = dtype,
                                .page_size = 64,
                                .kv_heads = 2,
                                .head_dim = head_dim,
                                .capacity = std::vector<std::int32_t>(rows, 192)};
  const bench::Cache on_gpu(&gpu, shape), on_host(nullptr, shape);
  Context ctx;
  ctx.variant = "reference";
  for (const std::int64_t n : {before, new_tokens}) {
    const bench::Array k = gpu.random(dtype, {rows, n, 2, head_dim}, 1),
                       v = gpu.random(dtype, {rows, n, 2, head_dim}, 2);
    kv_append(gpu.context(), on_gpu.view(), k.view, v.view, {}, {});
    kv_append(ctx, on_host.view(), gpu.to_host(k.view).view, gpu.to_host(v.view).view, {}, {});
  }
  return on_gpu.same_bytes(gpu, on_host);
}

void append(benchmark::State& state, const bench::Gpu& gpu, std::int64_t rows, std::int64_t tokens, KvFormat format,
            DType dtype) {
  if (!matches_reference(gpu, format, dtype, tokens)) return state.SkipWithError("wrong answer");
  const std::int32_t start = tokens == 1 ? 1000 : 0;
  const bench::CacheShape shape{.format = format,
                                .dtype = dtype,
                                .page_size = 64,
                                .kv_heads = kv_heads,
                                .head_dim = head_dim,
                                .capacity = std::vector<std::int32_t>(static_cast<std::size_t>(rows),
                                                                      start + static_cast<std::int32_t>(2 * tokens))};
  std::vector<std::unique_ptr<bench::Cache>> caches;
  for (int i = 0; i < layers; ++i) caches.push_back(std::make_unique<bench::Cache>(&gpu, shape));
  const bench::Array k = gpu.random(dtype, {rows, tokens, kv_heads, head_dim}, 1),
                     v = gpu.random(dtype, {rows, tokens, kv_heads, head_dim}, 2);
  const bench::Array lengths = gpu.ints(std::vector<std::int32_t>(static_cast<std::size_t>(rows), start));
  const auto set_back = [&] {
    for (const auto& cache : caches)
      bench::check_cuda(cudaMemcpyAsync(cache->view().lengths, lengths.view.data, lengths.bytes(),
                                        cudaMemcpyDeviceToDevice, gpu.stream()),
                        "copy");
  };
  KernelName kernel;
  const auto call = [&](int i) {
    kernel = kv_append(gpu.context(), caches[static_cast<std::size_t>(i)]->view(), k.view, v.view, {}, {});
  };
  set_back();
  bench::Replay replay(gpu, layers, call);
  state.SetLabel(kernel.text);
  const double values = static_cast<double>(rows * tokens * kv_heads);
  const bench::Work work{.bytes = values * (2.0 * head_dim * static_cast<double>(size_of(dtype)) +
                                            static_cast<double>(kv_block_bytes(format, 64, head_dim)) / 64)};
  bench::time_calls(state, gpu, replay, work, set_back);
}

void add_all(const bench::Gpu& gpu) {
  struct Shape {
    std::int64_t rows, tokens;
  };
  struct Variant {
    KvFormat format;
    DType dtype;
  };
  for (const auto& [rows, tokens] : {Shape{1, 1}, {8, 1}, {64, 1}, {64, 4}, {8, 512}, {1, 4096}})
    for (const auto& [format, dtype] : {Variant{KvFormat::fp16, DType::f16},
                                        {KvFormat::bf16, DType::bf16},
                                        {KvFormat::int8, DType::f16},
                                        {KvFormat::int4, DType::f16},
                                        {KvFormat::int4_kivi, DType::f16}})
      bench::add(bench::text("append/append_b", rows, "_t", tokens, "/", name(format), "/warm"),
                 [&gpu, rows, tokens, format, dtype](benchmark::State& state) {
                   append(state, gpu, rows, tokens, format, dtype);
                 });
}

}  // namespace

int main(int argc, char** argv) { return bench::run(argc, argv, add_all); }
