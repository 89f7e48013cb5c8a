// SPDX-License-Identifier: Apache-2.0
// Decode attention: b{rows}_kv{tokens}, 32 query heads, 8 KV heads, head_dim 128.
//
// Checked on the first and the last row of the very case that is timed: one KV head of the row's cache goes to the
// host, where the reference attends it with that head's queries.
#include <cmath>
#include <memory>
#include <random>
#include <vector>

#include "harness.h"
#include "rooftile/attention.h"

namespace {

using namespace rooftile;

constexpr int q_heads = 32, kv_heads = 8, head_dim = 128;

struct Case {
  std::string name;
  std::vector<std::int32_t> lengths;
  int tokens = 1;
  bool paged = false;
};

bool matches_reference(const bench::Gpu& gpu, const bench::Cache& cache, const bench::Array& q, const bench::Array& out,
                       int row, int head) {
  const bench::Cache one = cache.row_on_host(gpu, row, head);
  const std::int64_t tokens = q.view.shape[1], per_kv = q_heads / kv_heads;
  const bench::Array q_row = gpu.to_host(bench::narrow(q.view, 0, row, 1)),
                     got_row = gpu.to_host(bench::narrow(out.view, 0, row, 1));
  const auto heads = [&](const bench::Array& a) { return bench::narrow(a.view, 2, head * per_kv, per_kv); };
  const bench::Array expected = bench::host_array(q.view.dtype, {1, tokens, per_kv, head_dim}),
                     got = bench::host_array(q.view.dtype, {1, tokens, per_kv, head_dim});
  Context ctx;
  ctx.variant = "reference";
  decode_attention(ctx, heads(q_row), one.view(), expected.view, {}, {}, {}, {});
  for (std::int64_t t = 0; t < tokens; ++t)
    std::copy_n(static_cast<const std::uint16_t*>(heads(got_row).data) + t * q_heads * head_dim, per_kv * head_dim,
                got.view.as<std::uint16_t>() + t * per_kv * head_dim);
  return bench::difference(got, expected) <= bench::tolerance(q.view.dtype);
}

void decode(benchmark::State& state, const bench::Gpu& gpu, const Case& c, KvFormat format, DType dtype, bool cold) {
  const bench::CacheShape shape{.format = format,
                                .dtype = dtype,
                                .page_size = 64,
                                .kv_heads = kv_heads,
                                .head_dim = head_dim,
                                .paged = c.paged,
                                .capacity = c.lengths};
  const auto rows = static_cast<std::int64_t>(c.lengths.size());
  bench::Work work;
  for (std::int32_t length : c.lengths) {
    work.bytes += kv_heads * bench::row_bytes(shape, length);
    work.flops += 4.0 * length * head_dim * q_heads * c.tokens;
  }
  const int copies = gpu.copies(work.bytes, cold);
  work.bytes += 2.0 * static_cast<double>(rows * c.tokens * q_heads * head_dim) *
                static_cast<double>(size_of(dtype));  // q and out

  std::vector<std::unique_ptr<bench::Cache>> caches;
  for (int i = 0; i < copies; ++i) {
    caches.push_back(std::make_unique<bench::Cache>(&gpu, shape, i));
    caches.back()->fill(gpu, c.lengths, static_cast<std::uint64_t>(i) + 1);
  }
  const bench::Array q = gpu.random(dtype, {rows, c.tokens, q_heads, head_dim}, 0),
                     out = gpu.array(dtype, {rows, c.tokens, q_heads, head_dim});
  const bench::Array workspace =
      gpu.array(DType::u8, {static_cast<std::int64_t>(decode_workspace(gpu.context(), q.view, caches[0]->view()))});
  const Context ctx = gpu.context(workspace);
  KernelName kernel;
  const auto call = [&](int i) {
    kernel = decode_attention(ctx, q.view, caches[static_cast<std::size_t>(i)]->view(), out.view, {}, {}, {}, {});
  };
  call(0);
  gpu.wait();
  if (!matches_reference(gpu, *caches[0], q, out, 0, 0) ||
      !matches_reference(gpu, *caches[0], q, out, static_cast<int>(rows) - 1, kv_heads - 1))
    return state.SkipWithError("wrong answer");
  bench::Replay replay(gpu, copies, call);
  state.SetLabel(kernel.text);
  bench::time_calls(state, gpu, replay, work);
}

// 64 rows whose lengths are log-uniform in 128 .. 32768.
std::vector<std::int32_t> ragged() {
  std::mt19937 random(64);
  std::vector<std::int32_t> lengths;
  for (int i = 0; i < 64; ++i)
    lengths.push_back(static_cast<std::int32_t>(128 * std::exp2(8.0 * static_cast<double>(random()) / 0x1p32)));
  return lengths;
}

void add_all(const bench::Gpu& gpu) {
  std::vector<Case> cases;
  for (int batch : {1, 8, 64})
    for (int tokens : {1024, 4096, 32768})
      cases.push_back(
          {bench::text("b", batch, "_kv", tokens), std::vector<std::int32_t>(static_cast<std::size_t>(batch), tokens)});
  cases.push_back({"b1_kv131072", {131072}});
  cases.push_back({"b8_kv4096_paged64", std::vector<std::int32_t>(8, 4096), 1, true});
  cases.push_back({"b8_kv4096_t4", std::vector<std::int32_t>(8, 4096), 4});
  cases.push_back({"ragged64_paged64", ragged(), 1, true});
  struct Variant {
    KvFormat format;
    DType dtype;
    const char* name;
  };
  for (const Variant& v : {Variant{KvFormat::fp16, DType::f16, "fp16"},
                           {KvFormat::bf16, DType::bf16, "bf16"},
                           {KvFormat::int8, DType::f16, "int8"},
                           {KvFormat::int4_kivi, DType::f16, "int4-kivi"}})
    for (const Case& c : cases)
      for (const bool cold : {true, false}) {
        if (!cold && c.lengths.size() * static_cast<std::size_t>(c.lengths[0]) > 32768)
          continue;  // larger than the L2, or nearly
        bench::add(bench::text("decode/", c.name, "/", v.name, cold ? "/cold" : "/warm"),
                   [&gpu, c, v, cold](benchmark::State& state) { decode(state, gpu, c, v.format, v.dtype, cold); });
      }
}

}  // namespace

int main(int argc, char** argv) { return bench::run(argc, argv, add_all); }
