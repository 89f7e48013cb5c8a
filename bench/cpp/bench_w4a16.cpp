// SPDX-License-Identifier: Apache-2.0
// W4A16 products: k{K}_n{N}_m{M}, symmetric int4 in groups of 128.
//
// Checked on the first and the last 256 rows of the weight that is timed: a run of rows is a run of bytes of the kernel
// form, which the reference multiplies on the host.
#include <algorithm>
#include <vector>

#include "core/w4_layout.h"
#include "harness.h"
#include "rooftile/gemm.h"

namespace {

using namespace rooftile;

constexpr int group = 128;

struct Weight {
  bench::Array codes, scales;
  W4View view;
};

Weight view_of(bench::Array codes, bench::Array scales, std::int64_t n, std::int64_t k) {
  TensorView bytes = scales.view;   // the kernel tensors are flat bytes
  bytes.dtype = DType::u8;
  bytes.shape[0] *= 2;
  const W4View view = w4_view(n, k, group, W4Zeros::symmetric, DType::f16, codes.view, bytes, {}, {});
  return {std::move(codes), std::move(scales), view};
}

Weight random_weight(const bench::Gpu& gpu, std::int64_t n, std::int64_t k, std::uint64_t seed) {
  const W4Sizes sizes = w4_sizes("bench", n, k, group, W4Zeros::symmetric);
  return view_of(gpu.random(DType::u8, {sizes.codes}, seed), gpu.random(DType::f16, {sizes.scales / 2}, seed + 1, 0.005f, 0.02f), n, k);
}

bool matches_reference(const bench::Gpu& gpu, const Weight& w, const bench::Array& x, const bench::Array& y, bool last) {
  const std::int64_t n = std::min<std::int64_t>(w.view.n, 256), first = last ? w.view.n - n : 0, m = std::min<std::int64_t>(x.view.shape[0], 8);
  const W4Sizes sizes = w4_sizes("bench", n, w.view.k, group, W4Zeros::symmetric);
  const Weight part = view_of(gpu.to_host(bench::narrow(w.codes.view, 0, first / w4_tile_n * (sizes.codes / (n / w4_tile_n)), sizes.codes)),
                              gpu.to_host(bench::narrow(w.scales.view, 0, first / w4_tile_n * (sizes.scales / 2 / (n / w4_tile_n)), sizes.scales / 2)),
                              n, w.view.k);
  const std::int64_t row = last ? x.view.shape[0] - m : 0;
  const bench::Array x_host = gpu.to_host(bench::narrow(x.view, 0, row, m)), y_host = gpu.to_host(bench::narrow(y.view, 0, row, m));
  const bench::Array expected = bench::host_array(x.view.dtype, {m, n}), got = bench::host_array(x.view.dtype, {m, n});
  Context ctx;
  ctx.variant = "reference";
  w4a16_matmul(ctx, x_host.view, part.view, expected.view);
  for (std::int64_t i = 0; i < m; ++i)
    std::copy_n(y_host.view.as<const std::uint16_t>() + i * w.view.n + first, n, got.view.as<std::uint16_t>() + i * n);
  return bench::difference(got, expected) <= bench::tolerance(x.view.dtype);
}

void w4a16(benchmark::State& state, const bench::Gpu& gpu, std::int64_t k, std::int64_t n, std::int64_t m, DType dtype, bool cold) {
  const W4Sizes sizes = w4_sizes("bench", n, k, group, W4Zeros::symmetric);
  bench::Work work{.bytes = static_cast<double>(sizes.codes + sizes.scales), .flops = 2.0 * static_cast<double>(m * n * k)};
  const int copies = gpu.copies(work.bytes, cold);
  work.bytes += static_cast<double>(m * (n + k)) * static_cast<double>(size_of(dtype));
  std::vector<Weight> weights;
  for (int i = 0; i < copies; ++i) weights.push_back(random_weight(gpu, n, k, 2 * static_cast<std::uint64_t>(i)));
  const bench::Array x = gpu.random(dtype, {m, k}, 1000), y = gpu.array(dtype, {m, n});
  const bench::Array workspace = gpu.array(DType::u8, {static_cast<std::int64_t>(w4a16_workspace(gpu.context(), x.view, weights[0].view))});
  const Context ctx = gpu.context(workspace);
  KernelName kernel;
  const auto call = [&](int i) { kernel = w4a16_matmul(ctx, x.view, weights[static_cast<std::size_t>(i)].view, y.view); };
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
          if (dtype == DType::bf16 && m != 1 && m != 16) continue;
          bench::add(bench::text("w4a16/k", k, "_n", n, "_m", m, "/int4-g128", dtype == DType::bf16 ? "-bf16" : "", cold ? "/cold" : "/warm"),
                     [&gpu, k, n, m, dtype, cold](benchmark::State& state) { w4a16(state, gpu, k, n, m, dtype, cold); });
        }
}

}  // namespace

int main(int argc, char** argv) { return bench::run(argc, argv, add_all); }
