// SPDX-License-Identifier: Apache-2.0
// The GPU ops against the reference, through the public API, on shapes small enough for compute-sanitizer: every array
// has device memory of its own and exactly its size. The exhaustive tests are the Python ones.
//
// Fresh memory is 0xff on the host and 0x7f on the device: NaN here, NaN or huge there, and never the same bytes, so an
// element that either side does not write is found by every comparison.
#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "core/half.h"
#include "rooftile/attention.h"
#include "rooftile/fused.h"
#include "rooftile/gemm.h"
#include "rooftile/sampling.h"
#include "support/kv_arrays.h"

namespace rooftile {
namespace {

constexpr Device gpu{DeviceType::cuda, 0};
constexpr Device both[] = {{}, gpu};

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
  Array(DType dtype, const Shape& shape) : host_(contiguous_view(nullptr, dtype, {}, shape)) {
    bytes_ = std::make_shared<std::vector<std::byte>>(bytes_of(host_));
    host_.data = bytes_->data();
    device_ = host_;
    device_.device = gpu;
    device_.data = nullptr;
    if (bytes_->empty()) return;
    EXPECT_EQ(cudaMalloc(&device_.data, bytes_->size()), cudaSuccess);
    memory_ = std::shared_ptr<void>(device_.data, [](void* p) { cudaFree(p); });
    poison();
  }
  // Normal values.
  Array(DType dtype, const Shape& shape, unsigned seed) : Array(dtype, shape) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (std::int64_t i = 0; i < host_.numel(); ++i) cpu::write(host_, i, normal(random));
    upload();
  }
  explicit Array(const std::vector<std::int32_t>& values)
      : Array(DType::i32, {static_cast<std::int64_t>(values.size())}) {
    std::memcpy(bytes_->data(), values.data(), bytes_->size());
    upload();
  }

  bool given() const { return host_.given(); }
  const TensorView& on(Device d) const { return d == gpu ? device_ : host_; }
  std::size_t size() const { return bytes_->size(); }
  std::byte* bytes() const { return bytes_->data(); }
  void poison() const {
    std::fill(bytes_->begin(), bytes_->end(), std::byte{0xff});
    EXPECT_EQ(cudaMemset(device_.data, 0x7f, bytes_->size()), cudaSuccess);
  }
  void upload() const {
    EXPECT_EQ(cudaMemcpy(device_.data, bytes_->data(), bytes_->size(), cudaMemcpyDefault), cudaSuccess);
  }
  std::vector<std::byte> from_gpu() const {
    std::vector<std::byte> bytes(bytes_->size());
    EXPECT_EQ(cudaMemcpy(bytes.data(), device_.data, bytes.size(), cudaMemcpyDefault), cudaSuccess);
    return bytes;
  }
  bool same_bytes() const { return !given() || from_gpu() == *bytes_; }

  // What the GPU wrote against what the reference did, row by row.
  void expect_close(double tolerance, double floor = 0) const {
    std::vector<std::byte> bytes = from_gpu();
    TensorView got = host_;
    got.data = bytes.data();
    EXPECT_LE(worst_row(got, host_, floor), tolerance);
  }

 private:
  std::shared_ptr<std::vector<std::byte>> bytes_;
  std::shared_ptr<void> memory_;
  TensorView host_, device_;
};

// Two results that each end in one rounding are neighbours at worst: apart by two of these, relative to the row's
// largest.
// Two more are room for what is rounded to 16 bits on the way (weights of a softmax: their errors cancel as noise does)
// and for approximate functions.
double tolerance(DType t) { return 4 * (t == DType::bf16 ? 0x1p-8 : 0x1p-11); }

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

// One cache on both sides. Where nothing is stored both hold 0xff.
struct Cache {
  Cache(KvFormat f, DType dtype, int page, int heads, int dim, const std::vector<std::int32_t>& capacity, bool paged) {
    const KvPages pages = deal_pages(capacity, page, paged, 1);
    const KvCacheShape shape{f, dtype, page, heads, dim, static_cast<std::int64_t>(capacity.size()), pages.row};
    const auto allocate = [&](DType t, const Shape& s) {
      const Array& a = arrays.emplace_back(t, s);
      if (t == DType::i32) std::fill_n(a.bytes(), a.size(), std::byte{0});
      return a.on({});
    };
    cpu_view = kv_cache_view(shape, kv_arrays(shape, pages, allocate));
    if (paged) std::memcpy(arrays[0].bytes(), pages.table.data(), arrays[0].size());
    upload();
    auto next = arrays.begin();
    KvCacheArrays on_gpu = kv_arrays(shape, pages, [&](DType, const Shape&) { return (next++)->on(gpu); });
    void* pinned = nullptr;
    EXPECT_EQ(cudaMallocHost(&pinned, sizeof(std::int32_t)), cudaSuccess);
    fault = std::shared_ptr<void>(pinned, [](void* p) { cudaFreeHost(p); });
    *static_cast<std::int32_t*>(pinned) = 0;
    on_gpu.fault = contiguous_view(pinned, DType::i32, {}, {1});
    gpu_view = kv_cache_view(shape, on_gpu);
  }
  const KvCacheView& on(Device d) const { return d == gpu ? gpu_view : cpu_view; }
  // What the reference wrote goes to the device.
  void upload() const {
    for (const Array& a : arrays) a.upload();
  }
  void expect_same_bytes() const {
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    EXPECT_EQ(*static_cast<std::int32_t*>(fault.get()), 0);
    for (const Array& a : arrays) EXPECT_TRUE(a.same_bytes()) << describe(a.on({}));
  }

  std::vector<Array> arrays;
  std::shared_ptr<void> fault;
  KvCacheView cpu_view, gpu_view;
};

using Random = std::mt19937;
bool one_in(unsigned n, Random& random) { return random() % n == 0; }

struct Format {
  KvFormat format;
  DType dtype;
};
constexpr Format attended[] = {{KvFormat::fp16, DType::f16},          {KvFormat::bf16, DType::bf16},
                               {KvFormat::int8, DType::f16},          {KvFormat::int8, DType::bf16},
                               {KvFormat::int4_kivi, DType::f16},     {KvFormat::int4_kivi, DType::bf16},
                               {KvFormat::int8_kivi_sym, DType::f16}, {KvFormat::int8_kivi_sym, DType::bf16}};
constexpr Format appended[] = {{KvFormat::fp16, DType::f16},          {KvFormat::bf16, DType::bf16},
                               {KvFormat::int8, DType::f16},          {KvFormat::int8, DType::bf16},
                               {KvFormat::int4, DType::f16},          {KvFormat::int4, DType::bf16},
                               {KvFormat::int4_kivi_sym, DType::f16}, {KvFormat::int4_kivi_sym, DType::bf16},
                               {KvFormat::int4_kivi, DType::f16},     {KvFormat::int4_kivi, DType::bf16},
                               {KvFormat::int8_kivi_sym, DType::f16}, {KvFormat::int8_kivi_sym, DType::bf16}};

// Calls body(page_size) for those that a format can have.
template <class F>
void for_each_page_size(KvFormat f, const F& body) {
  for (const int page : {16, 32, 64, 128})
    if (!is_kivi(f) || page % kv_group == 0) body(page);
}

TEST_F(Gpu, DecodeAttention) {
  const std::vector<std::int32_t> lengths{1, 130, 0, 519, 33, 64};
  const auto batch = static_cast<std::int64_t>(lengths.size());
  const Shape widest{batch, 519, 3, 256};
  const Array k_f16(DType::f16, widest, 1), v_f16(DType::f16, widest, 2), k_bf16(DType::bf16, widest, 1),
      v_bf16(DType::bf16, widest, 2);
  Random random(1);
  const auto compare = [&](KvFormat format, DType dtype, int page, int dim, std::int64_t tokens) {
    const bool paged = one_in(2, random), picked = one_in(2, random), padded = tokens > 1 || one_in(2, random);
    SCOPED_TRACE(testing::Message() << name(format) << ' ' << name(dtype) << " page " << page << (paged ? " paged" : "")
                                    << " d " << dim << " T " << tokens << (picked ? " rows" : "")
                                    << (padded ? " counts" : ""));
    const int heads = 6, kv_heads = tokens == 1 ? 2 : 3;
    const Cache cache(format, dtype, page, kv_heads, dim, lengths, paged);
    const auto cut = [&](TensorView t) {
      t.shape[2] = kv_heads;
      t.shape[3] = dim;
      return t;
    };
    const bool half = dtype == DType::f16;
    const Array stored(lengths);
    kv_append(context({}), cache.on({}), cut((half ? k_f16 : k_bf16).on({})), cut((half ? v_f16 : v_bf16).on({})), {},
              stored.on({}));
    cache.upload();
    const auto seed = static_cast<unsigned>(random());
    const Array q(dtype, {batch, tokens, heads, dim}, seed), sinks(DType::f32, {heads}, seed + 1);
    // one row twice, one not at all; padding queries of a row, and a row of them
    const Array rows(std::vector<std::int32_t>{3, 1, 2, 3, 5, 0});
    const auto all = static_cast<std::int32_t>(tokens);
    const Array counts(std::vector<std::int32_t>{1, all, 1, all, 0, 1});
    const Array out(dtype, {batch, tokens, heads, dim}), lse(DType::f32, {batch, tokens, heads});
    const Array workspace(DType::u8,
                          {static_cast<std::int64_t>(decode_workspace(context(gpu), q.on(gpu), cache.on(gpu)))});
    LogitOptions options;
    if (one_in(3, random)) options.window = 70;
    if (one_in(3, random)) options.softcap = 3.0f;
    const bool sinking = one_in(3, random);
    for (const Device d : both) {
      if (sinking) options.sinks = sinks.on(d);
      decode_attention(context(d, workspace), q.on(d), cache.on(d), out.on(d), lse.on(d),
                       picked ? rows.on(d) : TensorView{}, padded ? counts.on(d) : TensorView{}, options);
    }
    out.expect_close(tolerance(dtype));
    lse.expect_close(is_kivi(format) ? tolerance(DType::f16) : 0x1p-13,
                     1);  // kivi: queries times scales are rounded to fp16
  };
  for (const auto [format, dtype] : attended)
    for_each_page_size(format, [&, format = format, dtype = dtype](int page) {
      for (const int dim : {64, 128, 256})
        for (const std::int64_t tokens : {1, 5})  // 5: two m-blocks of packed rows, and a kivi group ends between
          if (dim < 256 || page == 32) compare(format, dtype, page, dim, tokens);
    });
}

// Rows of so many tokens, whose caches are as long as the longest, attended by one query each.
void expect_same_attention(const std::vector<std::int32_t>& lengths, int kv_heads, std::initializer_list<int> dims) {
  const auto batch = static_cast<std::int64_t>(lengths.size()),
             longest = static_cast<std::int64_t>(*std::max_element(lengths.begin(), lengths.end()));
  const Array stored(lengths);
  for (const auto [format, dtype] : attended)
    for (const int dim : dims) {
      if (dtype != DType::f16) continue;  // the same code
      SCOPED_TRACE(testing::Message() << name(format) << ' ' << name(dtype) << " d " << dim);
      const Cache cache(format, dtype, 32, kv_heads, dim, lengths, false);
      const int heads = 2 * kv_heads;
      const Array k(dtype, {batch, longest, kv_heads, dim}, 1), v(dtype, {batch, longest, kv_heads, dim}, 2),
          q(dtype, {batch, 1, heads, dim}, 3);
      kv_append(context({}), cache.on({}), k.on({}), v.on({}), {}, stored.on({}));
      cache.upload();
      const Array out(dtype, {batch, 1, heads, dim}), lse(DType::f32, {batch, 1, heads});
      const Array workspace(DType::u8,
                            {static_cast<std::int64_t>(decode_workspace(context(gpu), q.on(gpu), cache.on(gpu)))});
      for (const Device d : both)
        decode_attention(context(d, workspace), q.on(d), cache.on(d), out.on(d), lse.on(d), {}, {}, {});
      out.expect_close(tolerance(dtype));
      lse.expect_close(is_kivi(format) ? tolerance(DType::f16) : 0x1p-13, 1);
    }
}

// So that a CTA ends one work tile and begins another.
TEST_F(Gpu, DecodeAttentionOfMoreWorkTilesThanCtas) {
  Random random(3);
  std::vector<std::int32_t> lengths(100);
  for (std::int32_t& length : lengths) length = static_cast<std::int32_t>(33 + random() % 150);
  expect_same_attention(lengths, 6, {64, 128});
}

// Too long for clusters: CTAs that have a work tile to themselves, and CTAs with a stream-K range.
TEST_F(Gpu, DecodeAttentionOfLongRows) {
  expect_same_attention({4200, 4200}, 1, {128, 256});
  expect_same_attention({4200, 90, 300}, 1, {128, 256});
}

TEST_F(Gpu, AppendStoresTheBytesOfTheReference) {
  Random random(2);
  for (const auto [format, dtype] : appended)
    for_each_page_size(format, [&, format = format, dtype = dtype](int page) {
      const bool paged = one_in(2, random);
      const int dim = one_in(2, random) ? 64 : 128;
      SCOPED_TRACE(testing::Message() << name(format) << ' ' << name(dtype) << " page " << page << " d " << dim);
      const Cache cache(format, dtype, page, 2, dim, {160, 96, 160}, paged);
      // rows out of order, one of them left alone by its count
      const Array rows(std::vector<std::int32_t>{2, 0, 1});
      std::int64_t step = 45;
      for (const std::vector<std::int32_t>& real : {std::vector<std::int32_t>{45, 40, 0}, {1, 1, 1}, {70, 7, 64}}) {
        const auto seed = static_cast<unsigned>(random());
        const Array k(dtype, {3, step, 2, dim}, seed), v(dtype, {3, step, 2, dim}, seed + 1), counts(real);
        for (const Device d : both) kv_append(context(d), cache.on(d), k.on(d), v.on(d), rows.on(d), counts.on(d));
        step = step == 45 ? 1 : 70;
      }
      cache.expect_same_bytes();
    });
}

TEST_F(Gpu, RopeAppend) {
  for (const auto [format, dtype] : appended) {
    SCOPED_TRACE(testing::Message() << name(format) << ' ' << name(dtype));
    const Cache cache(format, dtype, 32, 2, 64, {64, 64}, false);
    const Array q(dtype, {2, 35, 4, 64}, 1), k(dtype, {2, 35, 2, 64}, 2), v(dtype, {2, 35, 2, 64}, 3),
        q_out(dtype, {2, 35, 4, 64});
    const Array cos(DType::f32, {100, 32}, 4), sin(DType::f32, {100, 32}, 5), positions(DType::i32, {2, 35});
    for (std::int32_t i = 0; i < 70; ++i) positions.on({}).as<std::int32_t>()[i] = i % 35 + 9;
    positions.upload();
    for (const Device d : both)
      rope_append(context(d), q.on(d), k.on(d), v.on(d), cos.on(d), sin.on(d), positions.on(d), cache.on(d), {}, {},
                  q_out.on(d));
    cache.expect_same_bytes();
    EXPECT_TRUE(q_out.same_bytes());
  }
}

// A weight in both layouts, canonical and packed, and views of the packed one on both devices.
struct Weight {
  Weight(std::int64_t n, std::int64_t k, int bits, int group, W4Zeros zeros, DType scale_dtype, bool act_order,
         Random& random)
      : codes(DType::u8, {n, k * bits / 8}), scales(scale_dtype, {n, k / group}) {
    if (zeros != W4Zeros::symmetric)
      offsets = Array(zeros == W4Zeros::integer ? DType::u8 : scale_dtype, {n, k / group});
    if (zeros == W4Zeros::integer) {  // nothing here rounds to these: made up
      for (const Array* a : {&codes, &offsets})
        for (std::size_t i = 0; i < a->size(); ++i)
          a->bytes()[i] = static_cast<std::byte>(random() % (a == &codes || bits == 8 ? 256 : 17));
      for (std::int64_t i = 0; i < n * (k / group); ++i)
        cpu::write(scales.on({}), i, (0.1f + 0.01f * static_cast<float>(random() % 32)) / (bits == 4 ? 1 : 16));
      for (const Array* a : {&codes, &scales, &offsets}) a->upload();
    } else {
      const Array weight(DType::f32, {n, k}, static_cast<unsigned>(random()));
      for (const Device d : both)
        w4_quantize(context(d), weight.on(d), bits, group, zeros, codes.on(d), scales.on(d), offsets.on(d));
      EXPECT_TRUE(codes.same_bytes() && scales.same_bytes() && offsets.same_bytes()) << "quantised";
    }
    const W4Sizes sizes = w4_sizes("test", n, k, bits, group, zeros);
    kernel_codes = Array(DType::u8, {sizes.codes});
    kernel_scales = Array(DType::u8, {sizes.scales});
    if (offsets.given()) kernel_offsets = Array(DType::u8, {sizes.offsets});
    if (act_order) {
      std::vector<std::int32_t> order(static_cast<std::size_t>(k));
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      perm = Array(order);
    }
    for (const Device d : both) {
      w4_pack(context(d), codes.on(d), scales.on(d), offsets.on(d), zeros, bits, group, kernel_codes.on(d),
              kernel_scales.on(d), kernel_offsets.on(d));
      views[d == gpu] = w4_view(n, k, bits, group, zeros, scale_dtype, kernel_codes.on(d), kernel_scales.on(d),
                                kernel_offsets.on(d), perm.on(d));
    }
    EXPECT_TRUE(kernel_codes.same_bytes() && kernel_scales.same_bytes() && kernel_offsets.same_bytes()) << "packed";
  }
  const W4View& on(Device d) const { return views[d == gpu]; }

  Array codes, scales, offsets, kernel_codes, kernel_scales, kernel_offsets, perm;
  W4View views[2];
};

// body(weight, random) for every kind of weight: N is no multiple of a tile nor of a block's eight, K of a step's two.
template <class F>
void for_each_weight(const F& body) {
  Random random(3);
  int act_order = 0;  // every third
  struct Form {
    int bits;
    W4Zeros zeros;
  };
  for (const auto [bits, zeros] : {Form{4, W4Zeros::symmetric},
                                   {4, W4Zeros::integer},
                                   {4, W4Zeros::minima},
                                   {8, W4Zeros::symmetric},
                                   {8, W4Zeros::integer}})
    for (const int group : {32, 64, 128, 200}) {
      const std::int64_t n = 147,
                         k = group == 128 ? 768
                             : group == 200
                                 ? 200
                                 : 704;  // more steps than wgmma_codes.cuh has stages; 200: one group for all of K
      const DType scale_dtype = one_in(2, random) ? DType::f16 : DType::bf16;
      const bool ordered = ++act_order % 3 == 0;
      SCOPED_TRACE(testing::Message() << bits << " bits " << name(zeros) << " group " << group << " scales "
                                      << name(scale_dtype) << (ordered ? " act-order" : ""));
      body(Weight(n, k, bits, group, zeros, scale_dtype, ordered, random), random);
    }
}

TEST_F(Gpu, FormsOfPackedWeights) {
  for_each_weight([](const Weight& w, Random& random) {
    const W4View& view = w.on({});
    const Array codes(DType::u8, {view.n, view.k * view.bits / 8}),
        scales(view.scale_dtype, {view.n, view.k / view.group});
    const Array offsets = w.offsets.given() ? Array(w.offsets.on({}).dtype, {view.n, view.k / view.group}) : Array();
    const Array meant(one_in(3, random) ? DType::f32 : one_in(2, random) ? DType::f16 : DType::bf16, {view.n, view.k});
    for (const Device d : both) {
      w4_unpack(context(d), w.on(d), codes.on(d), scales.on(d), offsets.on(d));
      w4_dequantize(context(d), w.on(d), meant.on(d));
    }
    EXPECT_TRUE(codes.same_bytes() && scales.same_bytes() && offsets.same_bytes()) << "unpacked";
    EXPECT_TRUE(codes.from_gpu() == w.codes.from_gpu() && scales.from_gpu() == w.scales.from_gpu())
        << "as before it was packed";
    EXPECT_TRUE(meant.same_bytes()) << "dequantised";
  });
}

TEST_F(Gpu, ProductsWithPackedWeights) {
  for_each_weight([](const Weight& w, Random& random) {
    const bool four = w.on({}).bits == 4;
    const auto workspace_of = four ? w4a16_workspace : w8a16_workspace;
    const auto multiply = four ? w4a16_matmul : w8a16_matmul;
    for (const std::int64_t m : {1, 9, 20, 40, 70}) {  // an M bucket each
      const DType dtype = one_in(2, random) ? DType::f16 : DType::bf16;
      MatmulOptions options{.batch_invariant = one_in(3, random)};
      const std::int64_t n = w.on({}).n, k = w.on({}).k, stride = k + (one_in(2, random) ? 3 : 0);
      SCOPED_TRACE(testing::Message() << name(dtype) << " m " << m << " stride " << stride
                                      << (options.batch_invariant ? " invariant" : ""));
      const auto seed = static_cast<unsigned>(random());
      const Array wide(dtype, {m, stride}, seed), bias(dtype, {n}, seed + 1), residual(dtype, {m, n}, seed + 2),
          y(dtype, {m, n});
      const auto x_on = [&](Device d) {
        TensorView x = wide.on(d);
        x.shape[1] = k;
        return x;
      };
      const Array workspace(DType::u8,
                            {static_cast<std::int64_t>(workspace_of(context(gpu), x_on(gpu), w.on(gpu), options))});
      for (const Device d : both) {
        if (m > 1) {
          options.bias = bias.on(d);
          options.residual = residual.on(d);
          options.activation = Activation::silu;
        }
        multiply(context(d, workspace), x_on(d), w.on(d), y.on(d), options);
      }
      y.expect_close(tolerance(dtype));
    }
  });
}

TEST_F(Gpu, AGateWithoutAnActivation) {
  Random random(6);
  const std::int64_t n = 256, k = 256;
  const Weight w(n, k, 4, 64, W4Zeros::symmetric, DType::f16, false, random);
  for (const std::int64_t m : {1, 40}) {
    const Array x(DType::f16, {m, k}, 1), bias(DType::f16, {n}, 2), y(DType::f16, {m, n / 2});
    const Array workspace(
        DType::u8, {static_cast<std::int64_t>(w4a16_workspace(context(gpu), x.on(gpu), w.on(gpu), {.gated = true}))});
    for (const Device d : both)
      w4a16_matmul(context(d, workspace), x.on(d), w.on(d), y.on(d), {.bias = bias.on(d), .gated = true});
    y.expect_close(tolerance(DType::f16));
  }
}

// More work tiles than CTAs: on Hopper stream-K, with fix-up sums.
TEST_F(Gpu, ProductsWithPackedWeightsByStreamK) {
  Random random(5);
  for (const W4Zeros zeros : {W4Zeros::symmetric, W4Zeros::minima}) {
    const std::int64_t m = 140, n = 40 * 256, k = 768;
    const DType dtype = zeros == W4Zeros::minima ? DType::bf16 : DType::f16;
    const Weight w(n, k, 4, 64, zeros, dtype, false, random);
    const Array x(dtype, {m, k}, 1), y(dtype, {m, n});
    const Array workspace(DType::u8, {static_cast<std::int64_t>(w4a16_workspace(context(gpu), x.on(gpu), w.on(gpu)))});
    for (const Device d : both) w4a16_matmul(context(d, workspace), x.on(d), w.on(d), y.on(d));
    y.expect_close(tolerance(dtype));
  }
}

TEST_F(Gpu, Products) {
  Random random(4);
  for (const auto& [n, k] :
       {std::pair<std::int64_t, std::int64_t>{147, 577}, {64, 16384}, {200, 328}})  // odd, in chunks, by tiles
    for (const std::int64_t m : {1, 9, 40, 70}) {
      const DType dtype = one_in(2, random) ? DType::f16 : DType::bf16;
      SCOPED_TRACE(testing::Message() << name(dtype) << " n " << n << " k " << k << " m " << m);
      const auto seed = static_cast<unsigned>(random());
      const Array x(dtype, {m, k}, seed), weight(dtype, {n, k}, seed + 1), bias(dtype, {n}, seed + 2),
          residual(dtype, {m, n}, seed + 3), y(dtype, {m, n});
      const Array workspace(DType::u8,
                            {static_cast<std::int64_t>(linear_workspace(context(gpu), x.on(gpu), weight.on(gpu)))});
      for (const Device d : both) {
        LinearOptions options;
        if (m > 1) options = {.bias = bias.on(d), .residual = residual.on(d), .activation = Activation::gelu_tanh};
        linear(context(d, workspace), x.on(d), weight.on(d), y.on(d), options);
      }
      y.expect_close(tolerance(dtype));
    }
}

TEST_F(Gpu, NormsActivationsAndSoftmax) {
  unsigned seed = 0;
  for (const DType dtype : {DType::f16, DType::bf16})
    for (const std::int64_t width : {8, 77, 1024, 20000}) {  // vectors, odd, and rows that registers do not hold
      SCOPED_TRACE(testing::Message() << name(dtype) << " width " << width);
      const std::int64_t rows = width > 1024 ? 2 : 5;
      const Array x(dtype, {rows, width}, ++seed), residual(dtype, {rows, width}, ++seed),
          wide(dtype, {rows, 2 * width}, ++seed);
      const Array weight(dtype, {width}, ++seed), bias(dtype, {width}, ++seed);
      std::vector<Array> y;
      for (int i = 0; i < 8; ++i) y.emplace_back(dtype, Shape{rows, width});
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
        const Array h(dtype, {rows, width});
        for (const Device d : both) gelu_mul(context(d), wide.on(d), form, h.on(d));
        h.expect_close(tolerance(dtype));
      }
    }
}

TEST_F(Gpu, HeadNormsAndEmbedding) {
  for (const DType dtype : {DType::f16, DType::bf16})
    for (const std::int64_t dim : {64, 70, 1024})
      for (const std::int64_t tokens : {7, 300}) {
        SCOPED_TRACE(testing::Message() << name(dtype) << " d " << dim << " tokens " << tokens);
        const Array q(dtype, {tokens, 4, dim}, 1), k(dtype, {tokens, 3, dim}, 2), weight(dtype, {dim}, 3);
        const Array q_out(dtype, {tokens, 4, dim}), k_out(dtype, {tokens, 3, dim});
        const Array table(dtype, {50, dim}, 4), rows(dtype, {7, dim}), scaled(dtype, {7, dim});
        const Array ids(std::vector<std::int32_t>{0, 49, 3, 3, 12, 1, 40});
        for (const Device d : both) {
          qk_rms_norm(context(d), q.on(d), k.on(d), weight.on(d), {}, 1e-5f, q_out.on(d), k_out.on(d));
          embedding(context(d), ids.on(d), table.on(d), 1, rows.on(d));
          embedding(context(d), ids.on(d), table.on(d), 0.3f, scaled.on(d));
        }
        q_out.expect_close(tolerance(dtype));
        k_out.expect_close(tolerance(dtype));
        rows.expect_close(0);
        scaled.expect_close(tolerance(dtype));
      }
}

TEST_F(Gpu, RopeAndMerge) {
  for (const DType dtype : {DType::f16, DType::bf16})
    for (const std::int64_t dim : {64, 70}) {
      SCOPED_TRACE(testing::Message() << name(dtype) << " d " << dim);
      const Array q(dtype, {7, 4, dim}, 1), k(dtype, {7, 2, dim}, 2), cos(dtype, {50, 32}, 3), sin(dtype, {50, 32}, 4);
      const Array positions(std::vector<std::int32_t>{0, 49, 3, 3, 12, 1, 40}), q_out(dtype, {7, 4, dim}),
          k_out(dtype, {7, 2, dim});
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
      lse.expect_close(1e-5, 1);
    }
}

// The token of the reference, for all settings: of one CTA a row, of a cluster, and of slices longer than a load.
TEST_F(Gpu, Sample) {
  const std::int64_t rows = 5;
  unsigned seed = 0;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16})
    for (const std::int64_t vocabulary : {77, 4096, 40000, 200003}) {
      if (vocabulary > 100000 && dtype != DType::f16) continue;  // the same code, and racecheck takes a minute for each
      const Array logits(dtype, {rows, vocabulary}, ++seed), seeds(DType::i64, {rows}), tokens(DType::i64, {rows});
      const Array positions(std::vector<std::int32_t>{0, 1, 5, 100, 2}), seen(DType::i32, {rows, 50});
      for (std::int64_t i = 0; i < rows; ++i) seeds.on({}).as<std::int64_t>()[i] = 1 + i * 0x123456789abcdef;
      for (std::int64_t i = 0; i < seen.on({}).numel(); ++i)
        seen.on({}).as<std::int32_t>()[i] = static_cast<std::int32_t>(i * 7919 % vocabulary) - 3;
      seeds.upload();
      seen.upload();
      for (const SampleSettings& settings :
           {SampleSettings{.temperature = 0, .repetition_penalty = 1.5}, SampleSettings{},
            SampleSettings{.temperature = 0.5, .top_k = 30}, SampleSettings{.top_p = 0.9, .repetition_penalty = 1.5},
            SampleSettings{.top_k = 100, .top_p = 0.7, .min_p = 0.05, .order = SampleOrder::vllm}}) {
        SCOPED_TRACE(testing::Message() << name(dtype) << " of " << vocabulary << " top_k " << settings.top_k);
        for (const Device d : both)
          sample(context(d), logits.on(d), seen.on(d), seeds.on(d), positions.on(d), settings, tokens.on(d));
        EXPECT_TRUE(tokens.same_bytes());
      }
    }
}

}  // namespace
}  // namespace rooftile
