// SPDX-License-Identifier: Apache-2.0
// The small ops: {op}_t{tokens}_h{width}; the width of rope and of qk_rms_norm is 32 query and 8 KV heads of 128.
//
// A graph of few tokens holds 400 calls at least, so that its start and end, some 5 us, do not count.
// An op is a list of inputs and outputs with `tokens` rows each. Checked on the first and the last eight rows: the
// reference computes them on the host from copies of the same rows.
#include <algorithm>
#include <functional>
#include <vector>

#include "harness.h"
#include "rooftile/fused.h"

namespace {

using namespace rooftile;

using Views = std::vector<TensorView>;
struct Op {
  const char* name;
  std::vector<std::int64_t> in, out;  // widths of the rows
  // shared: [width] weights, cos, sin, positions and a table [4096, width]; the same on the host and the device
  std::function<KernelName(const Context&, const Views& in, const Views& out, const Views& shared)> run;
  std::int64_t from_table = 0;  // elements of the table that a token reads
};

constexpr std::int64_t rope_heads = 32, rope_kv_heads = 8, rope_dim = 128;

TensorView as_heads(TensorView t, std::int64_t heads) {  // [T, heads * 128] -> [T, heads, 128]
  t.ndim = 3;
  t.shape[1] = heads;
  t.shape[2] = rope_dim;
  t.stride[1] = rope_dim;
  t.stride[2] = 1;
  return t;
}

std::vector<Op> ops(std::int64_t h) {
  return {
      {"rms_norm",
       {h},
       {h},
       [](const Context& c, const Views& in, const Views& out, const Views& w) {
         return rms_norm(c, in[0], w[0], 1e-5f, out[0]);
       }},
      {"add_rms_norm",
       {h, h},
       {h, h},
       [](const Context& c, const Views& in, const Views& out, const Views& w) {
         return add_rms_norm(c, in[0], in[1], w[0], 1e-5f, out[0], out[1]);
       }},
      {"embedding",
       {},
       {h},
       [](const Context& c, const Views&, const Views& out, const Views& w) {
         TensorView ids = w[3];
         ids.shape[0] = out[0].shape[0];
         return embedding(c, ids, w[4], 1, out[0]);
       },
       h},
      {"layer_norm",
       {h},
       {h},
       [](const Context& c, const Views& in, const Views& out, const Views& w) {
         return layer_norm(c, in[0], w[0], w[0], 1e-5f, out[0]);
       }},
      {"silu_mul",
       {2 * h},
       {h},
       [](const Context& c, const Views& in, const Views& out, const Views&) { return silu_mul(c, in[0], out[0]); }},
      {"gelu_mul",
       {2 * h},
       {h},
       [](const Context& c, const Views& in, const Views& out, const Views&) {
         return gelu_mul(c, in[0], Gelu::tanh, out[0]);
       }},
      {"softmax",
       {h},
       {h},
       [](const Context& c, const Views& in, const Views& out, const Views&) { return softmax(c, in[0], out[0]); }},
  };
}
Op rope_op() {
  return {"rope",
          {rope_heads * rope_dim, rope_kv_heads * rope_dim},
          {rope_heads * rope_dim, rope_kv_heads * rope_dim},
          [](const Context& c, const Views& in, const Views& out, const Views& w) {
            TensorView positions = w[3];
            positions.shape[0] = in[0].shape[0];
            return rope(c, as_heads(in[0], rope_heads), as_heads(in[1], rope_kv_heads), w[1], w[2], positions,
                        as_heads(out[0], rope_heads), as_heads(out[1], rope_kv_heads));
          }};
}

Op qk_rms_norm_op() {
  Op op = rope_op();
  op.name = "qk_rms_norm";
  op.run = [](const Context& c, const Views& in, const Views& out, const Views& w) {
    TensorView weight = w[0];
    weight.shape[0] = rope_dim;
    return qk_rms_norm(c, as_heads(in[0], rope_heads), as_heads(in[1], rope_kv_heads), weight, weight, 1e-5f,
                       as_heads(out[0], rope_heads), as_heads(out[1], rope_kv_heads));
  };
  return op;
}

struct Arrays {
  std::vector<bench::Array> in, out;
  static Views views(const std::vector<bench::Array>& arrays) {
    Views v;
    for (const bench::Array& a : arrays) v.push_back(a.view);
    return v;
  }
};

bool matches_reference(const bench::Gpu& gpu, const Op& op, const Arrays& arrays,
                       const std::vector<bench::Array>& shared, std::int64_t first, std::int64_t rows) {
  const auto copy = [&](const std::vector<bench::Array>& from) {
    std::vector<bench::Array> to;
    for (const bench::Array& a : from) to.push_back(gpu.to_host(bench::narrow(a.view, 0, first, rows)));
    return to;
  };
  std::vector<bench::Array> shared_host, expected;
  for (const bench::Array& a : shared) shared_host.push_back(gpu.to_host(a.view));
  shared_host[3] = gpu.to_host(bench::narrow(shared[3].view, 0, first, rows));  // positions
  const std::vector<bench::Array> in = copy(arrays.in), got = copy(arrays.out);
  for (const bench::Array& a : got)
    expected.push_back(bench::host_array(a.view.dtype, {a.view.shape[0], a.view.shape[1]}));
  Context ctx;
  ctx.variant = "reference";
  op.run(ctx, Arrays::views(in), Arrays::views(expected), Arrays::views(shared_host));
  for (std::size_t i = 0; i < got.size(); ++i)
    if (!(bench::difference(got[i], expected[i]) <= bench::tolerance(got[i].view.dtype))) return false;
  return true;
}

void time_op(benchmark::State& state, const bench::Gpu& gpu, const Op& op, std::int64_t tokens, std::int64_t h,
             DType dtype, bool cold) {
  bench::Work work;
  for (const auto& widths : {op.in, op.out, std::vector{op.from_table}})
    for (std::int64_t width : widths)
      work.bytes += static_cast<double>(tokens * width) * static_cast<double>(size_of(dtype));
  const int copies = gpu.copies(work.bytes, cold);
  std::vector<std::int32_t> positions(static_cast<std::size_t>(tokens));
  for (std::size_t i = 0; i < positions.size(); ++i) positions[i] = static_cast<std::int32_t>(i * 7 % 4096);
  const std::vector<bench::Array> shared = {gpu.random(dtype, {h}, 1), gpu.random(DType::f32, {4096, rope_dim / 2}, 2),
                                            gpu.random(DType::f32, {4096, rope_dim / 2}, 3), gpu.ints(positions),
                                            gpu.random(dtype, {4096, h}, 4)};
  const Views shared_views = Arrays::views(shared);
  std::vector<Arrays> sets(static_cast<std::size_t>(copies));
  std::uint64_t seed = 10;
  for (Arrays& set : sets) {
    for (std::int64_t width : op.in) set.in.push_back(gpu.random(dtype, {tokens, width}, ++seed, -4, 4));
    for (std::int64_t width : op.out) set.out.push_back(gpu.array(dtype, {tokens, width}));
  }
  KernelName kernel;
  const auto call = [&](int i) {
    const Arrays& set = sets[static_cast<std::size_t>(i)];
    kernel = op.run(gpu.context(), Arrays::views(set.in), Arrays::views(set.out), shared_views);
  };
  call(0);
  gpu.wait();
  const std::int64_t rows = std::min<std::int64_t>(tokens, 8);
  if (!matches_reference(gpu, op, sets[0], shared, 0, rows) ||
      !matches_reference(gpu, op, sets[0], shared, tokens - rows, rows))
    return state.SkipWithError("wrong answer");
  bench::Replay replay(gpu, copies, call, tokens <= 64 ? 400 : 20);
  state.SetLabel(kernel.text);
  bench::time_calls(state, gpu, replay, work);
}

// Calls of few tokens are warm: in a decode step their inputs are what the previous kernels wrote. Calls of one graph
// depend on each other in stream order, and Hopper starts each while the previous one ends (PDL), as in a decode step.
void add_op(const bench::Gpu& gpu, const Op& op, std::int64_t tokens, std::int64_t h) {
  const bool cold = tokens >= 64;
  bench::add(
      bench::text("ops/", op.name, "_t", tokens, "_h", h, "/bf16", cold ? "/cold" : "/warm"),
      [&gpu, op, tokens, h, cold](benchmark::State& state) { time_op(state, gpu, op, tokens, h, DType::bf16, cold); });
}

void add_all(const bench::Gpu& gpu) {
  for (const std::int64_t tokens : {1, 8, 16, 64, 512, 4096, 16384}) {
    for (const std::int64_t h : {4096, 14336})
      for (const Op& op : ops(h)) add_op(gpu, op, tokens, h);
    for (const Op& op : {rope_op(), qk_rms_norm_op()}) add_op(gpu, op, tokens, rope_heads * rope_dim);
  }
}

}  // namespace

int main(int argc, char** argv) { return bench::run(argc, argv, add_all); }
