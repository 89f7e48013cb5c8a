// SPDX-License-Identifier: Apache-2.0
// Every variant of decode, prefill and merge against the reference, on caches whose bytes are made up here.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "core/kv_layout.h"
#include "cpu/kernels.h"
#include "rooftile/attention.h"
#include "support/tensors.h"

namespace rooftile {
namespace {

constexpr KvFormat formats[] = {KvFormat::fp32,      KvFormat::fp16, KvFormat::bf16,
                                KvFormat::int8,      KvFormat::int4, KvFormat::int4_kivi_sym,
                                KvFormat::int4_kivi, KvFormat::fp8,  KvFormat::int8_kivi_sym};
constexpr const char* variants[] = {"portable", "avx2", "avx512", "avx512bf16"};

// Query heads, KV heads, head_dim, tokens.
constexpr std::array<int, 4> decode_shapes[] = {{9, 3, 64, 1}, {4, 2, 40, 5}, {5, 1, 111, 32}, {2, 2, 128, 17}};
constexpr std::array<int, 4> prefill_shapes[] = {{9, 3, 64, 70}, {4, 2, 40, 5}, {3, 1, 111, 33}};

bool runs(const char* variant) { return std::string(cpu::runnable_variants()).find(variant) != std::string::npos; }

// An array of any dtype with memory of its own.
struct Array {
  std::vector<std::byte> bytes;
  TensorView view;

  Array() = default;
  Array(DType dtype, const Shape& shape) : view(contiguous_view(nullptr, dtype, {}, shape)) {
    bytes.resize(bytes_of(view) + 1, std::byte{0xff});
    view.data = bytes.data();
  }
  std::int64_t size() const { return view.numel(); }
  void set(std::int64_t i, float x) { cpu::write(view, i, x); }
};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  float normal() { return std::normal_distribution<float>()(engine_); }
  int below(int n) { return static_cast<int>(engine_() % static_cast<unsigned>(n)); }
  Array array(DType dtype, const Shape& shape) {
    Array a(dtype, shape);
    for (std::int64_t i = 0; i < a.size(); ++i) a.set(i, normal());
    return a;
  }

 private:
  std::mt19937 engine_;
};

// A paged cache of random codes and plausible scales; pages in random order. Bytes past a row's length are 0xff, and so
// are, in formats that have no NaN among their codes, the codes that pad head_dim.
struct Cache {
  std::vector<std::byte> pool, ring_k, ring_v;
  std::vector<std::int32_t> table, lengths, raw_from;
  KvCacheView view;

  Cache(KvFormat format, DType dtype, int page_size, int kv_heads, int head_dim, std::vector<std::int32_t> row_lengths,
        unsigned seed)
      : lengths(std::move(row_lengths)) {
    Random random(seed);
    const int rows = static_cast<int>(lengths.size()), max_pages = (520 + page_size - 1) / page_size;
    const KvBlock block = kv_block(format, page_size, head_dim);
    view.format = format;
    view.dtype = dtype;
    view.pages = rows * max_pages;
    view.page_size = page_size;
    view.kv_heads = kv_heads;
    view.head_dim = head_dim;
    view.max_rows = rows;
    view.max_pages = max_pages;
    pool.assign(static_cast<std::size_t>(view.pages * kv_heads * block.bytes), std::byte{0xff});
    std::byte* base = pool.data();
    for (KvCacheView::Plane* p : {&view.k, &view.v}) {
      const bool is_k = p == &view.k;
      p->codes = base + (is_k ? 0 : block.v_codes);
      p->head_stride = block.bytes;
      p->page_stride = block.bytes * kv_heads;
      p->token_stride = head_dim * static_cast<int>(size_of(dtype));
      if (is_element_format(format)) continue;
      p->scale = base + (is_k ? block.k_scale : block.v_scale);
      if (has_min(format)) p->min = base + (is_k ? block.k_min : block.v_min);
    }
    // rows' pages dealt from the back of the pool, unused table entries out of range
    table.assign(static_cast<std::size_t>(rows * max_pages), 1 << 30);
    std::int32_t next = view.pages;
    for (int i = 0; i < max_pages; ++i)
      for (int r = 0; r < rows; ++r)
        if (i * page_size < lengths[static_cast<std::size_t>(r)])
          table[static_cast<std::size_t>(r * max_pages + i)] = --next;
    view.block_table = table.data();
    view.table_stride = max_pages;
    view.lengths = lengths.data();
    if (is_kivi(format)) {
      const std::size_t ring = static_cast<std::size_t>(rows * kv_heads * kv_ring * head_dim) * size_of(dtype);
      ring_k.assign(ring, std::byte{0xff});
      ring_v.assign(ring, std::byte{0xff});
      raw_from.assign(static_cast<std::size_t>(rows), 0);
      view.ring_k = ring_k.data();
      view.ring_v = ring_v.data();
      view.ring_size = kv_ring;
      view.raw_from = raw_from.data();
    }
    for (int r = 0; r < rows; ++r)
      for (int h = 0; h < kv_heads; ++h)
        for (int t = 0; t < lengths[static_cast<std::size_t>(r)]; ++t) store(random, r, h, t);
  }

 private:
  void put(std::byte* p, DType t, std::int64_t i, float x) {
    TensorView at;
    at.data = p;
    at.dtype = t;
    cpu::write(at, i, x);
  }
  void store(Random& random, int r, int h, int t) {
    const int dim = view.head_dim, length = lengths[static_cast<std::size_t>(r)];
    for (const KvCacheView::Plane* p : {&view.k, &view.v}) {
      const bool is_k = p == &view.k;
      const std::int64_t at = kv_page(view, r, t) * p->page_stride + h * p->head_stride;
      const int slot = t % view.page_size;
      if (is_kivi(view.format) && t >= length - kv_ring)
        for (int d = 0; d < dim; ++d)
          put(is_k ? view.ring_k : view.ring_v, view.dtype, ((r * view.kv_heads + h) * kv_ring + t % kv_ring) * dim + d,
              random.normal());
      if (is_kivi(view.format) && t >= length / kv_group * kv_group) continue;
      if (is_element_format(view.format)) {
        for (int d = 0; d < dim; ++d) put(p->codes + at + slot * p->token_stride, view.dtype, d, random.normal());
        continue;
      }
      for (int d = 0; d < (view.format == KvFormat::fp8 ? padded_head_dim(dim) : dim); ++d) {
        const std::int64_t i =
            is_k ? k_code_index(dim, slot, d) : v_code_index(view.format, view.page_size, dim, slot, d);
        std::byte* codes = p->codes + at;
        if (view.format == KvFormat::int8) {
          codes[i] = static_cast<std::byte>(random.below(255) - 127);
        } else if (view.format == KvFormat::fp8) {
          codes[i] = static_cast<std::byte>(d < dim ? random.below(127) | random.below(2) << 7 : 0);
        } else {
          const int nibble = has_min(view.format) ? random.below(16) : (random.below(15) - 7) & 15;
          const int keep = i % 2 ? 0x0f : 0xf0;
          codes[i / 2] = static_cast<std::byte>((static_cast<int>(codes[i / 2]) & keep) | nibble << (i % 2 * 4));
        }
      }
      const DType scale_type = kv_scale_dtype(view.dtype);
      const float step = is_e4m3(view.format) ? 0.005f : code_bits(view.format) == 8 ? 0.02f : 0.25f;
      const bool per_channel = is_k && is_kivi(view.format);
      if (per_channel && t % kv_group) continue;
      for (int d = 0; d < (per_channel ? dim : 1); ++d) {
        const int i = per_channel ? slot / kv_group * padded_head_dim(dim) + d : slot;
        put(p->scale + at, scale_type, i, step * (0.5f + static_cast<float>(random.below(100)) / 100));
        if (p->min) put(p->min + at, scale_type, i, -2 + random.normal());
      }
    }
  }
};

double tolerance(DType t) { return t == DType::f32 ? 4e-6 : t == DType::f16 ? 1e-3 : 8e-3; }

DType input_type(KvFormat f, int page_size) {
  switch (f) {
    case KvFormat::fp32:
      return DType::f32;
    case KvFormat::fp16:
      return DType::f16;
    case KvFormat::bf16:
      return DType::bf16;
    default:
      return page_size % 64 ? DType::bf16 : DType::f32;
  }
}

TEST(Attention, DecodeVariantsAgreeWithTheReference) {
  const std::vector<std::int32_t> lengths{0, 1, 31, 33, 64, 130, 257, 519};
  unsigned seed = 1;
  for (KvFormat f : formats)
    for (int page_size : {16, 32, 64, 128}) {
      if (is_kivi(f) && page_size % kv_group) continue;
      for (const auto [heads, kv_heads, dim, tokens] : decode_shapes) {
        const DType dtype = input_type(f, page_size);
        const Cache cache(f, dtype, page_size, kv_heads, dim, lengths, ++seed);
        Random random(seed);
        const std::int64_t batch = static_cast<std::int64_t>(lengths.size());
        const Array q = random.array(dtype, {batch, tokens, heads, dim});
        LogitOptions options;
        if (seed % 2) options.window = 70;
        if (seed % 3 == 0) options.softcap = 3.0f;
        const auto run = [&](const char* variant) {
          std::pair<Array, Array> result{Array(dtype, {batch, tokens, heads, dim}),
                                         Array(DType::f32, {batch, tokens, heads})};
          Context ctx;
          ctx.variant = variant;
          decode_attention(ctx, q.view, cache.view, result.first.view, result.second.view, {}, {}, options);
          return result;
        };
        const auto expected = run("reference");
        for (const char* variant : variants) {
          if (!runs(variant)) continue;
          const auto got = run(variant);
          EXPECT_LE(worst_row(got.first.view, expected.first.view), tolerance(dtype))
              << variant << " " << name(f) << " page " << page_size << " d " << dim << " T " << tokens;
          EXPECT_LE(worst_row(got.second.view, expected.second.view, 1), 4e-6) << variant << " " << name(f) << " lse";
        }
      }
    }
}

TEST(Attention, PrefillVariantsAgreeWithTheReference) {
  const std::vector<std::int32_t> lengths{0, 33, 64, 100};
  unsigned seed = 100;
  for (KvFormat f : formats)
    for (int page_size : {16, 64}) {
      if (is_kivi(f) && page_size % kv_group) continue;
      for (const auto [heads, kv_heads, dim, tokens] : prefill_shapes) {
        const DType dtype = input_type(f, page_size);
        const Cache cache(f, dtype, page_size, kv_heads, dim, lengths, ++seed);
        Random random(seed);
        const std::int64_t batch = static_cast<std::int64_t>(lengths.size());
        const Array q = random.array(dtype, {batch, tokens, heads, dim});
        const Array k = random.array(dtype, {batch, tokens, kv_heads, dim}),
                    v = random.array(dtype, {batch, tokens, kv_heads, dim});
        PrefillOptions options;
        options.cache = &cache.view;
        options.causal = seed % 4 != 0;
        if (seed % 2) options.window = 50;
        if (seed % 3 == 0) options.softcap = 3.0f;
        const auto run = [&](const char* variant) {
          std::pair<Array, Array> result{Array(dtype, {batch, tokens, heads, dim}),
                                         Array(DType::f32, {batch, tokens, heads})};
          Context ctx;
          ctx.variant = variant;
          prefill_attention(ctx, q.view, k.view, v.view, result.first.view, result.second.view, options);
          return result;
        };
        const auto expected = run("reference");
        for (const char* variant : variants) {
          if (!runs(variant)) continue;
          const auto got = run(variant);
          EXPECT_LE(worst_row(got.first.view, expected.first.view), tolerance(dtype))
              << variant << " " << name(f) << " d " << dim;
          EXPECT_LE(worst_row(got.second.view, expected.second.view, 1), 4e-6) << variant << " " << name(f) << " lse";
        }
      }
    }
}

TEST(Attention, NoNumberOfThreadsChangesABit) {
  for (KvFormat f : formats) {
    const Cache cache(f, input_type(f, 64), 64, 3, 64, {519}, 7);
    Random random(8);
    const Array q = random.array(cache.view.dtype, {1, 3, 9, 64});
    Array first;
    for (int threads : {1, 2, 3, 8}) {
      Array out(cache.view.dtype, {1, 3, 9, 64});
      Context ctx;
      ctx.threads = threads;
      decode_attention(ctx, q.view, cache.view, out.view, {}, {}, {}, {});
      if (threads == 1) first = out;
      EXPECT_EQ(out.bytes, first.bytes) << name(f) << ", " << threads << " threads";
    }
  }
}

TEST(Attention, MergeVariantsAgreeWithTheReference) {
  for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    Random random(3);
    const Array a = random.array(dtype, {5, 9, 70}), b = random.array(dtype, {5, 9, 70});
    Array lse_a = random.array(DType::f32, {5, 9}), lse_b = random.array(DType::f32, {5, 9});
    for (std::int64_t i = 0; i < lse_a.size(); ++i) {
      if (i % 3 == 0) lse_a.set(i, -INFINITY);
      if (i % 4 == 0) lse_b.set(i, -INFINITY);
    }
    const auto run = [&](const char* variant) {
      std::pair<Array, Array> result{Array(dtype, {5, 9, 70}), Array(DType::f32, {5, 9})};
      Context ctx;
      ctx.variant = variant;
      merge_attention(ctx, a.view, lse_a.view, b.view, lse_b.view, result.first.view, result.second.view);
      return result;
    };
    const auto expected = run("reference");
    for (const char* variant : variants) {
      if (!runs(variant)) continue;
      const auto got = run(variant);
      EXPECT_LE(worst_row(got.first.view, expected.first.view), tolerance(dtype)) << variant;
      EXPECT_LE(worst_row(got.second.view, expected.second.view, 1), 1e-6) << variant;
      Array alone(dtype, {5, 9, 70});  // without lse
      Context ctx;
      ctx.variant = variant;
      merge_attention(ctx, a.view, lse_a.view, b.view, lse_b.view, alone.view, {});
      EXPECT_EQ(alone.bytes, got.first.bytes) << variant;
    }
  }
}

}  // namespace
}  // namespace rooftile
