// SPDX-License-Identifier: Apache-2.0
// The end of a task that several blocks shared: the block that owns its last leaf waits for the others' nodes, folds them all
// and writes the result.
//   node_o [blocks, slots, 8, D], node_ml [blocks, slots, 8, 2], ready [blocks, 2] -> out, lse
// It finds the nodes by the arithmetic of schedule.h, a thread a leaf. Then each thread fetches and folds four values of a
// column, for itself: the fold of fold.cuh, with nodes in place of leaves.
// Bytes: 4 (D + 2) a node and column, at most 65 nodes. Latency is the roof: the flags, then the nodes.
//
// Sync: a block stores its nodes, meets at a barrier, and one thread releases the flag of its run. The merger's threads acquire
// the flags, meet, and only then read nodes. It waits for blocks of lower index alone, which run or have run when it runs: no
// block waits for one that needs its place. The merger takes the flags back, so that each call leaves none, and memory that
// holds anything else beforehand says "not yet".
#pragma once

#include "kernels/decode/fold.cuh"
#include "kernels/decode/queries.cuh"

namespace rooftile::gpu {

inline constexpr int decode_warps = 4, decode_threads = 32 * decode_warps;

// What a flag holds when its nodes are there: a number that no memory holds by chance.
inline constexpr unsigned long long nodes_are_there = 0x9e6c63d0876a5f3bull;
// The flags of a block: of a run inside a task, and of one that starts a task (the two kinds of slots, schedule.h).
__device__ __forceinline__ unsigned long long* ready_flag(const DecodeParams& p, int block, bool starts) { return p.ready + 2 * block + starts; }

// One thread's, behind a barrier that all threads with nodes have met.
__device__ __forceinline__ void release_nodes(unsigned long long* flag) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(nodes_are_there) : "memory");
}
__device__ __forceinline__ void wait_for_nodes(const unsigned long long* flag) {
  unsigned long long seen;
  do asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(seen) : "l"(flag) : "memory");
  while (seen != nodes_are_there);
}

// In `bytes` of shared memory: where nodes start, and what the threads have fetched of them, each for itself.
template <std::size_t Bytes>
struct MergeMemory {
  static constexpr int places = static_cast<int>((Bytes - 768) / (decode_threads * (sizeof(float4) + sizeof(float2))));
  float4 o[places][decode_threads];
  float2 ml[places][decode_threads];
  int node[max_leaves + 1], level[max_leaves + 1];   // of the node that starts at a leaf; level -1: none does
};

// base: the task's first unit. All threads of the block that owns its last leaf.
template <class T, int D, class Memory>
__device__ __forceinline__ void merge_nodes(const DecodeParams& p, Memory& shared, FoldMemory<4, decode_threads, columns>& fold_memory,
                                            const Task& task, const RowWork& w, const Split& split, int base) {
  const int thread = threadIdx.x, leaves = w.all_leaves();
  unsigned long long* flag = nullptr;
  if (thread < leaves) {
    const int block = split.owner(base + w.leaf_begin(thread)), end = min(leaves, w.leaf_from(split.begin(block + 1) - base));
    int at = w.leaf_from(split.begin(block) - base);
    const bool starts = at == 0;
    int slot = block * slots_per_block + (starts ? slots_inside : 0), level = node_level(at, end);
    for (; at < thread; ++slot) {
      at += 1 << level;
      level = at < end ? node_level(at, end) : 0;
    }
    shared.level[thread] = at == thread ? level : -1;
    shared.node[thread] = slot * columns;
    if (at == thread && block != static_cast<int>(blockIdx.x)) {
      flag = ready_flag(p, block, starts);
      wait_for_nodes(flag);
    }
  }
  __syncthreads();   // the places of the nodes are known, and all of them are there
  if (flag) *flag = 0;

  constexpr int threads_of_column = D / 4;
  const int used = min(columns, p.q_per_kv * p.tokens - task.pass * columns), d = thread % threads_of_column * 4;
  for (int first_column = 0; first_column < used; first_column += decode_threads / threads_of_column) {
    const int column = first_column + thread / threads_of_column;
    if (first_column + thread / 32 * 32 / threads_of_column >= used) break;   // a warp without a column that is no padding
    Fold<4, decode_threads, columns> fold(fold_memory, p.fold + std::int64_t{blockIdx.x} * deep_levels * columns * D, thread, column, 0);
    bool bad = false;
    for (int first = 0, next; first < leaves; first = next) {
      int fetched = 0;
      for (next = first; next < leaves && fetched < Memory::places; ++next) {
        if (shared.level[next] < 0) continue;
        const std::int64_t at = std::int64_t{shared.node[next]} + column;
        tile::cp_async_16(&shared.o[fetched][thread], p.node_o + at * D + d);
        tile::cp_async_8(&shared.ml[fetched][thread], p.node_ml + at * 2);
        ++fetched;
      }
      cute::cp_async_fence();
      cute::cp_async_wait<0>();
      fetched = 0;
      for (int leaf = first; leaf < next; ++leaf) {
        const int level = shared.level[leaf];
        if (level < 0) continue;
        const float4 o = shared.o[fetched][thread];
        const float2 ml = shared.ml[fetched][thread];
        ++fetched;
        bad |= ml.y < 0.0f;
        fold.push({ml.x, ml.y, {o.x, o.y, o.z, o.w}}, leaf, level, [](const auto&) {});
      }
    }
    const Node<4> result = fold.finish();
    if (!bad) write_result<T>(p, task, w, column, d, d == 0, result.m, result.l, result.o);   // else a page was none, and whoever met it has said so
  }
}

}  // namespace rooftile::gpu
