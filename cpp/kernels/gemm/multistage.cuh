// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 16 bits, on mma m16n8k16 with cp.async, by CUTLASS's multistage
// GEMM for sm_80. Serves more tokens than stream_bits16.cuh is fast for, on GPUs that are not Hopper;
// newer ones run it from PTX.
//   x [M, K]   W [N, K]   y, residual [M, N]   bias [N]     rows are whole 16-byte vectors at one stride
//
// A CTA of four warps computes 128 tokens x 128 rows of W in k-steps of 32 through four stages of shared memory; the
// CTA swizzle makes neighbouring CTAs share tokens or rows of W in L2. A step is 1 Mflop and 16 KB: tensor cores are
// the roof where there are tiles for all SMs. The sum over K is one fp32 accumulator, in order.
// Sync: CUTLASS's cp.async groups, and one __syncthreads a stage.
#pragma once

#include <cutlass/gemm/kernel/default_gemm_universal_with_visitor.h>

#include <cutlass/epilogue/threadblock/fusion/visitors.hpp>  // after the header that it needs

#include "kernels/gemm/activate_sum.cuh"
#include "kernels/gemm/dispatch.h"
#include "kernels/gemm/params.h"
#include "kernels/launch.h"
#include "kernels/warmup.h"
#include "tile/mma.cuh"
#include "tile/wgmma.cuh"

namespace rooftile::gpu {

namespace threadblock = cutlass::epilogue::threadblock;

// Loads an optional tensor: without one every element counts as 0 and nothing is read.
template <class ThreadMap, class T>
struct OptionalLoad : threadblock::VisitorAuxLoad<ThreadMap, T, cute::Stride<std::int64_t, cute::_1, std::int64_t>> {
  using Base = threadblock::VisitorAuxLoad<ThreadMap, T, cute::Stride<std::int64_t, cute::_1, std::int64_t>>;
  using Base::Base;
  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord tile, int thread, ProblemShape shape) {
    if (!this->params_ptr->ptr_aux) cute::get<0>(shape) = 0;
    return Base::get_callbacks(tile, thread, shape);
  }
};

// Computes activation(sum + bias) + residual for a fragment of `size` neighbouring outputs.
struct EpilogueVisitor {
  using Arguments = ActivationChoice;
  using Params = ActivationChoice;
  struct SharedStorage {};
  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(const ProblemShape&, const Arguments& a, void*) {
    return a;
  }
  template <class ProblemShape>
  static std::size_t get_workspace_size(const ProblemShape&, const Arguments&) {
    return 0;
  }

  CUTLASS_HOST_DEVICE EpilogueVisitor() {}
  CUTLASS_HOST_DEVICE EpilogueVisitor(const Params& p, const SharedStorage&) : chosen(p) {}
  ActivationChoice chosen;

  struct Callbacks : threadblock::EmptyCallbacks {
    ActivationChoice chosen;
    template <class Sum, class T, int size>
    CUTLASS_DEVICE auto visit(int, int, int, int, const cutlass::Array<Sum, size>&,
                              const cutlass::Array<Sum, size>& sums, const cutlass::Array<T, size>& bias,
                              const cutlass::Array<T, size>& residual) {
      using Fragment = cutlass::Array<float, size>;
      const cutlass::NumericArrayConverter<float, T, size> widen;
      return ActivateSum<Fragment>()(sums, widen(bias), widen(residual), chosen);
    }
  };
  template <class ProblemShape>
  CUTLASS_DEVICE auto get_callbacks(cutlass::gemm::GemmCoord, int, ProblemShape) {
    Callbacks callbacks;
    callbacks.chosen = chosen;
    return callbacks;
  }
};

template <class Element>
struct LinearMultistage {
  using T = tile::MmaType<Element>;
  using Tile = cutlass::gemm::GemmShape<linear_multistage_tile.tokens, linear_multistage_tile.rows, 32>;
  using Warp = cutlass::gemm::GemmShape<64, 64, 32>;
  static constexpr int stages = 4;

  using ThreadMap = threadblock::OutputTileThreadLayout<Tile, Warp, T, 8, 1>;
  using Stride = cute::Stride<std::int64_t, cute::_1, std::int64_t>;
  using Bias = threadblock::VisitorRowBroadcast<ThreadMap, T, cute::Stride<cute::_0, cute::_1, std::int64_t>>;
  using EpilogueTree =
      threadblock::Sm80EVT<EpilogueVisitor, threadblock::VisitorAccFetch, Bias, OptionalLoad<ThreadMap, T>>;
  using Output = threadblock::Sm80EVT<
      threadblock::VisitorAuxStore<ThreadMap, T, cutlass::FloatRoundStyle::round_to_nearest, Stride>, EpilogueTree>;
  using Swizzle = cutlass::gemm::threadblock::GemmIdentityThreadblockSwizzle<8>;
  using Kernel = typename cutlass::gemm::kernel::DefaultGemmWithVisitor<
      T, cutlass::layout::RowMajor, cutlass::ComplexTransform::kNone, 8, T, cutlass::layout::ColumnMajor,
      cutlass::ComplexTransform::kNone, 8, T, cutlass::layout::RowMajor, 8, float, float,
      cutlass::arch::OpClassTensorOp, cutlass::arch::Sm80, Tile, Warp, cutlass::gemm::GemmShape<16, 8, 16>, Output,
      Swizzle, stages, cutlass::arch::OpMultiplyAdd, 1>::GemmKernel;
  using Params = typename Kernel::Params;
};

template <class Cfg>
__global__ void __launch_bounds__(Cfg::Kernel::kThreadCount, 2)
    linear_multistage_tiles([[maybe_unused]] const __grid_constant__ typename Cfg::Params p) {
#ifndef ROOFTILE_WGMMA  // where it is, collective.cuh runs instead
  extern __shared__ __align__(128) char shared[];
  Cfg::Kernel::invoke(p, *reinterpret_cast<typename Cfg::Kernel::SharedStorage*>(shared));
#endif
}

template <class Cfg>
void launch_multistage(const DeviceScope& scope, const GemmPlan&, std::int64_t, const GemmParams& product) {
  const auto& p = static_cast<const Bits16Params&>(product);
  using T = typename Cfg::T;
  using Kernel = typename Cfg::Kernel;
  const auto at = [](const Rows& rows) { return static_cast<T*>(rows.data); };
  const auto stride = [&](const Rows& rows) {
    return typename Cfg::Stride{rows.ndim > 0 ? rows.stride[0] : p.n, cute::_1{}, std::int64_t{0}};
  };
  const typename Cfg::EpilogueTree::Arguments epilogue{{},
                                                       {static_cast<T*>(const_cast<void*>(p.bias)), T(0), {}},
                                                       {at(p.residual), T(0), stride(p.residual)},
                                                       {p.activation}};
  const typename Kernel::Arguments arguments(cutlass::gemm::GemmUniversalMode::kGemm,
                                             {static_cast<int>(p.tokens), static_cast<int>(p.n), static_cast<int>(p.k)},
                                             1, {epilogue, {at(p.y), stride(p.y)}}, p.x.data, p.w, nullptr, nullptr, 0,
                                             0, 0, 0, p.x_stride, p.w_stride, 0, 0);
  const typename Kernel::Params params(arguments, scope.sms(), 1);
  const dim3 grid = typename Cfg::Swizzle().get_grid_shape(params.grid_tiled_shape);
  scope.launch(linear_multistage_tiles<Cfg>, {static_cast<std::int64_t>(grid.x), static_cast<std::int64_t>(grid.y)},
               Kernel::kThreadCount, sizeof(typename Kernel::SharedStorage), params);
}

template <DType dtype>
std::span<const GemmVariant> multistage_variants() {
  using Cfg = LinearMultistage<tile::ElementOf<dtype>>;
  static const GemmVariant rows[] = {{{.path = GemmPath::multistage, .dtype = dtype},
                                      launch_multistage<Cfg>,
                                      [](const char* op) { load_kernel(op, linear_multistage_tiles<Cfg>); }}};
  return rows;
}

}  // namespace rooftile::gpu
