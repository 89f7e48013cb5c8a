// SPDX-License-Identifier: Apache-2.0
// What the small ops and the weights are made of: element types, rows of strided tensors, and the A operand of
// packed weights. Values are chosen so that every result is exact, or compared with core's own rounding.
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <random>
#include <set>
#include <type_traits>
#include <vector>

#include "core/half.h"
#include "core/w4_layout.h"
#include "support/device.cuh"
#include "tile/element.cuh"
#include "tile/strided_rows.cuh"
#include "tile/dequant_weight.cuh"

namespace rooftile::tile {
namespace {

// ---- element.cuh ----

static_assert(sizeof(half) == 2 && sizeof(bf16) == 2);

template <class T>
__global__ void unpack_all(float* to) {  // of every pair (i, ~i)
  const std::uint32_t i = thread_index();
  const float2 pair = unpack<T>(i | (~i & 0xffff) << 16);
  to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
}
template <class T>
__global__ void pack_all(const float* from, std::uint32_t* to) {
  const int i = thread_index();
  const T low = from_float<T>(from[2 * i]), high = from_float<T>(from[2 * i + 1]);
  to[2 * i] = pack<T>(from[2 * i], from[2 * i + 1]);
  to[2 * i + 1] = reinterpret_cast<const std::uint16_t&>(low) | reinterpret_cast<const std::uint16_t&>(high) << 16;
}

template <class T>
void check_elements() {
  constexpr std::uint32_t codes = 1 << 16;
  const Shared<float> unpacked(2 * codes);
  launch(unpack_all<T>, codes, unpacked.data);
  for (std::uint32_t i = 0; i < codes; ++i)
    for (int side = 0; side < 2; ++side) {
      const float expected = to_float(Stored<T>{static_cast<std::uint16_t>(side ? ~i : i)}),
                  found = unpacked[2 * i + side];
      if (std::isnan(expected)) {
        ASSERT_TRUE(std::isnan(found)) << i;
      } else {
        ASSERT_EQ(std::bit_cast<std::uint32_t>(found), std::bit_cast<std::uint32_t>(expected)) << i;
      }
    }
  constexpr std::size_t count = 1 << 14;  // random bits, and halfway cases between neighbours
  const Shared<float> values(2 * count);
  const Shared<std::uint32_t> packed(2 * count);
  std::mt19937 random(1);
  for (std::size_t i = 0; i < values.n; ++i) {
    std::uint32_t bits = static_cast<std::uint32_t>(random());
    if (i % 4 == 0) bits &= std::is_same_v<T, half> ? 0xfffff000 : 0xffff8000;
    if (i % 4 == 1) bits = (bits & 0x807fffff) | (100 + i / 4 % 16) << 23;  // around fp16's subnormals
    const float x = std::bit_cast<float>(bits);
    values[i] = std::isnan(x) ? 0.0f : x;
  }
  launch(pack_all<T>, static_cast<int>(count), values.data, packed.data);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint32_t low = rooftile::from_float<Stored<T>>(values[2 * i]).bits,
                        high = rooftile::from_float<Stored<T>>(values[2 * i + 1]).bits;
    ASSERT_EQ(packed[2 * i], low | high << 16) << values[2 * i] << ", " << values[2 * i + 1];
    ASSERT_EQ(packed[2 * i + 1], low | high << 16) << values[2 * i] << ", " << values[2 * i + 1];
  }
}
TEST_F(Tile, EveryHalfAndItsRounding) { check_elements<half>(); }
TEST_F(Tile, EveryBf16AndItsRounding) { check_elements<bf16>(); }

// ---- strided_rows.cuh; the parts on the host need no GPU ----

TensorView view(void* data, std::initializer_list<std::int64_t> shape, std::initializer_list<std::int64_t> stride) {
  TensorView t;
  t.data = data;
  t.dtype = DType::f16;
  t.ndim = 0;
  for (std::int64_t n : shape) t.shape[t.ndim++] = n;
  std::copy(stride.begin(), stride.end(), t.stride);
  return t;
}
alignas(16) std::uint16_t elements[8];

TEST(Rows, DimensionsThatNestAreOne) {
  EXPECT_EQ(rows_of(view(elements, {2, 3, 4, 64}, {768, 256, 64, 1})).dims, 1);
  EXPECT_EQ(rows_of(view(elements, {2, 3, 4, 64}, {1024, 256, 64, 1})).dims, 2);  // a gap behind every 3
  EXPECT_EQ(rows_of(view(elements, {2, 3, 4, 64}, {768, 64, 192, 1})).dims, 3);   // transposed
  EXPECT_EQ(rows_of(view(elements, {2, 1, 4, 64}, {256, 7, 64, 1})).dims, 1);     // the stride of a single one is idle
  EXPECT_EQ(rows_of(view(elements, {64}, {1})).dims, 0);
  EXPECT_EQ(rows_of(TensorView{}).data, nullptr);
}

TEST(Rows, VectorsNeedNeighboursAndAlignment) {
  EXPECT_TRUE(rows_of(view(elements, {4, 64}, {64, 1})).vector);
  EXPECT_TRUE(rows_of(view(elements, {4, 60}, {64, 1})).vector);  // its length is with_vector's to check
  EXPECT_FALSE(rows_of(view(elements, {4, 64}, {68, 1})).vector);
  EXPECT_FALSE(rows_of(view(elements, {4, 64}, {128, 2})).vector);
  EXPECT_FALSE(rows_of(view(elements + 1, {4, 64}, {64, 1})).vector);
  EXPECT_TRUE(table_of(view(elements, {64}, {1})).vector);
  EXPECT_FALSE(table_of(view(elements + 1, {64}, {1})).vector);
  TensorView wide = view(elements, {4, 64}, {68, 1});
  EXPECT_FALSE(table_of(wide).vector);
  wide.dtype = DType::f32;  // 16 bytes are four elements
  EXPECT_TRUE(table_of(wide).vector);
}

TEST(Rows, APlanHoldsTheRow) {
  for (std::int64_t n = 1; n < 40000; n += n < 1100 ? 1 : 97) {
    const RowPlan plan = plan_row(n);
    SCOPED_TRACE(n);
    ASSERT_TRUE(plan.threads % 32 == 0 && plan.threads <= 1024);
    ASSERT_TRUE(plan.lanes == plan.threads || (plan.lanes <= 32 && std::has_single_bit(unsigned(plan.lanes))));
    ASSERT_EQ(plan.rows() * (plan.lanes <= 32 ? plan.lanes : plan.threads), plan.threads);
    ASSERT_EQ(plan.vecs == 0, n > 16384);
    if (plan.vecs) { ASSERT_GE(std::int64_t{plan.vecs} * vec_size * plan.lanes, n); }
  }
}

// The vectors of threads t and t + lanes of the plan are those of thread t once it is coarsened, in their order.
TEST(Rows, ACoarsenedThreadHoldsTheVectorsOfTwo) {
  for (std::int64_t n = 1025; n <= 8192; n += 61) {
    const RowPlan plan = plan_row(n), half = coarsened(plan);
    SCOPED_TRACE(n);
    ASSERT_EQ(half.coarsening(), 2);
    ASSERT_EQ(plan.coarsening(), 1);
    std::vector<int> seen;
    for (int thread = 0; thread < half.lanes; ++thread)
      for (int c = 0; c < 2; ++c) {
        const int of = thread + c * half.lanes;
        for (int k = 0; k < plan.vecs; ++k) {
          const int first = first_element<2>({0, thread}, half.lanes, half.stride, 2 * k + c);
          if (of < plan.lanes) {
            ASSERT_EQ(first, first_element<1>({0, of}, plan.lanes, plan.stride, k));
            seen.push_back(first);
          } else {
            ASSERT_GE(first, n);
          }
        }
      }
    ASSERT_EQ(std::set<int>(seen.begin(), seen.end()).size(), static_cast<std::size_t>(plan.vecs * plan.lanes));
  }
  for (std::int64_t n : {1, 512, 1024, 8193, 16384, 16385}) ASSERT_EQ(coarsened(plan_row(n)).coarsening(), 1);
}

struct Quotient {
  std::int64_t a, b;
  Divisor64 by;
  Division64 found;
};
__global__ void divide_all(Quotient* q) {
  Quotient& of = q[thread_index()];
  of.found = divide(of.a, of.by);
}

TEST_F(Tile, DivisionUpTo53Bits) {
  constexpr std::int64_t most = (std::int64_t{1} << 53) - 1;
  std::mt19937_64 random(2);
  const Shared<Quotient> q(1 << 14);
  for (std::size_t i = 0; i < q.n; ++i) {
    const std::int64_t b = 1 + static_cast<std::int64_t>(random() >> (11 + random() % 52)),
                       multiple = b * static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(most / b + 1));
    // at, just below and just above a multiple, and anywhere
    const std::int64_t a[] = {multiple, multiple - 1, multiple + 1, static_cast<std::int64_t>(random() >> 11)};
    q[i] = {std::clamp<std::int64_t>(a[i % 4], 0, most), b, Divisor64(b), {}};
  }
  launch(divide_all, static_cast<int>(q.n), q.data);
  for (std::size_t i = 0; i < q.n; ++i) {
    ASSERT_EQ(q[i].found.quotient, q[i].a / q[i].b) << q[i].a << " / " << q[i].b;
    ASSERT_EQ(q[i].found.remainder, q[i].a % q[i].b) << q[i].a << " / " << q[i].b;
  }
}

// Thread i: vector i % vecs of row i / vecs.
template <bool vector>
__global__ void copy_rows(const __grid_constant__ Rows from, const __grid_constant__ Rows to, int rows, int n) {
  const int vecs = (n + vec_size - 1) / vec_size, row = thread_index() / vecs, vec = thread_index() % vecs;
  if (row < rows)
    store_vec<vector>(row_at(to, row), vec * vec_size, n,
                      row % 2 == 0 ? load_vec<vector>(row_at(from, row), vec * vec_size, n)
                                   : load_vec<vector, true>(row_at(from, row), vec * vec_size, n));
}

TEST_F(Tile, RowsOfAnyStridesAreCopiedWholeAndAlone) {
  constexpr int a = 3, b = 5;
  for (int n : {1, 7, 8, 13, 64}) {
    // [a, b, n] with gaps, and with a and b swapped
    const std::int64_t pitch = (n + 7) / 8 * 8 + 8;
    const Shared<std::uint16_t> from(static_cast<std::size_t>(a * b * pitch)), to(from.n);
    for (std::size_t i = 0; i < from.n; ++i) from[i] = static_cast<std::uint16_t>(i + 1);
    const TensorView x = view(from.data, {a, b, n}, {pitch, a * pitch, 1}),
                     y = view(to.data, {a, b, n}, {b * pitch, pitch, 1});
    const Rows rows_x = rows_of(x), rows_y = rows_of(y);
    ASSERT_TRUE(rows_x.vector && rows_y.vector);
    for (bool vector : {true, false}) {
      if (vector && n % vec_size) continue;
      std::fill_n(to.data, to.n, std::uint16_t{0});
      launch({.ctas = 4, .threads = 128}, vector ? copy_rows<true> : copy_rows<false>, rows_x, rows_y, a * b, n);
      for (std::int64_t i = 0; i < a; ++i)
        for (std::int64_t j = 0; j < b; ++j)
          for (std::int64_t k = 0; k < pitch; ++k) {
            const std::size_t at = static_cast<std::size_t>((i * b + j) * pitch + k);
            ASSERT_EQ(to[at], k < n ? from[static_cast<std::size_t>((j * a + i) * pitch + k)] : 0) << n << ": " << at;
          }
    }
  }
}

template <class T, bool vector>
__global__ void read_table(const __grid_constant__ Table t, int row, int n, float* to) {
  const Floats x = load_table<T, vector>(t, row, thread_index() * vec_size, n);
  for (int i = 0; i < vec_size; ++i) to[thread_index() * vec_size + i] = x.at[i];
}

TEST_F(Tile, TablesOfBothWidths) {
  constexpr int rows = 3, n = 24;  // of 256 elements that the threads ask for
  const Shared<float> wide(rows * n), found(256);
  const Shared<std::uint16_t> narrow(wide.n);
  for (std::size_t i = 0; i < wide.n; ++i) {
    wide[i] = static_cast<float>(i) - 20.0f;  // exact in both types
    narrow[i] = rooftile::from_float<BFloat16>(wide[i]).bits;
  }
  for (bool fp32 : {false, true})
    for (bool vector : {false, true}) {
      TensorView t = view(fp32 ? static_cast<void*>(wide.data) : narrow.data, {rows, n}, {n, 1});
      t.dtype = fp32 ? DType::f32 : DType::bf16;
      const Table table = table_of(t);
      ASSERT_TRUE(table.vector);
      launch({}, vector ? read_table<bf16, true> : read_table<bf16, false>, table, 1, n, found.data);
      for (std::size_t i = 0; i < found.n; ++i) ASSERT_EQ(found[i], i < n ? wide[n + i] : 0.0f) << i;
    }
}

// Rows of every width of load, past their ends too.
template <bool vector>
__global__ void load_filled(const __grid_constant__ Rows from, int n, std::uint16_t fill, uint4* to) {
  to[thread_index()] = load_vec<vector>(row_at(from, 1), thread_index() * vec_size, n, fill);
}

TEST_F(Tile, ElementsPastARowsEndAreFilled) {
  constexpr std::uint16_t fill = 0xfc01;
  const Shared<std::uint16_t> from(2 * 64);
  const Shared<uint4> to(32);
  for (std::size_t i = 0; i < from.n; ++i) from[i] = static_cast<std::uint16_t>(i + 1);
  for (int n : {1, 7, 8, 13, 64})
    for (bool vector : {true, false}) {
      if (vector && n % vec_size) continue;
      const Rows rows = rows_of(view(from.data, {2, n}, {64, 1}));
      launch({}, vector ? load_filled<true> : load_filled<false>, rows, n, fill, to.data);
      const auto* found = reinterpret_cast<const std::uint16_t*>(to.data);
      for (int i = 0; i < 32 * vec_size; ++i)
        ASSERT_EQ(found[i], i < n ? from[static_cast<std::size_t>(64 + i)] : fill) << n << ": " << i;
    }
}

template <class T, bool vector>
__global__ void read_table_early(const __grid_constant__ Table t, int n, float* to, uint4* kept) {
  const int first = thread_index() * vec_size;
  prefetch_table(t, first, n);
  uint4 early = load_early<vector>(t, first, n);
  keep_packed(early);
  kept[thread_index()] = early;
  const Floats x = table_vec<T, vector>(t, early, first, n);
  for (int i = 0; i < vec_size; ++i) to[first + i] = x.at[i];
}

TEST_F(Tile, TablesReadInTwoSteps) {
  constexpr int n = 24;  // of 256 elements that the threads ask for
  const Shared<float> wide(2 * n), found(256);
  const Shared<std::uint16_t> narrow(2 * n);
  const Shared<uint4> kept(32);
  for (std::size_t i = 0; i < wide.n; ++i) {
    wide[i] = static_cast<float>(i) - 20.0f;  // exact in both types
    narrow[i] = rooftile::from_float<BFloat16>(wide[i]).bits;
  }
  for (bool fp32 : {false, true})
    for (int step : {1, 2}) {
      TensorView t = view(fp32 ? static_cast<void*>(wide.data) : narrow.data, {n}, {step});
      t.dtype = fp32 ? DType::f32 : DType::bf16;
      const Table table = table_of(t);
      ASSERT_EQ(table.vector, step == 1);
      ASSERT_EQ(table.early, step == 1 && !fp32);
      for (bool vector : {false, true}) {
        if (vector && !table.vector) continue;
        launch({}, vector ? read_table_early<bf16, true> : read_table_early<bf16, false>, table, n, found.data,
               kept.data);
        for (int i = 0; i < 256; ++i)
          ASSERT_EQ(found[static_cast<std::size_t>(i)], i < n ? wide[static_cast<std::size_t>(i * step)] : 0.0f) << i;
        const auto* early = reinterpret_cast<const std::uint16_t*>(kept.data);
        for (int i = 0; i < 256; ++i)
          ASSERT_EQ(early[i], vector && table.early && i < n ? narrow[static_cast<std::size_t>(i)] : 0) << i;
      }
    }
}

__global__ void count_row_threads(int lanes, int threads_of_row, int* counts) {  // counts (rows, threads of a row)
  const RowThread at = row_thread(lanes, blockIdx.x);
  atomicAdd(counts + at.row * threads_of_row + at.thread, 1);
}

TEST_F(Tile, EveryThreadHasAPlaceInARow) {
  constexpr int threads = 128, ctas = 3;
  for (int lanes : {1, 2, 8, 32, threads}) {
    const Shared<int> counts(ctas * threads);
    std::fill_n(counts.data, counts.n, 0);
    launch({.ctas = ctas, .threads = threads}, count_row_threads, lanes, lanes, counts.data);
    for (std::size_t i = 0; i < counts.n; ++i) ASSERT_EQ(counts[i], 1) << lanes << " lanes: " << i;
  }
}

TEST(Rows, AVectorNeedsAllTensorsAndWholeVectors) {
  const Rows aligned = rows_of(view(elements, {4, 64}, {64, 1})), other = rows_of(view(elements, {4, 64}, {68, 1}));
  const auto chosen = [](std::int64_t n, const auto&... tensors) {
    bool found = false;
    with_vector(n, [&](auto vector) { found = vector; }, tensors...);
    return found;
  };
  EXPECT_TRUE(chosen(64, aligned, aligned));
  EXPECT_FALSE(chosen(60, aligned, aligned));
  EXPECT_FALSE(chosen(64, aligned, other));
  EXPECT_FALSE(chosen(64, other, aligned));
  EXPECT_TRUE(chosen(64, aligned, rows_of(TensorView{}), table_of(TensorView{})));  // absent ones allow all
}

// ---- dequant_weight.cuh ----

constexpr int rows_w = w4_tile_n, step_k = 128;  // one step: 16 rows of 128 k

// A lane's words of a step, (WORD, (k-step, k-block)); blocks (fragment blocks, 32 lanes).
template <int bits>
__device__ auto words_of_lane(const uint4* blocks) {
  using namespace cute;
  Tensor rCodes = make_tensor<std::uint32_t>(Shape<Int<bits / 4>, Shape<_2, _4>>{});
  Tensor rVecs = recast<uint4>(make_tensor(rCodes.data(), Shape<_4, Int<bits / 2>>{}));  // (1, fragment blocks)
  for (int i = 0; i < size(rVecs); ++i) rVecs(i) = blocks[32 * i + threadIdx.x];
  return rCodes;
}
// The A fragments of a step, a k-block at a time: to (32 lanes, 4 k-blocks, 2 k-steps of 16, 4 registers).
template <class T, int bits, class Dequant>
__device__ void dequant_step(const uint4* blocks, const Dequant& dequant, std::uint32_t* to) {
  using namespace cute;
  const Tensor rCodes = words_of_lane<bits>(blocks);
  for_each(make_int_sequence<4>{}, [&](auto k_block) {
    Tensor rA = make_tensor<T>(Shape<Shape<_2, _2, _2>, _1, _2>{});  // (MMA, 1, 2 k-steps)
    dequant(rCodes(_, make_coord(_, k_block)), rA);
    for (int i = 0; i < 8; ++i) to[(threadIdx.x * 4 + k_block) * 8 + i] = recast<std::uint32_t>(rA)(i);
  });
}
template <class T, int bits>
__global__ void decode_codes(const uint4* blocks, std::uint32_t g_zero, std::uint32_t g8_zero, std::uint32_t* to) {
  cute::Tensor rZero = cute::make_tensor<std::uint32_t>(cute::_2{});
  CodeDecode<T, bits>::set_zeros(rZero, g_zero, g8_zero);
  dequant_step<T, bits>(
      blocks, [&](const auto& rCodes, auto& rA) { CodeDecode<T, bits>::dequant(rCodes, rZero, rA); }, to);
}
template <class T, int bits, class Scale>
__global__ void decode_weights(const uint4* blocks, std::uint32_t g_zero, std::uint32_t g8_zero, std::uint32_t scale,
                               std::uint32_t minimum, std::uint32_t* to) {
  const std::uint32_t zero[2] = {g_zero, g8_zero};
  const WeightDecode<T, bits, Scale> decode(scale, minimum, zero);
  dequant_step<T, bits>(blocks, [&](const auto& rCodes, auto& rA) { decode.dequant(rCodes, rA); }, to);
}

// Calls check(row, code, element) for every element of the step in the fragments `found`.
template <int bits, class Check>
void for_each_weight(const std::vector<int>& codes, const Shared<std::uint32_t>& found, const Check& check) {
  for (int i = 0; i < static_cast<int>(found.n); ++i) {
    const int lane = i / 32, k_block = i / 8 % 4, k_step = i / 4 % 2, r = i % 4, g = lane / 4, t = lane % 4;
    const int row = g + r % 2 * 8, k = 32 * k_block + 16 * k_step + 2 * t + r / 2 * 8;
    for (int side = 0; side < 2; ++side)
      check(row, codes[static_cast<std::size_t>(row * step_k + k + side)],
            static_cast<std::uint16_t>(found[static_cast<std::size_t>(i)] >> (16 * side)));
  }
}

template <class T, int bits>
struct Step {  // random codes [16, 128] in packed layout
  Step() : codes(rows_w * step_k), blocks(2 * w4_tile_bytes(bits) / 16) {
    std::mt19937 random(bits);
    auto* bytes = reinterpret_cast<std::uint8_t*>(blocks.data);
    std::fill_n(bytes, 2 * w4_tile_bytes(bits), std::uint8_t{0});
    for (int n = 0; n < rows_w; ++n)
      for (int k = 0; k < step_k; ++k) {
        const int code = static_cast<int>(random() % (1u << bits));
        const std::int64_t index = w4_code_index(bits, 2, n, k);
        codes[static_cast<std::size_t>(n * step_k + k)] = code;
        bytes[index * bits / 8] |= static_cast<std::uint8_t>(code << (index * bits % 8));
      }
  }
  std::vector<int> codes;  // [16, 128]
  Shared<uint4> blocks;    // (fragment blocks, 32 lanes)
  Shared<std::uint32_t> found{32 * 4 * 8};
};

template <class T, int bits>
void check_codes() {
  const Step<T, bits> step;
  for (std::uint32_t g : {0u, 8u, (1u << bits) - 1})
    for (std::uint32_t g8 : {0u, 7u, (1u << bits) - 1}) {
      launch(decode_codes<T, bits>, 32, step.blocks.data, g, g8, step.found.data);
      for_each_weight<bits>(step.codes, step.found, [&](int row, int code, std::uint16_t element) {
        const float expected =
            static_cast<float>(code - static_cast<int>(row < 8 ? g : g8)) / CodeDecode<T, bits>::unit;
        ASSERT_EQ(to_float(Stored<T>{element}), expected) << row << ", code " << code << ", zero " << g << ", " << g8;
      });
    }
}
TEST_F(Tile, EveryPlaceOfTheWeightsCodes) {
  check_codes<half, 4>();
  check_codes<half, 8>();
  check_codes<bf16, 4>();
  check_codes<bf16, 8>();
}

template <class T, int bits, class Scale>
void check_weights() {
  const Step<T, bits> step;
  // (u - zero) * scale + minimum is exact in fp32, so it is rounded once
  constexpr float scale[2] = {0.75f, -0.171875f}, minimum[2] = {0.0f, 2.625f};
  const auto pair = [](const float (&x)[2]) {
    return std::uint32_t{rooftile::from_float<Stored<Scale>>(x[0]).bits} |
           std::uint32_t{rooftile::from_float<Stored<Scale>>(x[1]).bits} << 16;
  };
  for (std::uint32_t g : {0u, 8u, (1u << bits) - 1})
    for (std::uint32_t g8 : {0u, 7u, (1u << bits) - 1}) {
      launch(decode_weights<T, bits, Scale>, 32, step.blocks.data, g, g8, pair(scale), pair(minimum), step.found.data);
      for_each_weight<bits>(step.codes, step.found, [&](int row, int code, std::uint16_t element) {
        const int side = row / 8;
        const float weight = static_cast<float>(code - static_cast<int>(side ? g8 : g)) * scale[side] + minimum[side];
        ASSERT_EQ(to_float(Stored<T>{element}), to_float(rooftile::from_float<Stored<T>>(weight)))
            << row << ", code " << code << ", zero " << g << ", " << g8;
      });
    }
}
TEST_F(Tile, WeightsAreRoundedOnce) {
  check_weights<half, 4, half>();
  check_weights<half, 8, half>();
  check_weights<bf16, 4, bf16>();
  check_weights<bf16, 8, bf16>();
  check_weights<half, 4, bf16>();
  check_weights<bf16, 8, half>();
}

}  // namespace
}  // namespace rooftile::tile
