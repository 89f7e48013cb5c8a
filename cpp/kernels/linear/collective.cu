// SPDX-License-Identifier: Apache-2.0
// y = activation(x W^T + bias) + residual with W in 16 bits, on Hopper's wgmma, by CUTLASS's collectives: one producer
// warp loads tiles of W and x (TMA, as many stages as shared memory holds), one or two consumer warp groups multiply.
//   x [M, K]   W [N, K]   y, residual [M, N]   bias [N]     rows are whole 16-byte vectors at one stride
//
// W's rows are the M of the collective's GEMM and tokens are its N, so the GEMM's column-major output is y [M, N]. The
// two CTAs of a cluster compute different rows of W for the same tokens; each loads half of the
// tile of x and multicasts it to both.
//   64 x 128    ping-pong: two consumer warp groups alternate between tiles. For M where the bytes of W still count, or
//               where the larger tile would leave SMs idle
//   128 x 256   cooperative: both consumer warp groups share a tile. Tensor cores are the roof
// Cost of a step of 64 k: 64 x 128: 1 Mflop, 256 tensor-core cycles, 24 KB, of which 16 KB are multicast; 128 x 256:
// 4 Mflop, 1024 cycles, 48 KB, of which 32 KB are multicast. The sum over K is one fp32 accumulator, in order.
// Sync: CUTLASS's full and empty barrier a stage, across the cluster; a barrier of the consumer warps before the output
// tile is stored. PDL: the producer waits for the previous kernel before its first load; the epilogue reads bias after
// the first tile of the product, hence after that kernel too.

// Makes CUTLASS's producer warps wait for the previous kernel (PDL), so this kernel may start while that one runs.
#define CUTLASS_ENABLE_GDC_FOR_SM90
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/epilogue/fusion/operations.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/kernel/gemm_universal.hpp>

#include "kernels/linear/activate.cuh"
#include "kernels/linear/params.h"
#include "kernels/warmup.h"
#include "tile/wgmma.cuh"

namespace rooftile::gpu {
namespace {

namespace fusion = cutlass::epilogue::fusion;

// The mainloop and epilogue schedules of each entry of linear_collective_tiles.
template <int config>
struct Schedule {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedPingpong;
  using Epilogue = cutlass::epilogue::TmaWarpSpecialized;
};
template <>
struct Schedule<1> {
  using Mainloop = cutlass::gemm::KernelTmaWarpSpecializedCooperative;
  using Epilogue = cutlass::epilogue::TmaWarpSpecializedCooperative;
};

template <class Element, int config_>
struct LinearCollective {
  using T = typename CutlassElement<Element>::type;
  static constexpr LinearTile tile = linear_collective_tiles[config_];
  using Tile = cute::Shape<cute::Int<tile.rows>, cute::Int<tile.tokens>, cute::_64>;
  using Cluster = cute::Shape<cute::_2, cute::_1, cute::_1>;
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  static constexpr auto nearest = cutlass::FloatRoundStyle::round_to_nearest;

  template <template <class> class Function, class To, class... Inputs>
  using Apply = fusion::Sm90EVT<fusion::Sm90Compute<Function, To, float, nearest>, Inputs...>;
  using Sum = Apply<cutlass::plus, float, fusion::Sm90ColBroadcast<0, Tile, T, float>, fusion::Sm90AccFetch>;
  using Activated = Apply<Activate, float, Sum>;
  // beta * residual + activated, beta 0 or 1; with beta 0 the residual is not read
  using Output = Apply<cutlass::homogeneous_multiply_add, T, fusion::Sm90ScalarBroadcast<float>,
                       fusion::Sm90SrcFetch<T>, Activated>;

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, T, ColumnMajor, 8, T, ColumnMajor, 8,
      typename Schedule<config_>::Epilogue, Output>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, T, RowMajor, 8, T, ColumnMajor, 8, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      typename Schedule<config_>::Mainloop>::CollectiveOp;
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

template <class Cfg>
void launch(const DeviceScope& scope, const LinearParams& p) {
  using T = typename Cfg::T;
  using Kernel = typename Cfg::Kernel;
  const int n = static_cast<int>(p.n), m = static_cast<int>(p.tokens), k = static_cast<int>(p.k);
  const auto pitch = [](const Rows& rows, std::int64_t alone) { return rows.ndim > 0 ? rows.stride[0] : alone; };
  const auto output = [&](const Rows& rows) {
    return cute::make_stride(cute::_1{}, pitch(rows, p.n), std::int64_t{0});
  };
  const Rows& source =
      p.residual.data ? p.residual
                      : p.y;  // without a residual the tensor map still needs an address; nothing is read through it
  const typename Cfg::Sum::Arguments sum{{static_cast<const T*>(p.bias)}, {}, {}};
  const typename Cfg::Activated::Arguments activated{sum, {p.activation}};
  typename Kernel::Arguments arguments{
      cutlass::gemm::GemmUniversalMode::kGemm,
      {n, m, k, 1},
      {static_cast<const T*>(p.w), cute::make_stride(p.w_stride, cute::_1{}, std::int64_t{0}),
       static_cast<const T*>(p.x.data), cute::make_stride(p.x_stride, cute::_1{}, std::int64_t{0})},
      {{{{p.residual.data ? 1.0f : 0.0f}}, {}, activated, {}},
       static_cast<const T*>(source.data),
       output(source),
       static_cast<T*>(p.y.data),
       output(p.y)}};
  arguments.hw_info.sm_count = scope.sms();
  const typename Kernel::Params params = Kernel::to_underlying_arguments(arguments, nullptr);
  const dim3 grid = Kernel::get_grid_shape(params);
  scope.launch(linear_tiles<Cfg>, {static_cast<std::int64_t>(grid.x), static_cast<std::int64_t>(grid.y)},
               Kernel::MaxThreadsPerBlock, Kernel::SharedStorageSize, params, Overlap::with_previous, 2);
}

template <class T>
void launch(const DeviceScope& scope, const LinearParams& p, int config) {
  if (config == 0) launch<LinearCollective<T, 0>>(scope, p);
  else launch<LinearCollective<T, 1>>(scope, p);
}

}  // namespace

void linear_collective(const DeviceScope& scope, const LinearParams& p, DType dtype, int config) {
  tile::with_element16(dtype, [&](auto e) { launch<decltype(e)>(scope, p, config); });
}

void load_linear_collectives(const char* op) {
  load_kernel(op, linear_tiles<LinearCollective<tile::half, 0>>);
  load_kernel(op, linear_tiles<LinearCollective<tile::half, 1>>);
  load_kernel(op, linear_tiles<LinearCollective<tile::bf16, 0>>);
  load_kernel(op, linear_tiles<LinearCollective<tile::bf16, 1>>);
}

}  // namespace rooftile::gpu
