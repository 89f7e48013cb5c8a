// SPDX-License-Identifier: Apache-2.0
// W4A16 and W8A16 products: k{K}_n{N}_m{M}, symmetric codes in groups of 128.
//
// Checked on the first and the last 256 rows of the weight that is timed: rows that follow each other are contiguous
// bytes of the packed layout, which the reference multiplies on the host.
#include <vector>

#include "core/w4_layout.h"
#include "products.h"
#include "rooftile/gemm.h"

namespace {

using namespace rooftile;

constexpr int group = 128;

struct Weight {
  bench::Array codes, scales;
  W4View view;
};

Weight view_of(bench::Array codes, bench::Array scales, std::int64_t n, std::int64_t k, int bits) {
  TensorView bytes = scales.view;  // the kernel tensors are flat bytes
  bytes.dtype = DType::u8;
  bytes.shape[0] *= 2;
  const W4View view = w4_view(n, k, bits, group, W4Zeros::symmetric, DType::f16, codes.view, bytes, {}, {});
  return {std::move(codes), std::move(scales), view};
}

Weight random_weight(const bench::Gpu& gpu, std::int64_t n, std::int64_t k, int bits, std::uint64_t seed) {
  const W4Sizes sizes = w4_sizes("bench", n, k, bits, group, W4Zeros::symmetric);
  return view_of(gpu.random(DType::u8, {sizes.codes}, seed),
                 gpu.random(DType::f16, {sizes.scales / 2}, seed + 1, 0.005f, 0.02f), n, k, bits);
}

bool matches_reference(const bench::Gpu& gpu, const Weight& w, const bench::Array& x, const bench::Array& y,
                       bool last) {
  return bench::matches_reference(
      gpu, x, y, last, [&](const Context& ctx, std::int64_t first, const TensorView& rows, const TensorView& expected) {
        const std::int64_t n = expected.shape[1], tiles = n / w4_tile_n, from = first / w4_tile_n;
        const W4Sizes sizes = w4_sizes("bench", n, w.view.k, w.view.bits, group, W4Zeros::symmetric);
        const Weight part =
            view_of(gpu.to_host(bench::narrow(w.codes.view, 0, from * (sizes.codes / tiles), sizes.codes)),
                    gpu.to_host(bench::narrow(w.scales.view, 0, from * (sizes.scales / 2 / tiles), sizes.scales / 2)),
                    n, w.view.k, w.view.bits);
        (w.view.bits == 4 ? w4a16_matmul : w8a16_matmul)(ctx, rows, part.view, expected, {});
      });
}

template <int bits, auto workspace_of, auto matmul>
void product(benchmark::State& state, const bench::Gpu& gpu, const bench::ProductCase& c) {
  const W4Sizes sizes = w4_sizes("bench", c.n, c.k, bits, group, W4Zeros::symmetric);
  bench::Work work{.bytes = static_cast<double>(sizes.codes + sizes.scales),
                   .flops = 2.0 * static_cast<double>(c.m * c.n * c.k)};
  const int copies = gpu.copies(work.bytes, c.cold);
  work.bytes += static_cast<double>(c.m * (c.n + c.k)) * static_cast<double>(size_of(c.dtype));
  std::vector<Weight> weights;
  for (int i = 0; i < copies; ++i)
    weights.push_back(random_weight(gpu, c.n, c.k, bits, 2 * static_cast<std::uint64_t>(i)));
  const bench::Array x = gpu.random(c.dtype, {c.m, c.k}, 1000), y = gpu.array(c.dtype, {c.m, c.n});
  const bench::Array workspace =
      gpu.array(DType::u8, {static_cast<std::int64_t>(workspace_of(gpu.context(), x.view, weights[0].view, {}))});
  const Context ctx = gpu.context(workspace);
  bench::time_product(
      state, gpu, copies, work,
      [&](int i) { return matmul(ctx, x.view, weights[static_cast<std::size_t>(i)].view, y.view, {}); },
      [&](bool last) { return matches_reference(gpu, weights[0], x, y, last); });
}

void add_all(const bench::Gpu& gpu) {
  bench::add_products(gpu, "w4a16", "int4-g128", "int4-g128-bf16", {1, 16}, product<4, w4a16_workspace, w4a16_matmul>);
  bench::add_products(gpu, "w8a16", "int8-g128", "int8-g128-bf16", {1, 16}, product<8, w8a16_workspace, w8a16_matmul>);
}

}  // namespace

int main(int argc, char** argv) { return bench::run(argc, argv, add_all); }
