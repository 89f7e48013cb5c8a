// SPDX-License-Identifier: Apache-2.0
// How tile code moves bytes and waits: copies, barriers of warps, semaphores, clusters, PDL, mbarriers, TMA with
// tensor_map.h's descriptors, and wgmma on what TMA left. What exists on Hopper alone is skipped elsewhere.
#include <gtest/gtest.h>

#include <cstdint>
#include <cute/arch/copy_sm90_tma.hpp>
#include <cute/tensor.hpp>

#include "kernels/tensor_map.h"
#include "support/device.cuh"
#include "tile/barrier.cuh"
#include "tile/copy.cuh"
#include "tile/cta_sync.cuh"
#include "tile/hints.cuh"
#include "tile/semaphore.cuh"
#include "tile/warps.cuh"
#include "tile/wgmma.cuh"

namespace rooftile::tile {
namespace {

// ---- copy.cuh ----

// (lanes) 16-byte vectors: loaded, and copied by both sizes of cp.async; every second zfill copy is not valid.
__global__ void copy_vectors(const uint4* from, uint4* once, uint4* async, uint4* zfill, uint4* halves) {
  __shared__ uint4 shared[3][32];
  const int lane = thread_index();
  prefetch_l2(from + lane);
  prefetch_l2_bulk(from, 32 * 16);
  store(once + lane, lane % 3 ? load_once(from + lane) : load_once<true>(from + lane));
  shared[1][lane] = {1, 2, 3, 4};  // overwritten, also where the copy is not valid
  __syncwarp();
  cp_async_16(&shared[0][lane], from + lane);
  cp_async_16_zfill(&shared[1][lane], lane % 2 ? from + lane : from, lane % 2 != 0);
  for (int half = 0; half < 2; ++half)
    cp_async_8(reinterpret_cast<std::uint64_t*>(&shared[2][lane]) + half,
               reinterpret_cast<const std::uint64_t*>(from + lane) + half);
  cute::cp_async_fence();
  cute::cp_async_wait<0>();
  async[lane] = shared[0][lane], zfill[lane] = shared[1][lane], halves[lane] = shared[2][lane];
}

TEST_F(Tile, CopiesOfVectors) {
  const Shared<uint4> from(32), once(32), async(32), zfill(32), halves(32);
  for (std::uint32_t i = 0; i < 32; ++i) from[i] = {4 * i + 1, 4 * i + 2, 4 * i + 3, 4 * i + 4};
  launch(copy_vectors, 32, from.data, once.data, async.data, zfill.data, halves.data);
  const auto expect = [](const uint4& found, const uint4& expected) {
    EXPECT_TRUE(found.x == expected.x && found.y == expected.y && found.z == expected.z && found.w == expected.w);
  };
  for (std::uint32_t i = 0; i < 32; ++i) {
    for (const Shared<uint4>* copy : {&once, &async, &halves}) expect((*copy)[i], from[i]);
    expect(zfill[i], i % 2 ? from[i] : uint4{});
  }
}

// ---- hints.cuh ----

// Every third lane loads; the others are given an address that cannot be read.
__global__ void load_some(const std::int32_t* from, std::int32_t* to) {
  const int lane = thread_index();
  const bool given = lane % 3 == 0;
  to[lane] = load_if(given, given ? from + lane : nullptr, -lane);
}
// (3 kinds of value, 32 lanes): whether a pinned value is what it was.
__global__ void pin_values(const std::int32_t* from, std::int32_t* same) {
  const int lane = thread_index();
  int x = from[lane];
  std::uint32_t bits = static_cast<std::uint32_t>(from[lane]);
  const std::int32_t* at = from + lane;
  pin(x);
  pin(bits);
  pin(at);
  same[lane] = x == from[lane];
  same[32 + lane] = bits == static_cast<std::uint32_t>(from[lane]);
  same[64 + lane] = at == from + lane;
}

TEST_F(Tile, ALoadThatIsNotGivenReadsNothing) {
  const Shared<std::int32_t> from(32), to(32);
  for (int i = 0; i < 32; ++i) from[i] = 1000 + i;
  launch(load_some, 32, from.data, to.data);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(to[i], i % 3 == 0 ? 1000 + i : -i);
}

TEST_F(Tile, PinnedValuesStay) {
  const Shared<std::int32_t> from(32), same(96);
  for (int i = 0; i < 32; ++i) from[i] = (i % 2 ? -1 : 1) * (i << 26 | i);
  for (int i = 0; i < 96; ++i) same[i] = 0;
  launch(pin_values, 32, from.data, same.data);
  for (int i = 0; i < 96; ++i) EXPECT_EQ(same[i], 1) << i;
}

// ---- warps.cuh ----

// A CTA of two tiles of two warps: each warp reads what the other warp of its tile has written. Tile 1 meets more often
// than tile 0, so a barrier of the whole CTA would never end.
__global__ void exchange(int* to) {
  __shared__ int written[4];
  const int warp = threadIdx.x / 32, tile = warp / 2;
  for (int round = 0; round < (tile ? 7 : 2); ++round) {
    if (threadIdx.x % 32 == 0) written[warp] = 10 * round + warp;
    sync_tile_warps<2>(tile);  // writes of a round -> reads of the round
    if (warp_uniform(written[warp ^ 1]) != 10 * round + (warp ^ 1)) to[threadIdx.x] = -1;
    sync_tile_warps<2>(tile);  // reads of a round -> writes of the next
    sync_tile_warps<1>(warp);
  }
  to[threadIdx.x] += warp_uniform(static_cast<int>(threadIdx.x) + 1);  // lane 0's
}

TEST_F(Tile, WarpsOfATileMeet) {
  const Shared<int> to(128);
  for (std::size_t i = 0; i < to.n; ++i) to[i] = 0;
  launch({.threads = 128}, exchange, to.data);
  for (std::size_t i = 0; i < to.n; ++i) EXPECT_EQ(to[i], static_cast<int>(i / 32 * 32 + 1)) << i;
}

// ---- semaphore.cuh ----

// CTA 1 reads what all threads of CTA 0 wrote before they released the semaphore.
__global__ void pass_on(std::uint64_t* semaphore, volatile int* data, int* to) {
  constexpr std::uint64_t value = 0x123456789;
  if (blockIdx.x == 0) {
    data[threadIdx.x] = static_cast<int>(threadIdx.x) + 5;
    __syncthreads();
    if (threadIdx.x == 0) release_semaphore(semaphore, value);
  } else {
    if (threadIdx.x == 0) wait_semaphore(semaphore, value);
    __syncthreads();
    to[threadIdx.x] = data[threadIdx.x];
  }
}

TEST_F(Tile, ASemaphoreCarriesWrites) {
  const Shared<std::uint64_t> semaphore(1);
  const Shared<int> data(256), to(256);
  semaphore[0] = 7;  // another launch's
  for (std::size_t i = 0; i < to.n; ++i) data[i] = to[i] = 0;
  launch({.ctas = 2, .threads = 256}, pass_on, semaphore.data, data.data, to.data);
  for (std::size_t i = 0; i < to.n; ++i) EXPECT_EQ(to[i], static_cast<int>(i) + 5);
}

// ---- cta_sync.cuh ----

struct Place {
  int cluster, rank, neighbour, before;
  bool clusters;
};
// Every CTA reads its neighbour's rank in its shared memory; `flag` is set once all CTAs of the cluster have read it.
template <int size>
__global__ void meet(Place* places, volatile int* flag) {
  __shared__ int mine;
  const ClusterCoord at = cluster_coord();
  const int ranks = has_clusters ? size : 1;
  places[blockIdx.x].before = flag[at.cluster];  // stored, so it has been read when this thread arrives
  arrive_at_cluster();
  wait_for_cluster();  // all have read the flag -> rank 0 may set it
  if (at.rank == 0) flag[at.cluster] = 1;
  mine = 100 * at.cluster + at.rank;
  sync_cluster();  // `mine` of every CTA is written
  const int neighbour = *map_shared_rank(&mine, (at.rank + 1) % ranks);
  sync_cluster();  // nobody reads this CTA's shared memory any more
  places[blockIdx.x] = {at.cluster, at.rank, neighbour, places[blockIdx.x].before, has_clusters};
}

TEST_F(Tile, CtasOfAClusterMeet) {
  constexpr int size = 4, ctas = 8;
  const Shared<Place> places(ctas);
  const Shared<int> flag(ctas);
  for (std::size_t i = 0; i < flag.n; ++i) flag[i] = 0;
  launch({.ctas = ctas, .threads = 1, .cluster = size}, meet<size>, places.data, flag.data);
  for (int i = 0; i < ctas; ++i) {
    const Place& place = places[static_cast<std::size_t>(i)];
    const int ranks = place.clusters ? size : 1, cluster = i / ranks, rank = i % ranks;
    EXPECT_EQ(place.cluster, cluster);
    EXPECT_EQ(place.rank, rank);
    EXPECT_EQ(place.neighbour, 100 * cluster + (rank + 1) % ranks);
    EXPECT_EQ(place.before, 0);
  }
}

__global__ void write_late(volatile int* data) {
  let_next_kernel_start();
  const long long start = clock64();
  while (clock64() - start < 1000000) {}
  data[threadIdx.x] = static_cast<int>(threadIdx.x) + 3;
}
__global__ void read_after(const volatile int* data, int* to) {
  wait_for_previous_kernel();
  to[threadIdx.x] = data[threadIdx.x];
}

TEST_F(Tile, AKernelThatStartsEarlyWaitsForTheOneBefore) {
  const Shared<int> data(32), to(32);
  for (std::size_t i = 0; i < to.n; ++i) data[i] = to[i] = 0;
  enqueue({}, false, write_late, data.data);
  enqueue({}, true, read_after, data.data, to.data);
  ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  for (std::size_t i = 0; i < to.n; ++i) EXPECT_EQ(to[i], static_cast<int>(i) + 3);
}

// ---- barrier.cuh, wgmma.cuh and TMA: Hopper ----

// 64 columns of 16 bits are 128 bytes: TMA's swizzle puts 16-byte chunk c of row r at chunk c ^ r % 8 of that row.
constexpr int tile_columns = 64;
constexpr int swizzled(int row, int column) { return row * tile_columns + ((column / 8 ^ row % 8) * 8 + column % 8); }
static_assert(swizzled(0, 9) == 9 && swizzled(1, 0) == 64 + 8 && swizzled(15, 63) == 15 * 64 + 7);

CUtensorMap map_of(std::uint16_t* data, DType dtype, int rows, int columns, int tile_rows) {
  return gpu::rows_map("test", data, dtype, {rows, columns, columns}, tile_rows, tile_columns);
}

__global__ void tell_if_hopper(bool* to) {
#ifdef ROOFTILE_WGMMA
  *to = true;
#endif
}
class Hopper : public Tile {
 protected:
  void SetUp() override {
    Tile::SetUp();
    if (IsSkipped()) return;
    const Shared<bool> hopper(1);
    hopper[0] = false;
    launch(tell_if_hopper, 32, hopper.data);
    if (!hopper[0]) GTEST_SKIP() << "no Hopper, or no code for sm_90a";
  }
};

using Full = cutlass::arch::ClusterTransactionBarrier;
using Empty = cutlass::arch::ClusterBarrier;
[[maybe_unused]] constexpr auto cache_hint = static_cast<std::uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
// CUTLASS's barriers have no constructor: they are made in place.
template <class Barrier>
__device__ Barrier& barrier_at(std::uint64_t& word) {
  return reinterpret_cast<Barrier&>(word);
}

constexpr int tma_rows = 16;
// Two loads into one ring stage each, so that both parities occur; rank 0 of a cluster of two sends every tile to both.
__global__ void load_tiles(const __grid_constant__ CUtensorMap map, int column, int row, std::uint16_t* to) {
#if __CUDA_ARCH__ >= 900
  __shared__ alignas(1024) std::uint16_t tile[tma_rows * tile_columns];
  __shared__ std::uint64_t full_word, empty_word;
  const Full& full = barrier_at<Full>(full_word);
  const Empty& empty = barrier_at<Empty>(empty_word);
  const ClusterCoord at = cluster_coord();
  if (threadIdx.x == 0) {
    cute::prefetch_tma_descriptor(&map);
    full.init(1);
    empty.init(2);  // one arrival of each CTA of the cluster
    cutlass::arch::fence_barrier_init();
  }
  __syncthreads();
  sync_cluster();  // the barriers of both CTAs are initialised
  for (int round = 0; round < 2; ++round) {
    if (threadIdx.x == 0) {
      full.arrive_and_expect_tx(sizeof tile);
      if (at.rank == 0) {
        if (round > 0) wait_barrier(empty, (round - 1) % 2);  // both CTAs have read the tile of the round before
        cute::SM90_TMA_LOAD_2D::PREFETCH::copy(&map, column, row + round);
        cute::SM90_TMA_LOAD_MULTICAST_2D::copy(&map, &full_word, 3, cache_hint, tile, column, row + round);
      }
    }
    wait_barrier(full, round % 2);
    for (int i = threadIdx.x; i < tma_rows * tile_columns; i += blockDim.x)
      to[(blockIdx.x * 2 + round) * tma_rows * tile_columns + i] = tile[i];
    __syncthreads();  // all threads have read the tile -> its place may be overwritten
    if (threadIdx.x == 0) arrive_at_barrier(empty, 0);
  }
  sync_cluster();  // a CTA stays until its peer's last arrival has landed
#endif
}

TEST_F(Hopper, TilesComeSwizzledZeroFilledAndToEveryCta) {
  constexpr int rows = 20, columns = 72;  // not a multiple of a tile
  constexpr std::size_t tile = tma_rows * tile_columns;
  const Shared<std::uint16_t> from(rows * columns), to(2 * 2 * tile);
  for (std::size_t i = 0; i < from.n; ++i) from[i] = static_cast<std::uint16_t>(i + 1);
  for (const auto& [column, row] : {std::pair{0, 0}, {16, 8}}) {
    for (std::size_t i = 0; i < to.n; ++i) to[i] = 0xffff;
    launch({.ctas = 2, .threads = 128, .cluster = 2}, load_tiles,
           map_of(from.data, DType::f16, rows, columns, tma_rows), column, row, to.data);
    for (int cta = 0; cta < 2; ++cta)
      for (int round = 0; round < 2; ++round)
        for (int r = 0; r < tma_rows; ++r)
          for (int c = 0; c < tile_columns; ++c) {
            const int from_row = row + round + r, from_column = column + c;
            const bool inside = from_row < rows && from_column < columns;
            ASSERT_EQ(to[static_cast<std::size_t>(2 * cta + round) * tile + static_cast<std::size_t>(swizzled(r, c))],
                      inside ? from[static_cast<std::size_t>(from_row * columns + from_column)] : 0)
                << cta << ", " << round << ": " << r << ", " << c;
          }
  }
}

__global__ void count_copies(const uint4* from, uint4* to) {  // a barrier that completes when cp.async copies land
#if __CUDA_ARCH__ >= 900
  __shared__ uint4 shared[32];
  __shared__ std::uint64_t word;
  const Empty& full = barrier_at<Empty>(word);
  if (threadIdx.x == 0) full.init(33);  // 32 lanes' copies, and one plain arrival
  __syncwarp();
  cp_async_16(&shared[threadIdx.x], from + threadIdx.x);
  arrive_on_copies(full);
  if (threadIdx.x == 0) arrive_at_barrier(full);
  wait_barrier(full, 0);
  to[threadIdx.x] = shared[threadIdx.x ^ 1];
#endif
}

TEST_F(Hopper, ABarrierCountsCopies) {
  const Shared<uint4> from(32), to(32);
  for (std::uint32_t i = 0; i < 32; ++i) from[i] = {i + 1, 0, 0, 0};
  launch(count_copies, 32, from.data, to.data);
  for (std::uint32_t i = 0; i < 32; ++i) EXPECT_EQ(to[i].x, (i ^ 1) + 1);
}

// What one warp writes before its arrival, the other reads after the wait, and the other way round, in turns: ordinary
// accesses stay on their side of waits and arrivals.
__global__ void pass_to_and_fro(int* to) {
#if __CUDA_ARCH__ >= 900
  __shared__ int shared[32];
  __shared__ std::uint64_t full_word, empty_word;
  const Empty& full = barrier_at<Empty>(full_word);
  const Empty& empty = barrier_at<Empty>(empty_word);
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) full.init(32), empty.init(32);
  __syncthreads();
  int sum = 0;
  for (int round = 0; round < 100; ++round) {
    if (threadIdx.x < 32) {
      wait_barrier(empty, round % 2 ^ 1);  // a new barrier counts as one whose phase 1 has completed
      shared[lane] = 1000 * round + lane;
      arrive_at_barrier(full);
    } else {
      wait_barrier(full, round % 2);
      sum += shared[lane ^ 5];
      arrive_at_barrier(empty);
    }
  }
  if (threadIdx.x >= 32) to[lane] = sum;
#endif
}

TEST_F(Hopper, AccessesStayBetweenABarriersWaitAndArrival) {
  const Shared<int> to(32);
  launch({.threads = 64}, pass_to_and_fro, to.data);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(to[static_cast<std::size_t>(i)], 1000 * 4950 + 100 * (i ^ 5));
}

// D [64, N] = A [64, 64] B [64, N], A from registers: a and b are [64, 64] and [N, 64], their 64 k one swizzled TMA
// tile.
template <class T, int N>
__global__ void multiply(const __grid_constant__ CUtensorMap b, const std::uint16_t* rows_a, float* to) {
#ifdef ROOFTILE_WGMMA
  using namespace cute;
  using E = std::conditional_t<std::is_same_v<T, half>, half_t, bfloat16_t>;
  __shared__ alignas(1024) E tile_b[N * tile_columns];
  __shared__ std::uint64_t word;
  const Full& full = barrier_at<Full>(word);
  if (threadIdx.x == 0) {
    full.init(1);
    cutlass::arch::fence_barrier_init();
    full.arrive_and_expect_tx(sizeof tile_b);
    SM90_TMA_LOAD_2D::copy(&b, &word, cache_hint, tile_b, 0, 0);
  }
  __syncthreads();
  wait_barrier(full, 0);
  auto mma = make_tiled_mma(SM90::GMMA::rs_op_selector<E, E, float, Shape<_64, Int<N>, _16>>());
  auto thread = mma.get_slice(threadIdx.x);
  Tensor gA = make_tensor(make_gmem_ptr<E>(rows_a), Layout<Shape<_64, _64>, Stride<_64, _1>>{});  // (64, 64)
  Tensor gD = make_tensor(make_gmem_ptr(to), Layout<Shape<_64, Int<N>>, Stride<Int<N>, _1>>{});   // (64, N)
  Tensor sB = make_tensor(make_smem_ptr(tile_b),
                          tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<E>{}, Shape<Int<N>, _64>{}));  // (N, 64)
  Tensor rA = thread.partition_fragment_A(gA);  // (MMA, 1, MMA_K)
  Tensor rD = thread.partition_fragment_C(gD);  // (MMA, 1, 1)
  copy(thread.partition_A(gA), rA);
  mma.accumulate_ = SM90::GMMA::ScaleOut::Zero;
  warpgroup_fence_operand(rD);
  warpgroup_arrive();
  for_each(make_int_sequence<4>{}, [&](auto k) {
    gemm(mma, rA(_, _, k), thread.partition_fragment_B(sB)(_, _, k), rD);
    mma.accumulate_ = SM90::GMMA::ScaleOut::One;
  });
  warpgroup_commit_batch();
  warpgroup_wait<0>();
  warpgroup_fence_operand(rD);
  copy(rD, thread.partition_C(gD));
#endif
}

template <class T, int N>
void check_wgmma(DType dtype) {
  const auto a_at = [](int row, int k) { return static_cast<float>((row * 5 + k * 3) % 13 - 6); };
  const auto b_at = [](int column, int k) { return static_cast<float>((k * 7 + column * 2) % 11 - 5); };
  const Shared<std::uint16_t> a(64 * tile_columns), b(N * tile_columns);
  const Shared<float> product(64 * N);
  for (int k = 0; k < tile_columns; ++k) {
    for (int row = 0; row < 64; ++row)
      a[static_cast<std::size_t>(row * tile_columns + k)] = rooftile::from_float<Stored<T>>(a_at(row, k)).bits;
    for (int n = 0; n < N; ++n)
      b[static_cast<std::size_t>(n * tile_columns + k)] = rooftile::from_float<Stored<T>>(b_at(n, k)).bits;
  }
  launch({.threads = 128}, multiply<T, N>, map_of(b.data, dtype, N, tile_columns, N), a.data, product.data);
  for (int row = 0; row < 64; ++row)
    for (int n = 0; n < N; ++n) {
      float expected = 0;
      for (int k = 0; k < tile_columns; ++k) expected += a_at(row, k) * b_at(n, k);
      ASSERT_EQ(product[static_cast<std::size_t>(row * N + n)], expected) << row << ", " << n;
    }
}
TEST_F(Hopper, WgmmaOfHalf) {
  check_wgmma<half, 32>(DType::f16);
  check_wgmma<half, 64>(DType::f16);
}
TEST_F(Hopper, WgmmaOfBf16) {
  check_wgmma<bf16, 32>(DType::bf16);
  check_wgmma<bf16, 128>(DType::bf16);
}

}  // namespace
}  // namespace rooftile::tile
