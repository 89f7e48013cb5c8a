// SPDX-License-Identifier: Apache-2.0
// What the machine can do: how fast memory is read and copied, and what a launch costs at least. The floors under small
// reads are what a kernel of that size is to be held against.
#include "harness.h"
#include "rooftile/roof.h"

namespace {

using namespace rooftile;

void add_reads(const bench::Gpu& gpu) {
  for (const double megabytes : {0.5, 1.0, 2.2, 4.4, 8.7, 16.8, 30.3, 60.0, 134.0, 310.0, 545.0, 1074.0}) {
    bench::add(bench::text("read/", megabytes, "mb/cold"), [&gpu, megabytes](benchmark::State& state) {
      const std::int64_t bytes = static_cast<std::int64_t>(megabytes * 1e6) / 16 * 16;
      const int copies = gpu.copies(static_cast<double>(bytes), true);
      const bench::Array all = gpu.random(DType::u8, {copies, bytes}, 1), sink = gpu.array(DType::i32, {1});
      bench::Replay replay(gpu, copies, [&](int i) {
        TensorView one = bench::narrow(all.view, 0, i, 1);  // [1, bytes] -> [bytes]
        one.ndim = 1;
        one.shape[0] = bytes;
        one.stride[0] = 1;
        read_bytes(gpu.context(), one, sink.view);
      });
      bench::time_calls(state, gpu, replay, {.bytes = static_cast<double>(bytes)});
    });
  }
}

void add_all(const bench::Gpu& gpu) {
  add_reads(gpu);
  bench::add("copy/1074mb/cold", [&gpu](benchmark::State& state) {
    const bench::Array from = gpu.random(DType::u8, {std::int64_t{1} << 30}, 1),
                       to = gpu.array(DType::u8, {std::int64_t{1} << 30});
    bench::Replay replay(gpu, 1, [&](int) {
      bench::check_cuda(
          cudaMemcpyAsync(to.view.data, from.view.data, from.bytes(), cudaMemcpyDeviceToDevice, gpu.stream()), "copy");
    });
    bench::time_calls(state, gpu, replay, {.bytes = 2.0 * static_cast<double>(from.bytes())});
  });
  bench::add("launch/empty", [&gpu](benchmark::State& state) {
    bench::Replay replay(gpu, 1, [&](int) { gpu.launch_nothing(); }, 1000);
    bench::time_calls(state, gpu, replay, {});
  });
}

}  // namespace

int main(int argc, char** argv) { return bench::run(argc, argv, add_all); }
