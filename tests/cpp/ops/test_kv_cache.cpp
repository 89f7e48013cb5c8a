// SPDX-License-Identifier: Apache-2.0
// Every variant stores the bytes of the reference, however the tokens are split; what is refused changes nothing.
#include <gtest/gtest.h>

#include <random>
#include <sstream>
#include <vector>

#include "cpu/kernels.h"
#include "rooftile/error.h"
#include "rooftile/kv_cache.h"
#include "support/kv_arrays.h"

namespace rooftile {
namespace {

TensorView tensor(void* data, DType dtype, const Shape& shape) { return contiguous_view(data, dtype, {}, shape); }

// A contiguous cache and the memory behind it. What nothing was stored in is 0xff.
struct Cache {
  Cache(KvFormat f, DType dtype, int rows, int pages, int page_size, int heads, int dim) {
    const KvCacheShape shape{f, dtype, page_size, heads, dim, rows, pages};
    const auto allocate = [&](DType t, const Shape& s) {
      TensorView array = tensor(nullptr, t, s);
      memory.emplace_back(bytes_of(array), t == DType::i32 ? std::byte{0} : std::byte{0xff});
      array.data = memory.back().data();
      return array;
    };
    view = kv_cache_view(shape, kv_arrays(shape, {.row = pages, .all = rows * pages}, allocate));
  }
  bool same_bytes(const Cache& o) const { return memory == o.memory; }
  std::vector<std::vector<std::byte>> memory;
  KvCacheView view;
};

std::vector<std::byte> normal(DType dtype, std::size_t n, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> values;
  std::vector<std::byte> bytes(n * size_of(dtype));
  const TensorView t = tensor(bytes.data(), dtype, {static_cast<std::int64_t>(n)});
  for (std::int64_t i = 0; i < t.numel(); ++i) cpu::write(t, i, values(random));
  return bytes;
}

constexpr KvFormat formats[] = {KvFormat::fp32,      KvFormat::fp16, KvFormat::bf16,
                                KvFormat::int8,      KvFormat::int4, KvFormat::int4_kivi_sym,
                                KvFormat::int4_kivi, KvFormat::fp8,  KvFormat::int8_kivi_sym};
constexpr int heads = 2, tokens = 75;

std::vector<std::string> variants() {
  std::vector<std::string> names;
  std::istringstream list(cpu::runnable_variants());
  for (std::string name; std::getline(list >> std::ws, name, ',');) names.push_back(name);
  return names;
}

TEST(KvCache, ItsActivationsAreOfAFloatingPointType) {
  for (DType dtype : {DType::i8, DType::i32, DType::u8})
    EXPECT_THROW(Cache(KvFormat::int8, dtype, 1, 1, 32, 1, 64), Error);
}

TEST(KvAppend, EveryVariantAndSplitStoresTheSameBytes) {
  for (KvFormat f : formats)
    for (DType dtype : {DType::f32, DType::f16, DType::bf16}) {
      if (is_element_format(f) && code_bits(f) != 8 * static_cast<int>(size_of(dtype))) continue;
      if (is_element_format(f) && (f == KvFormat::bf16) != (dtype == DType::bf16)) continue;
      for (int dim : {1, 40, 80, 111, 128}) {
        auto k = normal(dtype, static_cast<std::size_t>(2 * tokens * heads * dim), 1),
             v = normal(dtype, k.size() / size_of(dtype), 2);
        const TensorView tk = tensor(k.data(), dtype, {2, tokens, heads, dim}),
                         tv = tensor(v.data(), dtype, {2, tokens, heads, dim});
        Cache whole(f, dtype, 2, 4, 32, heads, dim);
        Context ctx;
        ctx.variant = "reference";
        kv_append(ctx, whole.view, tk, tv, {}, {});
        for (const std::string& variant : variants()) {
          ctx.variant = variant.c_str();
          Cache split(f, dtype, 2, 4, 32, heads, dim);
          for (int at = 0, step = 1; at < tokens; at += step, step = step * 2 + 1) {
            TensorView pk = tk, pv = tv;
            for (TensorView* t : {&pk, &pv}) {
              t->data =
                  static_cast<std::byte*>(t->data) + at * t->stride[1] * static_cast<std::int64_t>(size_of(dtype));
              t->shape[1] = std::min(step, tokens - at);
            }
            kv_append(ctx, split.view, pk, pv, {}, {});
          }
          EXPECT_TRUE(split.same_bytes(whole)) << variant << ' ' << name(f) << ' ' << name(dtype) << " d " << dim;
        }
      }
    }
}

TEST(KvReorder, MapsOfFourRows) {
  const int dim = 40;
  for (KvFormat f : formats) {
    const DType dtype = f == KvFormat::fp32 ? DType::f32 : f == KvFormat::bf16 ? DType::bf16 : DType::f16;
    auto k = normal(dtype, static_cast<std::size_t>(4 * tokens * heads * dim), 3);
    const TensorView t = tensor(k.data(), dtype, {4, tokens, heads, dim});
    std::int32_t counts[] = {75, 64, 0, 31};
    const TensorView tc = tensor(counts, DType::i32, {4});
    Cache source(f, dtype, 4, 3, 32, heads, dim);
    kv_append({}, source.view, t, t, {}, tc);
    for (int code = 0; code < 256; code += f == KvFormat::int4_kivi ? 5 : 23) {
      std::int32_t index[] = {code & 3, code >> 2 & 3, code >> 4 & 3, code >> 6};
      Cache moved(f, dtype, 4, 3, 32, heads, dim);
      kv_append({}, moved.view, t, t, {}, tc);
      kv_reorder({}, moved.view, tensor(index, DType::i32, {4}), true);
      for (int row = 0; row < 4; ++row) {
        const std::int32_t length = counts[index[row]];
        ASSERT_EQ(moved.view.lengths[row], length);
        std::vector<float> a(static_cast<std::size_t>(length * heads * dim)), b = a, c = a, d = a;
        const auto out = [&](std::vector<float>& x) { return tensor(x.data(), DType::f32, {length, heads, dim}); };
        kv_dequantize({}, moved.view, row, length, out(a), out(b));
        kv_dequantize({}, source.view, index[row], length, out(c), out(d));
        ASSERT_TRUE(a == c && b == d) << name(f) << " map " << code << " row " << row;
      }
    }
  }
}

TEST(KvAppend, WhatIsRefusedChangesNothing) {
  Cache cache(KvFormat::int4_kivi, DType::f32, 2, 1, 32, heads, 40),
      before(KvFormat::int4_kivi, DType::f32, 2, 1, 32, heads, 40);
  auto k = normal(DType::f32, 2 * 33 * heads * 40, 4);
  const TensorView t = tensor(k.data(), DType::f32, {2, 33, heads, 40});
  std::int32_t counts[] = {32, 33}, rows[] = {1, 1}, few[] = {1, 1};
  EXPECT_THROW(kv_append({}, cache.view, t, t, {}, {}), Error);
  EXPECT_THROW(kv_append({}, cache.view, t, t, {}, tensor(counts, DType::i32, {2})), Error);
  EXPECT_THROW(kv_append({}, cache.view, t, t, tensor(rows, DType::i32, {2}), tensor(few, DType::i32, {2})), Error);
  EXPECT_THROW(kv_append({}, cache.view, {}, t, {}, {}), Error);
  EXPECT_TRUE(cache.same_bytes(before));
}

}  // namespace
}  // namespace rooftile
