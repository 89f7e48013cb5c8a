// SPDX-License-Identifier: Apache-2.0
// The GPU ops against the reference, through the public API, on shapes small enough for compute-sanitizer: every array has
// device memory of its own and exactly its size. The exhaustive tests are the Python ones.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "core/half.h"
#include "core/kv_layout.h"
#include "core/w4_layout.h"
#include "rooftile/attention.h"
#include "rooftile/fused.h"
#include "rooftile/gemm.h"

namespace rooftile {
namespace {

constexpr Device gpu{DeviceType::cuda, 0};

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    int devices = 0;
    if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) GTEST_SKIP() << "no GPU";
  }
  void TearDown() override {
    if (IsSkipped()) return;
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
};

// An array on the host and on the device.
class Array {
 public:
  Array() = default;
  Array(DType dtype, std::vector<std::int64_t> shape) {
    host_.dtype = dtype;
    host_.ndim = static_cast<int>(shape.size());
    std::int64_t stride = 1;
    for (int i = host_.ndim - 1; i >= 0; --i) {
      host_.shape[i] = shape[static_cast<std::size_t>(i)];
      host_.stride[i] = stride;
      stride *= host_.shape[i];
    }
    bytes_ = std::make_shared<std::vector<std::byte>>(static_cast<std::size_t>(stride) * size_of(dtype));
    host_.data = bytes_->data();
    device_ = host_;
    device_.device = gpu;
    device_.data = nullptr;
    if (bytes_->empty()) return;
    EXPECT_EQ(cudaMalloc(&device_.data, bytes_->size()), cudaSuccess);
    memory_ = std::shared_ptr<void>(device_.data, [](void* p) { cudaFree(p); });
    upload();
  }
  // Normal values.
  Array(DType dtype, std::vector<std::int64_t> shape, unsigned seed) : Array(dtype, std::move(shape)) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < host_.numel(); ++i) set(i, normal(random));
    upload();
  }
  explicit Array(const std::vector<std::int32_t>& values) : Array(DType::i32, {static_cast<std::int64_t>(values.size())}) {
    std::memcpy(bytes_->data(), values.data(), bytes_->size());
    upload();
  }

  bool given() const { return host_.given(); }
  const TensorView& on(Device d) const { return d == gpu ? device_ : host_; }
  std::size_t size() const { return bytes_->size(); }
  void upload() const { EXPECT_EQ(cudaMemcpy(device_.data, bytes_->data(), bytes_->size(), cudaMemcpyDefault), cudaSuccess); }
  std::vector<std::byte> from_gpu() const {
    std::vector<std::byte> bytes(bytes_->size());
    EXPECT_EQ(cudaMemcpy(bytes.data(), device_.data, bytes.size(), cudaMemcpyDefault), cudaSuccess);
    return bytes;
  }
  bool same_bytes() const { return !given() || from_gpu() == *bytes_; }

  float value(const std::byte* from, std::int64_t i) const {
    switch (host_.dtype) {
      case DType::f16: return to_float(reinterpret_cast<const Half*>(from)[i]);
      case DType::bf16: return to_float(reinterpret_cast<const BFloat16*>(from)[i]);
      default: return reinterpret_cast<const float*>(from)[i];
    }
  }
  // What the GPU wrote against what the reference did: relative to the largest value.
  void expect_close(double tolerance) const {
    const std::vector<std::byte> got = from_gpu();
    double error = 0, largest = 1e-30;
    for (std::int64_t i = 0; i < host_.numel(); ++i) {
      const double x = value(got.data(), i), y = value(bytes_->data(), i);
      if (!std::isfinite(x) || !std::isfinite(y)) {
        EXPECT_EQ(x, y) << "at " << i;
        continue;
      }
      error = std::max(error, std::abs(x - y));
      largest = std::max(largest, std::abs(y));
    }
    EXPECT_LE(error / largest, tolerance);
  }

 private:
  void set(std::int64_t i, float x) {
    switch (host_.dtype) {
      case DType::f16: host_.as<Half>()[i] = from_float<Half>(x); break;
      case DType::bf16: host_.as<BFloat16>()[i] = from_float<BFloat16>(x); break;
      default: host_.as<float>()[i] = x; break;
    }
  }
  std::shared_ptr<std::vector<std::byte>> bytes_;
  std::shared_ptr<void> memory_;
  TensorView host_, device_;
};

double tolerance(DType t) { return t == DType::bf16 ? 1.6e-2 : 4e-3; }

Context context(Device d, const Array& workspace = {}) {
  Context ctx;
  ctx.device = d;
  ctx.variant = d == gpu ? nullptr : "reference";
  if (workspace.given()) {
    ctx.workspace = workspace.on(d).data;
    ctx.workspace_bytes = workspace.size();
  }
  return ctx;
}

// One cache on both sides. Paged ones have their pages in descending order.
struct Cache {
  Cache(KvFormat f, DType dtype, int page, int heads, int dim, std::vector<std::int32_t> capacity, bool paged) {
    const auto rows = static_cast<std::int64_t>(capacity.size());
    std::int64_t most = 0, total = 0;
    for (std::int32_t tokens : capacity) {
      most = std::max<std::int64_t>(most, (tokens + page - 1) / page);
      total += (tokens + page - 1) / page;
    }
    if (!paged) total = rows * most;
    if (is_element_format(f)) {
      k_pool = Array(dtype, {total, page, heads, dim});
      v_pool = Array(dtype, {total, page, heads, dim});
    } else {
      pool = Array(DType::u8, {total, heads, static_cast<std::int64_t>(kv_block_bytes(f, page, dim))});
    }
    if (paged) {
      table = Array(DType::i32, {rows, most});
      auto next = static_cast<std::int32_t>(total);
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t i = 0; i < most; ++i)
          table.on({}).as<std::int32_t>()[r * most + i] = i * page < capacity[static_cast<std::size_t>(r)] ? --next : 1 << 30;
      table.upload();
    }
    lengths = Array(DType::i32, {rows});
    if (is_kivi(f)) {
      ring_k = Array(dtype, {rows, heads, kv_ring, dim});
      ring_v = Array(dtype, {rows, heads, kv_ring, dim});
      raw_from = Array(DType::i32, {rows});
    }
    void* pinned = nullptr;
    EXPECT_EQ(cudaMallocHost(&pinned, sizeof(std::int32_t)), cudaSuccess);
    fault = std::shared_ptr<void>(pinned, [](void* p) { cudaFreeHost(p); });
    *static_cast<std::int32_t*>(pinned) = 0;
    const auto view_on = [&](Device d) {
      KvCacheArrays a{.pool = pool.on(d), .k_pool = k_pool.on(d), .v_pool = v_pool.on(d), .block_table = table.on(d),
                      .lengths = lengths.on(d), .ring_k = ring_k.on(d), .ring_v = ring_v.on(d), .raw_from = raw_from.on(d)};
      if (d == gpu) {
        a.fault = lengths.on({});
        a.fault.data = pinned;
        a.fault.shape[0] = 1;
      }
      return kv_cache_view({f, dtype, page, heads, dim, rows, most}, a);
    };
    cpu_view = view_on({});
    gpu_view = view_on(gpu);
  }
  const KvCacheView& on(Device d) const { return d == gpu ? gpu_view : cpu_view; }
  // What the reference wrote goes to the device.
  void upload() const {
    for (const Array* a : {&pool, &k_pool, &v_pool, &lengths, &ring_k, &ring_v, &raw_from})
      if (a->given()) a->upload();
  }
  void expect_same_bytes() const {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(*static_cast<std::int32_t*>(fault.get()), 0);
    EXPECT_TRUE(pool.same_bytes() && k_pool.same_bytes() && v_pool.same_bytes()) << "pages";
    EXPECT_TRUE(ring_k.same_bytes() && ring_v.same_bytes()) << "ring";
    EXPECT_TRUE(lengths.same_bytes() && raw_from.same_bytes()) << "lengths";
  }

  Array pool, k_pool, v_pool, table, lengths, ring_k, ring_v, raw_from;
  std::shared_ptr<void> fault;
  KvCacheView cpu_view, gpu_view;
};

struct Format {
  KvFormat format;
  DType dtype;
};
constexpr Format attended[] = {{KvFormat::fp16, DType::f16}, {KvFormat::bf16, DType::bf16}, {KvFormat::int8, DType::f16},
                               {KvFormat::int8, DType::bf16}, {KvFormat::int4_kivi, DType::f16}, {KvFormat::int4_kivi, DType::bf16}};
constexpr Format appended[] = {{KvFormat::fp16, DType::f16}, {KvFormat::bf16, DType::bf16}, {KvFormat::int8, DType::f16},
                               {KvFormat::int4, DType::bf16}, {KvFormat::int4_kivi_sym, DType::f16}, {KvFormat::int4_kivi, DType::bf16}};
constexpr Device both[] = {{}, gpu};

TEST_F(Gpu, DecodeAttention) {
  const std::vector<std::int32_t> lengths{1, 130, 0, 519, 33, 64};
  const auto rows = static_cast<std::int64_t>(lengths.size());
  unsigned seed = 0;
  for (const auto [format, dtype] : attended)
    for (const int dim : {64, 128})
      for (const std::int64_t tokens : {1, 5}) {   // 5: two passes of query columns, and a group ends between them
        SCOPED_TRACE(testing::Message() << name(format) << ' ' << name(dtype) << " d " << dim << " T " << tokens);
        const bool paged = ++seed % 2;
        const int heads = 6, kv_heads = tokens == 1 ? 2 : 3;
        const Cache cache(format, dtype, paged ? 32 : 64, kv_heads, dim, lengths, paged);
        const Array k(dtype, {rows, 519, kv_heads, dim}, seed), v(dtype, {rows, 519, kv_heads, dim}, seed + 100), counts(lengths);
        kv_append(context({}), cache.on({}), k.on({}), v.on({}), {}, counts.on({}));
        cache.upload();
        const Array q(dtype, {rows, tokens, heads, dim}, seed + 200), sinks(DType::f32, {heads}, seed + 300);
        const Array real(std::vector<std::int32_t>{1, static_cast<std::int32_t>(tokens), 1, static_cast<std::int32_t>(tokens), 0, 1});
        const Array out(dtype, {rows, tokens, heads, dim}), lse(DType::f32, {rows, tokens, heads});
        const Array workspace(DType::u8, {static_cast<std::int64_t>(decode_workspace(context(gpu), q.on(gpu), cache.on(gpu)))});
        for (const Device d : both) {
          LogitOptions options;
          if (seed % 3 == 0) options.window = 70;
          if (seed % 4 == 0) options.softcap = 3.0f;
          if (seed % 5 == 0) options.sinks = sinks.on(d);
          decode_attention(context(d, workspace), q.on(d), cache.on(d), out.on(d), lse.on(d), {}, tokens > 1 ? real.on(d) : TensorView{}, options);
        }
        out.expect_close(tolerance(dtype));
        lse.expect_close(1e-3);
      }
}

TEST_F(Gpu, AppendStoresTheBytesOfTheReference) {
  unsigned seed = 0;
  for (const auto [format, dtype] : appended)
    for (const int dim : {64, 128}) {
      SCOPED_TRACE(testing::Message() << name(format) << ' ' << name(dtype) << " d " << dim);
      const bool paged = ++seed % 2;
      const Cache cache(format, dtype, 32, 2, dim, {160, 96, 160}, paged);
      // rows out of order, one of them left alone by its count
      const Array rows(std::vector<std::int32_t>{2, 0, 1});
      std::int64_t step = 45;
      for (const std::vector<std::int32_t>& real : {std::vector<std::int32_t>{45, 40, 0}, {1, 1, 1}, {70, 7, 64}}) {
        const Array k(dtype, {3, step, 2, dim}, ++seed), v(dtype, {3, step, 2, dim}, seed + 100), counts(real);
        for (const Device d : both) kv_append(context(d), cache.on(d), k.on(d), v.on(d), rows.on(d), counts.on(d));
        step = step == 45 ? 1 : 70;
      }
      cache.expect_same_bytes();
    }
}

TEST_F(Gpu, RopeAppend) {
  for (const auto [format, dtype] : {Format{KvFormat::fp16, DType::f16}, {KvFormat::int4_kivi, DType::bf16}}) {
    SCOPED_TRACE(name(format));
    const Cache cache(format, dtype, 32, 2, 64, {64, 64}, false);
    const Array q(dtype, {2, 35, 4, 64}, 1), k(dtype, {2, 35, 2, 64}, 2), v(dtype, {2, 35, 2, 64}, 3), q_out(dtype, {2, 35, 4, 64});
    const Array cos(DType::f32, {100, 32}, 4), sin(DType::f32, {100, 32}, 5), positions(DType::i32, {2, 35});
    for (std::int32_t i = 0; i < 70; ++i) positions.on({}).as<std::int32_t>()[i] = i % 35 + 9;
    positions.upload();
    for (const Device d : both)
      rope_append(context(d), q.on(d), k.on(d), v.on(d), cos.on(d), sin.on(d), positions.on(d), cache.on(d), {}, {}, q_out.on(d));
    cache.expect_same_bytes();
    EXPECT_TRUE(q_out.same_bytes());
  }
}

TEST_F(Gpu, ProductsWithFourBitWeights) {
  unsigned seed = 0;
  for (const W4Zeros zeros : {W4Zeros::symmetric, W4Zeros::minima})
    for (const std::int64_t m : {1, 9, 20, 70}) {   // a regime each
      const std::int64_t n = 80, k = 256;
      const int group = seed % 2 ? 64 : 128;
      const DType dtype = ++seed % 3 ? DType::f16 : DType::bf16;
      SCOPED_TRACE(testing::Message() << name(zeros) << ' ' << name(dtype) << " m " << m << " group " << group);
      const Array weight(DType::f32, {n, k}, seed), codes(DType::u8, {n, k / 2}), scales(DType::f16, {n, k / group});
      Array offsets, kernel_offsets;
      const W4Sizes sizes = w4_sizes("test", n, k, group, zeros);
      const Array kernel_codes(DType::u8, {sizes.codes}), kernel_scales(DType::u8, {sizes.scales});
      if (zeros == W4Zeros::minima) {
        offsets = Array(DType::f16, {n, k / group});
        kernel_offsets = Array(DType::u8, {sizes.offsets});
      }
      const Array x(dtype, {m, k}, seed + 50), bias(dtype, {n}, seed + 60), residual(dtype, {m, n}, seed + 70), y(dtype, {m, n});
      W4View views[2];
      for (const Device d : both) {
        const Context ctx = context(d);
        w4_quantize(ctx, weight.on(d), group, zeros, codes.on(d), scales.on(d), offsets.on(d));
        w4_pack(ctx, codes.on(d), scales.on(d), offsets.on(d), zeros, group, kernel_codes.on(d), kernel_scales.on(d), kernel_offsets.on(d));
        views[d == gpu] = w4_view(n, k, group, zeros, DType::f16, kernel_codes.on(d), kernel_scales.on(d), kernel_offsets.on(d), {});
      }
      EXPECT_TRUE(codes.same_bytes() && scales.same_bytes() && offsets.same_bytes()) << "quantised";
      EXPECT_TRUE(kernel_codes.same_bytes() && kernel_scales.same_bytes() && kernel_offsets.same_bytes()) << "packed";
      const Array workspace(DType::u8, {static_cast<std::int64_t>(w4a16_workspace(context(gpu), x.on(gpu), views[1]))});
      for (const Device d : both) {
        MatmulOptions options;
        if (m > 1) options = {.bias = bias.on(d), .residual = residual.on(d), .activation = Activation::silu};
        w4a16_matmul(context(d, workspace), x.on(d), views[d == gpu], y.on(d), options);
      }
      y.expect_close(tolerance(dtype));
    }
}

TEST_F(Gpu, NormsActivationsAndSoftmax) {
  unsigned seed = 0;
  for (const DType dtype : {DType::f16, DType::bf16})
    for (const std::int64_t width : {8, 77, 1024, 20000}) {   // vectors, odd, and rows that registers do not hold
      SCOPED_TRACE(testing::Message() << name(dtype) << " width " << width);
      const std::int64_t rows = width > 1024 ? 2 : 5;
      const Array x(dtype, {rows, width}, ++seed), residual(dtype, {rows, width}, ++seed), wide(dtype, {rows, 2 * width}, ++seed);
      const Array weight(dtype, {width}, ++seed), bias(dtype, {width}, ++seed);
      std::vector<Array> y;
      for (int i = 0; i < 8; ++i) y.emplace_back(dtype, std::vector<std::int64_t>{rows, width});
      for (const Device d : both) {
        const Context ctx = context(d);
        rms_norm(ctx, x.on(d), weight.on(d), 1e-5f, y[0].on(d));
        add_rms_norm(ctx, x.on(d), residual.on(d), weight.on(d), 1e-5f, y[1].on(d), y[2].on(d));
        layer_norm(ctx, x.on(d), weight.on(d), bias.on(d), 1e-5f, y[3].on(d));
        add_layer_norm(ctx, x.on(d), residual.on(d), weight.on(d), {}, 1e-5f, y[4].on(d), y[5].on(d));
        silu_mul(ctx, wide.on(d), y[6].on(d));
        softmax(ctx, x.on(d), y[7].on(d));
      }
      for (std::size_t i = 0; i < y.size(); ++i) {
        SCOPED_TRACE(i);
        y[i].expect_close(tolerance(dtype));
      }
      for (const Gelu form : {Gelu::tanh, Gelu::erf}) {
        for (const Device d : both) gelu_mul(context(d), wide.on(d), form, y[0].on(d));
        y[0].expect_close(tolerance(dtype));
      }
    }
}

TEST_F(Gpu, RopeAndMerge) {
  for (const DType dtype : {DType::f16, DType::bf16})
    for (const std::int64_t dim : {64, 70}) {
      SCOPED_TRACE(testing::Message() << name(dtype) << " d " << dim);
      const Array q(dtype, {7, 4, dim}, 1), k(dtype, {7, 2, dim}, 2), cos(dtype, {50, 32}, 3), sin(dtype, {50, 32}, 4);
      const Array positions(std::vector<std::int32_t>{0, 49, 3, 3, 12, 1, 40}), q_out(dtype, {7, 4, dim}), k_out(dtype, {7, 2, dim});
      const Array other(dtype, {7, 4, dim}, 5), lse_a(DType::f32, {7, 4}, 6), lse_b(DType::f32, {7, 4}, 7);
      const Array merged(dtype, {7, 4, dim}), lse(DType::f32, {7, 4});
      lse_a.on({}).as<float>()[3] = -INFINITY;
      lse_b.on({}).as<float>()[3] = lse_b.on({}).as<float>()[5] = -INFINITY;
      lse_a.upload();
      lse_b.upload();
      for (const Device d : both) {
        rope(context(d), q.on(d), k.on(d), cos.on(d), sin.on(d), positions.on(d), q_out.on(d), k_out.on(d));
        merge_attention(context(d), q.on(d), lse_a.on(d), other.on(d), lse_b.on(d), merged.on(d), lse.on(d));
      }
      q_out.expect_close(tolerance(dtype));
      k_out.expect_close(tolerance(dtype));
      merged.expect_close(tolerance(dtype));
      lse.expect_close(1e-5);
    }
}

}  // namespace
}  // namespace rooftile
