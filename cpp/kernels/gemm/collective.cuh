// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 16 bits, on Hopper's wgmma, by CUTLASS's collectives: one producer
// warp loads tiles of W and x (TMA, as many stages as shared memory holds), two consumer warp groups multiply.
//   x [M, K]   W [N, K]   y, residual [M, N]   bias [N]     rows are whole 16-byte vectors at one stride
//
// The two CTAs of a cluster (rows of W x tokens: linear_collective_tiles in configs.h) are neighbours along the GEMM's
// M:
//   64 x 128, 128 x 128, 128 x 256   W's rows are the GEMM's M and tokens are its N, so the column-major output is
//                                    y [M, N]. The pair has one tile of tokens; each CTA loads half and multicasts it.
//   192 x 128, 224 x 128             tokens are the GEMM's M and W's rows are its N, so that the number of rows need
//                                    not be a multiple of 64 for each warp group. The pair has one tile of W.
// 64 x 128 is ping-pong: each consumer warp group has tiles of its own, and one's epilogue runs beside the other's
// products. The larger tiles are cooperative: both warp groups share a tile.
// The sum over K is one fp32 accumulator, in order, whatever the tile. With split-K the GEMM is a batch: batch l
// covers k from l * K / splits to (l + 1) * K / splits and stores fp32 partial sums, which split_k.cu adds in order.
// Cost of a step of 64 k: step_ns in plan_bits16.cpp.
// Sync: CUTLASS's full and empty barrier a stage, across the cluster; a barrier of the consumer warps before the output
// tile is stored. PDL: the producer waits for the previous kernel before its first load; the epilogue reads bias after
// the first tile of the product, hence after that kernel too.

#pragma once

// Makes CUTLASS's producer warps wait for the previous kernel (PDL), so this kernel may start while that one runs.
#define CUTLASS_ENABLE_GDC_FOR_SM90
#include <cute/tensor.hpp>
// What CUTLASS's collective_builder.hpp and gemm_universal.hpp include for Hopper: with the rest, for other GPUs, a
// file takes the compiler a third longer.
#include <cutlass/gemm/collective/collective_mma_decl.hpp>
#include <cutlass/gemm/collective/sm90_mma_tma_gmma_ss_warpspecialized.hpp>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/builders/sm90_gmma_builder.inl>
#include <cutlass/gemm/kernel/gemm_universal_decl.h>
#include <cutlass/gemm/kernel/tile_scheduler.hpp>
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_cooperative.hpp>
#include <cutlass/gemm/kernel/sm90_gemm_tma_warpspecialized_pingpong.hpp>

#include <type_traits>

#include "kernels/gemm/activate_sum.cuh"
#include "kernels/gemm/dispatch.h"
#include "kernels/gemm/params.h"
#include "kernels/launch.h"
#include "kernels/warmup.h"
#include "tile/mma.cuh"
#include "tile/wgmma.cuh"

namespace rooftile::gpu {

namespace fusion = cutlass::epilogue::fusion;

// The residual y is added to: CUTLASS's source tensor, but whether there is one is known at run time. Without one it
// counts as 0 and nothing is read.
template <class T>
struct OptionalResidual : fusion::Sm90SrcFetch<T> {
  struct Arguments {
    bool given = false;
  };
  using Params = Arguments;
  using typename fusion::Sm90SrcFetch<T>::SharedStorage;

  template <class ProblemShape>
  static constexpr Params to_underlying_arguments(const ProblemShape&, const Arguments& a, void*) {
    return a;
  }
  template <class ProblemShape>
  static bool can_implement(const ProblemShape&, const Arguments&) {
    return true;
  }
  template <class ProblemShape>
  static std::size_t get_workspace_size(const ProblemShape&, const Arguments&) {
    return 0;
  }

  CUTLASS_HOST_DEVICE OptionalResidual() {}
  CUTLASS_HOST_DEVICE OptionalResidual(const Params& p, const SharedStorage&) : given(p.given) {}
  bool given = false;

  CUTLASS_DEVICE bool is_C_load_needed() const { return given; }
  CUTLASS_DEVICE bool is_producer_load_needed() const { return given; }
  template <bool reference_source, class... Args>
  CUTLASS_DEVICE auto get_consumer_store_callbacks(const fusion::ConsumerStoreArgs<Args...>& args) {
    if (!given) cute::clear(args.tCrC);
    return fusion::Sm90SrcFetch<T>::template get_consumer_store_callbacks<reference_source>(args);
  }
};

// config: of linear_collective_tiles. partial: stores fp32 sums of one split of K instead of outputs.
template <class Element, int config_, bool partial_>
struct LinearCollective {
  using T = tile::MmaType<Element>;
  static constexpr bool partial = partial_;
  static constexpr LinearTile tile = linear_collective_tiles[config_];
  using Rows = cute::Int<tile.rows>;
  using Tokens = cute::Int<tile.tokens>;
  using Tile = std::conditional_t<tile.pair_shares_rows, cute::Shape<Tokens, Rows, cute::_64>,
                                  cute::Shape<Rows, Tokens, cute::_64>>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  using OutputLayout = std::conditional_t<tile.pair_shares_rows, RowMajor, ColumnMajor>;
  static constexpr auto nearest = cutlass::FloatRoundStyle::round_to_nearest;
  using MainloopSchedule = std::conditional_t<tile.ping_pong, cutlass::gemm::KernelTmaWarpSpecializedPingpong,
                                              cutlass::gemm::KernelTmaWarpSpecializedCooperative>;
  using EpilogueSchedule = std::conditional_t<tile.ping_pong, cutlass::epilogue::TmaWarpSpecialized,
                                              cutlass::epilogue::TmaWarpSpecializedCooperative>;

  template <template <class> class Function, class To, class... Inputs>
  using Apply = fusion::Sm90EVT<fusion::Sm90Compute<Function, To, float, nearest>, Inputs...>;
  using Bias = std::conditional_t<tile.pair_shares_rows, fusion::Sm90RowBroadcast<0, Tile, T, float>,
                                  fusion::Sm90ColBroadcast<0, Tile, T, float>>;
  // One node: each level of a tree is a type that holds the names of all below it, and costs the compiler seconds.
  using Output = Apply<ActivateSum, T, fusion::Sm90AccFetch, Bias, OptionalResidual<T>>;
  using PartialSum = Apply<cutlass::epilogue::thread::Identity, float, fusion::Sm90AccFetch>;

  using Source = std::conditional_t<partial, void, T>;
  using Stored = std::conditional_t<partial, float, T>;
  static constexpr int vector = 16 / static_cast<int>(sizeof(Stored));  // elements
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, Source, OutputLayout, vector, Stored, OutputLayout,
      vector, EpilogueSchedule, std::conditional_t<partial, PartialSum, Output>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, T, RowMajor, 8, T, ColumnMajor, 8, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      MainloopSchedule>::CollectiveOp;
  // one wgmma spans the tile: 224 rows need collective_n224.cuh
  static_assert(cute::size<1>(typename Mainloop::TiledMma::AtomShape_MNK()) == cute::size<1>(Tile()));
  using Kernel = cutlass::gemm::kernel::GemmUniversal<cute::Shape<int, int, int, int>, Mainloop, Epilogue>;
  using Params = typename Kernel::Params;
};

template <class Cfg>
__global__ void __launch_bounds__(Cfg::Kernel::MaxThreadsPerBlock, 1)
    linear_tiles([[maybe_unused]] const __grid_constant__ typename Cfg::Params p) {
#ifdef ROOFTILE_WGMMA
  extern __shared__ __align__(128) char shared[];
  typename Cfg::Kernel()(p, shared);
#endif
}

// The epilogue's arguments: outputs, or the partial sums of the splits [split][token][padded_n].
template <class Cfg>
auto epilogue_arguments(const Bits16Params& p) {
  using T = typename Cfg::T;
  using Arguments = typename Cfg::Kernel::EpilogueArguments;
  using Stride = typename Cfg::Epilogue::StrideD;
  const auto output = [](std::int64_t token, std::int64_t split) {
    if constexpr (Cfg::tile.pair_shares_rows) return Stride(token, cute::_1{}, split);
    else return Stride(cute::_1{}, token, split);
  };
  if constexpr (Cfg::partial) {
    const Stride stride = output(p.padded_n(), p.tokens * p.padded_n());
    return Arguments{{}, nullptr, stride, p.partial, stride};
  } else {
    const auto stride = [&](const Rows& rows) { return output(rows.ndim > 0 ? rows.stride[0] : p.n, 0); };
    // without a residual the tensor map still needs an address; nothing is read through it
    const Rows& source = p.residual.data ? p.residual : p.y;
    const typename Cfg::Output::Arguments outputs{
        {}, {static_cast<const T*>(p.bias)}, {p.residual.data != nullptr}, {p.activation}};
    return Arguments{outputs, static_cast<const T*>(source.data), stride(source), static_cast<T*>(p.y.data),
                     stride(p.y)};
  }
}

template <class Cfg>
void launch_collective(const DeviceScope& scope, const GemmPlan&, std::int64_t, const GemmParams& product) {
  const auto& p = static_cast<const Bits16Params&>(product);
  using T = typename Cfg::T;
  using Kernel = typename Cfg::Kernel;
  const int n = static_cast<int>(p.n), m = static_cast<int>(p.tokens), k = static_cast<int>(p.k) / p.splits;
  const std::int64_t split_k = p.splits > 1 ? k : 0;  // elements from a split to the next
  const auto *const w = static_cast<const T*>(p.w), *const x = static_cast<const T*>(p.x.data);
  const auto w_stride = cute::make_stride(p.w_stride, cute::_1{}, split_k),
             x_stride = cute::make_stride(p.x_stride, cute::_1{}, split_k);
  constexpr bool tokens_first = Cfg::tile.pair_shares_rows;
  typename Kernel::Arguments arguments{cutlass::gemm::GemmUniversalMode::kGemm,
                                       {tokens_first ? m : n, tokens_first ? n : m, k, p.splits},
                                       {tokens_first ? x : w, tokens_first ? x_stride : w_stride, tokens_first ? w : x,
                                        tokens_first ? w_stride : x_stride},
                                       epilogue_arguments<Cfg>(p)};
  arguments.hw_info.sm_count = scope.sms();
  const typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, nullptr);
  const dim3 grid = Kernel::get_grid_shape(params);
  scope.launch(linear_tiles<Cfg>, {static_cast<std::int64_t>(grid.x), static_cast<std::int64_t>(grid.y)},
               Kernel::MaxThreadsPerBlock, Kernel::SharedStorageSize, params, Overlap::with_previous, 2);
}

template <DType dtype, int config, bool partial>
std::span<const GemmVariant> collective_variants() {
  using Cfg = LinearCollective<tile::ElementOf<dtype>, config, partial>;
  static const GemmVariant rows[] = {
      {{.path = GemmPath::collective, .dtype = dtype, .config = config, .partial = partial},
       launch_collective<Cfg>,
       [](const char* op) { load_kernel(op, linear_tiles<Cfg>); }}};
  return rows;
}

}  // namespace rooftile::gpu
