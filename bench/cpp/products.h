// SPDX-License-Identifier: Apache-2.0
// What the benchmarks of all products share: their cases, what is compared with the reference, and how a right answer
// is timed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>

#include "harness.h"
#include "rooftile/context.h"

namespace rooftile::bench {

// Whether the first, or the last, up to 256 columns of up to 8 rows of y [M, N] are what the reference makes of those
// rows of x. reference(ctx, first, x, y): the product with the rows of the weight from `first` on, as many as y has
// columns, on the host.
template <class Reference>
bool matches_reference(const Gpu& gpu, const Array& x, const Array& y, bool last, Reference&& reference) {
  const std::int64_t all = y.view.shape[1], n = std::min<std::int64_t>(all, 256), first = last ? all - n : 0;
  const std::int64_t m = std::min<std::int64_t>(x.view.shape[0], 8), row = last ? x.view.shape[0] - m : 0;
  const Array x_host = gpu.to_host(narrow(x.view, 0, row, m)), y_host = gpu.to_host(narrow(y.view, 0, row, m));
  const Array expected = host_array(x.view.dtype, {m, n}), got = host_array(x.view.dtype, {m, n});
  Context ctx;
  ctx.variant = "reference";
  reference(ctx, first, x_host.view, expected.view);
  for (std::int64_t i = 0; i < m; ++i)
    std::copy_n(y_host.view.as<const std::uint16_t>() + i * all + first, n, got.view.as<std::uint16_t>() + i * n);
  return difference(got, expected) <= tolerance(x.view.dtype);
}

// call(copy) -> KernelName. matches(last): whether the answer to call(0) is right.
template <class Call, class Matches>
void time_product(benchmark::State& state, const Gpu& gpu, int copies, const Work& work, Call&& call,
                  Matches&& matches) {
  KernelName kernel;
  const auto run = [&](int i) { kernel = call(i); };
  run(0);
  gpu.wait();
  if (!matches(false) || !matches(true)) return state.SkipWithError("wrong answer");
  Replay replay(gpu, copies, run);
  state.SetLabel(kernel.text);
  time_calls(state, gpu, replay, work);
}

struct ProductCase {
  std::int64_t k, n, m;
  DType dtype;
  bool cold;
};
// fp16, bf16: what a name says of each; bf16_rows: the numbers of rows that bf16 is timed with. product(state, gpu,
// case).
template <class Product>
void add_products(const Gpu& gpu, const char* family, const char* fp16, const char* bf16,
                  std::initializer_list<std::int64_t> bf16_rows, Product product) {
  struct Shape {
    std::int64_t k, n;
  };
  for (const DType dtype : {DType::f16, DType::bf16})
    for (const auto& [k, n] : {Shape{4096, 4096}, {4096, 6144}, {4096, 14336}, {4096, 28672}, {14336, 4096}})
      for (const std::int64_t m : {1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096})
        for (const bool cold : {true, false}) {
          if (!cold && (m > 1 || dtype != DType::f16)) continue;
          if (dtype == DType::bf16 && std::find(bf16_rows.begin(), bf16_rows.end(), m) == bf16_rows.end()) continue;
          const ProductCase what{k, n, m, dtype, cold};
          add(text(family, "/k", k, "_n", n, "_m", m, "/", dtype == DType::bf16 ? bf16 : fp16,
                   cold ? "/cold" : "/warm"),
              [&gpu, what, product](benchmark::State& state) { product(state, gpu, what); });
        }
}

}  // namespace rooftile::bench
