// SPDX-License-Identifier: Apache-2.0
// 16-bit products: k{K}_n{N}_m{M}.
//
// Checked on the first and the last 256 rows of the weight that is timed, which the reference multiplies on the host.
#include <algorithm>
#include <vector>

#include "harness.h"
#include "rooftile/gemm.h"

namespace {

using namespace rooftile;

bool matches_reference(const bench::Gpu& gpu, const bench::Array& weight, const bench::Array& x, const bench::Array& y, bool last) {
  const std::int64_t all = weight.view.shape[0], n = std::min<std::int64_t>(all, 256), first = last ? all - n : 0;
  const std::int64_t m = std::min<std::int64_t>(x.view.shape[0], 8), row = last ? x.view.shape[0] - m : 0;
  const bench::Array part = gpu.to_host(bench::narrow(weight.view, 0, first, n));
  const bench::Array x_host = gpu.to_host(bench::narrow(x.view, 0, row, m)), y_host = gpu.to_host(bench::narrow(y.view, 0, row, m));
  const bench::Array expected = bench::host_array(x.view.dtype, {m, n}), got = bench::host_array(x.view.dtype, {m, n});
  Context ctx;
  ctx.variant = "reference";
  linear(ctx, x_host.view, part.view, expected.view);
  for (std::int64_t i = 0; i < m; ++i)
    std::copy_n(y_host.view.as<const std::uint16_t>() + i * all + first, n, got.view.as<std::uint16_t>() + i * n);
  return bench::difference(got, expected) <= bench::tolerance(x.view.dtype);
}

void linear_product(benchmark::State& state, const bench::Gpu& gpu, std::int64_t k, std::int64_t n, std::int64_t m, DType dtype, bool cold) {
  const double element = static_cast<double>(size_of(dtype));
  bench::Work work{.bytes = static_cast<double>(n * k) * element, .flops = 2.0 * static_cast<double>(m * n * k)};
  const int copies = gpu.copies(work.bytes, cold);
  work.bytes += static_cast<double>(m * (n + k)) * element;
  std::vector<bench::Array> weights;
  for (int i = 0; i < copies; ++i) weights.push_back(gpu.random(dtype, {n, k}, static_cast<std::uint64_t>(i), -0.02f, 0.02f));
  const bench::Array x = gpu.random(dtype, {m, k}, 1000), y = gpu.array(dtype, {m, n});
  const bench::Array workspace = gpu.array(DType::u8, {static_cast<std::int64_t>(linear_workspace(gpu.context(), x.view, weights[0].view))});
  const Context ctx = gpu.context(workspace);
  KernelName kernel;
  const auto call = [&](int i) { kernel = linear(ctx, x.view, weights[static_cast<std::size_t>(i)].view, y.view); };
  call(0);
  gpu.wait();
  if (!matches_reference(gpu, weights[0], x, y, false) || !matches_reference(gpu, weights[0], x, y, true))
    return state.SkipWithError("wrong answer");
  bench::Replay replay(gpu, copies, call);
  state.SetLabel(kernel.text);
  bench::time_calls(state, gpu, replay, work);
}

void add_all(const bench::Gpu& gpu) {
  struct Shape {
    std::int64_t k, n;
  };
  for (const DType dtype : {DType::f16, DType::bf16})
    for (const auto& [k, n] : {Shape{4096, 4096}, {4096, 6144}, {4096, 14336}, {4096, 28672}, {14336, 4096}})
      for (const std::int64_t m : {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096})
        for (const bool cold : {true, false}) {
          if (!cold && (m > 1 || dtype != DType::f16)) continue;
          if (dtype == DType::bf16 && m != 1 && m != 16 && m != 1024) continue;
          bench::add(bench::text("linear/k", k, "_n", n, "_m", m, "/", dtype == DType::bf16 ? "bf16" : "fp16", cold ? "/cold" : "/warm"),
                     [&gpu, k, n, m, dtype, cold](benchmark::State& state) { linear_product(state, gpu, k, n, m, dtype, cold); });
        }
}

}  // namespace

int main(int argc, char** argv) { return bench::run(argc, argv, add_all); }
