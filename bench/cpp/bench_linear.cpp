// SPDX-License-Identifier: Apache-2.0
// 16-bit products: k{K}_n{N}_m{M}.
//
// Checked on the first and the last 256 rows of the weight that is timed, which the reference multiplies on the host.
#include <vector>

#include "products.h"
#include "rooftile/gemm.h"

namespace {

using namespace rooftile;

bool matches_reference(const bench::Gpu& gpu, const bench::Array& weight, const bench::Array& x, const bench::Array& y,
                       bool last) {
  return bench::matches_reference(
      gpu, x, y, last, [&](const Context& ctx, std::int64_t first, const TensorView& rows, const TensorView& expected) {
        const bench::Array part = gpu.to_host(bench::narrow(weight.view, 0, first, expected.shape[1]));
        linear(ctx, rows, part.view, expected);
      });
}

void linear_product(benchmark::State& state, const bench::Gpu& gpu, const bench::ProductCase& c) {
  const double element = static_cast<double>(size_of(c.dtype));
  bench::Work work{.bytes = static_cast<double>(c.n * c.k) * element,
                   .flops = 2.0 * static_cast<double>(c.m * c.n * c.k)};
  const int copies = gpu.copies(work.bytes, c.cold);
  work.bytes += static_cast<double>(c.m * (c.n + c.k)) * element;
  std::vector<bench::Array> weights;
  for (int i = 0; i < copies; ++i)
    weights.push_back(gpu.random(c.dtype, {c.n, c.k}, static_cast<std::uint64_t>(i), -0.02f, 0.02f));
  const bench::Array x = gpu.random(c.dtype, {c.m, c.k}, 1000), y = gpu.array(c.dtype, {c.m, c.n});
  const bench::Array workspace =
      gpu.array(DType::u8, {static_cast<std::int64_t>(linear_workspace(gpu.context(), x.view, weights[0].view))});
  const Context ctx = gpu.context(workspace);
  bench::time_product(
      state, gpu, copies, work,
      [&](int i) { return linear(ctx, x.view, weights[static_cast<std::size_t>(i)].view, y.view); },
      [&](bool last) { return matches_reference(gpu, weights[0], x, y, last); });
}

void add_all(const bench::Gpu& gpu) {
  bench::add_products(gpu, "linear", "fp16", "bf16", {1, 16, 1024}, linear_product);
}

}  // namespace

int main(int argc, char** argv) { return bench::run(argc, argv, add_all); }
