// SPDX-License-Identifier: Apache-2.0
// Every variant of the small ops against the reference, on strided rows of every length around a vector's width; what
// lies beside an output is not touched; shared memory is told from interleaved memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include "cpu/element.h"
#include "cpu/kernels.h"
#include "ops/check.h"
#include "rooftile/fused.h"

namespace rooftile {
namespace {

std::vector<std::string> variants() {
  std::vector<std::string> names;
  std::istringstream text(cpu::runnable_variants());
  for (std::string name; std::getline(text >> std::ws, name, ',');) names.push_back(name);
  return names;
}

// A tensor of its own memory with a strided last dimension and margins.
struct Array {
  std::vector<std::byte> memory;
  TensorView view;

  Array(DType dtype, std::vector<std::int64_t> shape, std::int64_t last_stride = 1) {
    view.dtype = dtype;
    view.ndim = static_cast<int>(shape.size());
    std::int64_t stride = last_stride;
    for (int i = view.ndim - 1; i >= 0; --i) {
      view.shape[i] = shape[static_cast<std::size_t>(i)];
      view.stride[i] = stride;
      stride = stride * std::max<std::int64_t>(view.shape[i], 1) + (i == view.ndim - 1 ? 3 : 0);
    }
    memory.assign(static_cast<std::size_t>(stride + 32) * size_of(dtype), std::byte{0x5a});
    view.data = memory.data() + 16 * size_of(dtype);
  }
  std::vector<double> values() const {
    std::vector<double> all;
    for (std::int64_t i = 0; i < view.numel(); ++i) all.push_back(cpu::read(view, cpu::element_offset(view, i)));
    return all;
  }
  // How many bytes differ from the filling outside the elements.
  int touched() const {
    std::vector<bool> own(memory.size());
    const auto size = size_of(view.dtype);
    const auto base = static_cast<std::size_t>(static_cast<const std::byte*>(view.data) - memory.data());
    for (std::int64_t i = 0; i < view.numel(); ++i)
      for (std::size_t b = 0; b < size; ++b)
        own[base + static_cast<std::size_t>(cpu::element_offset(view, i)) * size + b] = true;
    int count = 0;
    for (std::size_t i = 0; i < memory.size(); ++i) count += !own[i] && memory[i] != std::byte{0x5a};
    return count;
  }
};

Array random(DType dtype, std::vector<std::int64_t> shape, std::int64_t last_stride, unsigned seed) {
  Array a(dtype, shape, last_stride);
  std::uint64_t state = seed * 2654435761u + 1;
  for (std::int64_t i = 0; i < a.view.numel(); ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    cpu::write(a.view, cpu::element_offset(a.view, i),
               static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 2e-9f);
  }
  return a;
}

void expect_near(const Array& got, const Array& expected, DType dtype) {
  // float32: a few roundings of terms that may cancel, where the reference has one; they vanish in 16 bits.
  const double unit = dtype == DType::f32 ? 0x1p-21 : dtype == DType::f16 ? 0x1p-10 : 0x1p-7;
  const auto a = got.values(), b = expected.values();
  for (std::size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], unit * std::abs(b[i]) + 1e-6) << i;
  ASSERT_EQ(got.touched(), 0);
}

template <class Op>
void compare(DType dtype, const std::vector<std::int64_t>& out_shape, const Op& op) {
  for (const std::int64_t stride : {1, 2}) {
    Array expected(dtype, out_shape, stride);
    op(Context{.variant = "reference"}, expected.view);
    for (const std::string& variant : variants()) {
      SCOPED_TRACE(variant + " stride " + std::to_string(stride));
      Array got(dtype, out_shape, stride);
      op(Context{.variant = variant.c_str()}, got.view);
      expect_near(got, expected, dtype);
    }
  }
}

class SmallOps : public testing::TestWithParam<DType> {};

TEST_P(SmallOps, AgreeWithTheReference) {
  const DType t = GetParam();
  for (const std::int64_t n : {1, 2, 7, 8, 9, 16, 31, 33, 40, 65, 576})
    for (const std::int64_t stride : {1, 3}) {
      SCOPED_TRACE("row " + std::to_string(n) + " stride " + std::to_string(stride));
      const Array x = random(t, {3, n}, stride, 1), r = random(t, {3, n}, 1, 2),
                  gate_up = random(t, {3, 2 * n}, stride, 3);
      const Array w = random(t, {n}, stride, 4), b = random(DType::f32, {n}, 1, 5);
      compare(t, {3, n}, [&](const Context& c, TensorView y) { rms_norm(c, x.view, w.view, 1e-6f, y); });
      compare(t, {3, n}, [&](const Context& c, TensorView y) { layer_norm(c, x.view, w.view, b.view, 1e-5f, y); });
      compare(t, {3, n}, [&](const Context& c, TensorView y) {
        Array res(t, {3, n});
        add_rms_norm(c, x.view, r.view, w.view, 1e-6f, y, res.view);
        ASSERT_EQ(res.touched(), 0);
      });
      compare(t, {3, n}, [&](const Context& c, TensorView y) { softmax(c, x.view, y); });
      compare(t, {3, n}, [&](const Context& c, TensorView h) { silu_mul(c, gate_up.view, h); });
      compare(t, {3, n}, [&](const Context& c, TensorView h) { gelu_mul(c, gate_up.view, Gelu::tanh, h); });
      compare(t, {3, n}, [&](const Context& c, TensorView h) { gelu_mul(c, gate_up.view, Gelu::erf, h); });
    }
}

TEST_P(SmallOps, HeadNormsAndEmbeddingAgreeWithTheReference) {
  const DType t = GetParam();
  for (const std::int64_t n : {1, 7, 8, 33, 128})
    for (const std::int64_t stride : {1, 3}) {
      SCOPED_TRACE("row " + std::to_string(n) + " stride " + std::to_string(stride));
      const Array q = random(t, {5, 3, n}, stride, 1), k = random(t, {5, 2, n}, 1, 2), w = random(t, {n}, stride, 3);
      for (const bool first : {true, false})
        compare(t, {5, first ? 3 : 2, n}, [&](const Context& c, TensorView y) {
          Array other(t, {5, first ? 2 : 3, n});
          qk_rms_norm(c, q.view, k.view, w.view, {}, 1e-6f, first ? y : other.view, first ? other.view : y);
          ASSERT_EQ(other.touched(), 0);
        });
      const Array table = random(t, {9, n}, stride, 4);
      Array ids(DType::i32, {4});
      for (std::int64_t i = 0; i < 4; ++i) ids.view.as<std::int32_t>()[i] = static_cast<std::int32_t>((i * 4) % 9);
      for (const float scale : {1.0f, 0.3f})
        compare(t, {4, n}, [&](const Context& c, TensorView y) { embedding(c, ids.view, table.view, scale, y); });
    }
}

TEST_P(SmallOps, RopeAgreesWithTheReference) {
  const DType t = GetParam();
  for (const std::int64_t dim : {1, 6, 16, 59, 64, 80})
    for (const std::int64_t pairs : {dim / 2, dim / 3}) {
      const Array q = random(t, {5, 3, dim}, 2, 1), k = random(t, {5, 1, dim}, 1, 2);
      const Array cos = random(DType::f32, {9, pairs}, 1, 3), sin = random(t, {9, pairs}, 2, 4);
      Array positions(DType::i64, {5});
      for (std::int64_t i = 0; i < 5; ++i) positions.view.as<std::int64_t>()[i] = (i * 4) % 9;
      compare(t, {5, 3, dim}, [&](const Context& c, TensorView y) {
        Array k_out(t, {5, 1, dim});
        rope(c, q.view, k.view, cos.view, sin.view, positions.view, y, k_out.view);
        ASSERT_EQ(k_out.touched(), 0);
      });
    }
}

INSTANTIATE_TEST_SUITE_P(DTypes, SmallOps, testing::Values(DType::f32, DType::f16, DType::bf16));

// Calls `call`, which must fail in this way. Returns what it says.
template <class Call>
std::string said(ErrorKind kind, const Call& call) {
  try {
    call();
  } catch (const Error& e) {
    EXPECT_EQ(e.kind(), kind);
    return e.what();
  }
  return "nothing";
}

TEST(Checks, OfCallsOnAGpuNeedNone) {
  const Context gpu{.device = {DeviceType::cuda, 0}, .variant = "avx2"};
  Array x(DType::f16, {2, 8}), counts(DType::i32, {2}, 3);
  EXPECT_EQ(said(ErrorKind::not_supported, [&] { check::check_gpu("op", gpu, "x", x.view); }),
            "op: plan \"avx2\" is no variant of the GPU kernels; leave plan out");
  EXPECT_EQ(said(ErrorKind::not_supported, [&] { check::cpu_kernels("op", gpu); }),
            "op: tensors are on cuda:0, but this op has CPU kernels only");
  counts.view.device = gpu.device;
  const auto values = [&] { return check::device_values("op", "counts", counts.view, 2, gpu.device); };
  EXPECT_EQ(said(ErrorKind::value, values), "op: counts must be contiguous on a GPU, got stride 3");
  counts.view.stride[0] = 1;
  EXPECT_EQ(values(), counts.view.data);
}

TEST(Checks, NormsThatAddNeedAResidual) {
  Array x(DType::f32, {2, 8}), y(DType::f32, {2, 8}), res(DType::f32, {2, 8});
  EXPECT_EQ(said(ErrorKind::type, [&] { add_rms_norm({}, x.view, {}, {}, 1e-6f, y.view, res.view); }),
            "add_rms_norm: residual must be a tensor, got None");
  EXPECT_EQ(said(ErrorKind::type, [&] { add_layer_norm({}, x.view, {}, {}, {}, 1e-6f, y.view, res.view); }),
            "add_layer_norm: residual must be a tensor, got None");
}

TEST(Overlap, IsFoundExactly) {
  std::vector<float> memory(4096);
  std::uint64_t state = 7;
  const auto draw = [&](std::uint64_t n) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<std::int64_t>((state >> 33) % n);
  };
  const auto view = [&] {
    TensorView t;
    t.ndim = 3;
    t.data = memory.data() + 1500 + draw(60);
    for (int i = 0; i < 3; ++i) {
      t.shape[i] = 1 + draw(4);
      t.stride[i] = draw(40) - 12;
    }
    return t;
  };
  const auto elements = [&](const TensorView& t) {
    std::set<const float*> all;
    for (std::int64_t i = 0; i < t.numel(); ++i) all.insert(t.as<float>() + cpu::element_offset(t, i));
    return all;
  };
  int met = 0;
  for (int round = 0; round < 3000; ++round) {
    const TensorView a = view(), b = view();
    const auto in_a = elements(a), in_b = elements(b);
    const bool shared = std::any_of(in_a.begin(), in_a.end(), [&](const float* p) { return in_b.count(p) > 0; });
    met += shared;
    if (shared) {
      EXPECT_THROW(check::check_disjoint("op", "out", a, {{"x", b}}), Error) << round;
    } else {
      EXPECT_NO_THROW(check::check_disjoint("op", "out", a, {{"x", b}})) << round;
    }
  }
  EXPECT_GT(met, 300);
  EXPECT_LT(met, 2700);
}

}  // namespace
}  // namespace rooftile
