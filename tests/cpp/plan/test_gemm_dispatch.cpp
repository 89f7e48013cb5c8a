// SPDX-License-Identifier: Apache-2.0
// Every plan of a product finds its compiled kernel; what kernels receive. Needs no GPU, but a build with the kernels.
#include <gtest/gtest.h>

#include "kernels/gemm/dispatch.h"
#include "kernels/gemm/params.h"
#include "support/tensors.h"

namespace rooftile::gpu {
namespace {

void expect_variant(const GemmProblem& p) {
  const GemmPlan plan = plan_gemm(p);
  EXPECT_NE(find_variant(key_of(plan, p)), nullptr)
      << text(plan) << ": m " << p.m << " n " << p.n << " k " << p.k << " bits " << p.bits << " group " << p.group
      << (p.hopper ? " hopper" : "") << (p.aligned_all ? " aligned" : "");
}

TEST(GemmDispatch, EveryPlanHasAVariant) {
  for (std::int64_t m : {1, 8, 9, 16, 17, 32, 64, 65, 128, 256, 1024, 4096})
    for (std::int64_t n : {64, 4096, 14336})
      for (DType dtype : {DType::f16, DType::bf16})
        for (bool hopper : {false, true})
          for (bool aligned : {false, true}) {
            GemmProblem p{.m = m, .n = n, .k = 4096, .dtype = dtype, .sms = 132, .hopper = hopper};
            p.vec = p.aligned_operands = p.aligned_all = aligned;
            expect_variant(p);
            for (int bits : {4, 8})
              for (int group : {32, 128})
                for (W4Zeros zeros : {W4Zeros::symmetric, W4Zeros::integer, W4Zeros::minima})
                  for (DType scale_dtype : {DType::f16, DType::bf16})
                    for (bool batch_invariant : {false, true}) {
                      if (bits == 8 && zeros == W4Zeros::minima) continue;
                      p.bits = bits;
                      p.group = group;
                      p.zeros = zeros;
                      p.scale_dtype = scale_dtype;
                      p.batch_invariant = batch_invariant;
                      expect_variant(p);
                    }
          }
}

TEST(GemmDispatch, WhatIsNotCompiledIsNotFound) {
  EXPECT_EQ(find_variant({.path = GemmPath::tma, .config = 4}), nullptr);
  EXPECT_EQ(find_variant({.path = GemmPath::stream, .dtype = DType::f32}), nullptr);
  EXPECT_EQ(find_variant({.path = GemmPath::codes_stream, .bits = 8, .zeros = W4StreamZeros::minima}), nullptr);
}

TEST(GemmParams, AGateWithoutAnActivationTakesNoVectors) {
  alignas(8) std::byte memory[2 * 4 * 32];
  const TensorView x = contiguous_view(memory, DType::f16, {}, {4, 32});
  EXPECT_TRUE(GemmParams(x, x, {}, {}, Activation::none).y_vec4);
  EXPECT_TRUE(GemmParams(x, x, {}, {}, Activation::silu, true).y_vec4);
  EXPECT_FALSE(GemmParams(x, x, {}, {}, Activation::none, true).y_vec4);
}

}  // namespace
}  // namespace rooftile::gpu
