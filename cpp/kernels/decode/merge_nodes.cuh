// SPDX-License-Identifier: Apache-2.0
// The end of a task that several blocks shared: the block that owns its last leaf waits for the others' nodes, merges them
// all and writes the result.
//   node_o [blocks, slots, 8, D], node_ml [blocks, slots, 8, 2], ready [blocks, 2] -> out, lse
// It finds the nodes by the arithmetic of schedule.h, a thread a leaf. A warp a column works out the tree's (m, l) and the
// weights of every merge; then a thread holds four values of a column and runs the merges, 16 leaves at a time. Leaves that
// are not there are empty states, and a node that came merged meets empty ones: both change no bit. So the tree is the fold's.
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

struct MergeMemory {
  float m[columns][max_leaves + 1], l[columns][max_leaves + 1];
  int node[max_leaves + 1], level[max_leaves + 1];   // of the node that starts at a leaf; -1: none does
  float2 weights[columns][max_leaves];        // node (level, i) at 64 - (64 >> (level - 1)) + i; then the leaf behind the tree
  // Where the weights of a level begin.
  __device__ __forceinline__ static constexpr int level_at(int level) { return max_leaves - (max_leaves >> (level - 1)); }
};

__device__ __forceinline__ float4 merge_four(const float4& a, const float4& b, const float2& weights) {
  const tile::MergeWeights w{0.0f, weights.x, weights.y};
  return make_float4(tile::merge_values(a.x, b.x, w), tile::merge_values(a.y, b.y, w), tile::merge_values(a.z, b.z, w), tile::merge_values(a.w, b.w, w));
}

// Levels 1 to 4 of the tree over 16 leaves, in place; the result is x[0]. weights: of the column; chunk: of 16 leaves.
template <int Level = 1>
__device__ __forceinline__ void merge_chunk(float4 (&x)[16], const float2* weights, int chunk) {
  if constexpr (Level <= 4) {
#pragma unroll
    for (int i = 0; i < 16 >> Level; ++i)
      x[i << Level] = merge_four(x[i << Level], x[(i << Level) + (1 << (Level - 1))], weights[MergeMemory::level_at(Level) + chunk * (16 >> Level) + i]);
    merge_chunk<Level + 1>(x, weights, chunk);
  }
}

// The (m, l) of one column's tree and the weights of its merges; a warp's work. levels: of the tree that have leaves.
__device__ __forceinline__ void merge_statistics(MergeMemory& shared, int column, int levels, bool behind, int lane) {
  // After step `level` lane i holds node (level, i).
  float m = 0.0f, l = 0.0f;
  for (int level = 1; level <= levels; ++level) {
    const int start = min(lane << level, max_leaves);
    const float m_a = level == 1 ? shared.m[column][2 * lane] : __shfl_sync(0xffffffffu, m, 2 * lane % 32);
    const float l_a = level == 1 ? shared.l[column][2 * lane] : __shfl_sync(0xffffffffu, l, 2 * lane % 32);
    const float m_b = level == 1 ? shared.m[column][2 * lane + 1] : __shfl_sync(0xffffffffu, m, (2 * lane + 1) % 32);
    const float l_b = level == 1 ? shared.l[column][2 * lane + 1] : __shfl_sync(0xffffffffu, l, (2 * lane + 1) % 32);
    if (lane < max_leaves >> level) {
      tile::MergeWeights merge{shared.m[column][start], 1.0f, 0.0f};
      l = shared.l[column][start];
      if (shared.level[start] < level) {   // did not come merged
        merge = tile::merge_weights(m_a, m_b);
        l = tile::merge_values(l_a, l_b, merge);
      }
      m = merge.m;
      shared.weights[column][MergeMemory::level_at(level) + lane] = make_float2(merge.a, merge.b);
    }
  }
  if (lane != 0) return;
  if (behind) {
    const tile::MergeWeights merge = tile::merge_weights(m, shared.m[column][max_leaves]);
    l = tile::merge_values(l, shared.l[column][max_leaves], merge);
    m = merge.m;
    shared.weights[column][max_leaves - 1] = make_float2(merge.a, merge.b);
  }
  shared.m[column][0] = m;
  shared.l[column][0] = l;
}

// base: the task's first unit. All threads of the block that owns its last leaf.
template <class T, int D>
__device__ __forceinline__ void merge_nodes(const DecodeParams& p, MergeMemory& shared, const Task& task, const RowWork& w, const Split& split, int base) {
  const int thread = threadIdx.x, lane = thread % 32, leaves = w.all_leaves();
  unsigned long long* flag = nullptr;
  if (thread <= max_leaves) {
    int at = 0, slot = 0, level = -1;
    if (thread < leaves) {
      const int block = split.owner(base + w.leaf_begin(thread)), end = min(leaves, w.leaf_from(split.begin(block + 1) - base));
      at = w.leaf_from(split.begin(block) - base);
      const bool starts = at == 0;
      slot = block * slots_per_block + (starts ? slots_inside : 0);
      level = node_level(at, end);
      for (; at < thread; ++slot) {
        at += 1 << level;
        level = at < end ? node_level(at, end) : 0;
      }
      if (at != thread) level = -1;
      if (level >= 0 && block != static_cast<int>(blockIdx.x)) {
        flag = ready_flag(p, block, starts);
        wait_for_nodes(flag);
      }
    }
    shared.level[thread] = level;
    shared.node[thread] = level < 0 ? -1 : slot * columns;
  }
  __syncthreads();   // the places of the nodes are known, and all of them are there
  if (flag) *flag = 0;

  const int used = min(columns, p.q_per_kv * p.tokens - task.pass * columns);
  constexpr int all = columns * (max_leaves + 1);
  bool bad = false;
#pragma unroll
  for (int i = 0; i < (all + decode_threads - 1) / decode_threads; ++i) {
    const int at = i * decode_threads + thread, column = at / (max_leaves + 1), leaf = at % (max_leaves + 1);
    if (column >= used) break;
    const int node = shared.node[leaf];
    const float2 ml = node < 0 ? make_float2(-INFINITY, 0.0f) : __ldcg(reinterpret_cast<const float2*>(p.node_ml + (std::int64_t{node} + column) * 2));
    shared.m[column][leaf] = ml.x;
    shared.l[column][leaf] = ml.y;
    bad |= ml.y < 0.0f;
  }
  if (__syncthreads_or(bad)) return;   // a page was none, and whoever met it has said so

  const int in_tree = min(leaves, max_leaves), chunks = (in_tree + 15) / 16, levels = chunks == 1 ? 4 : chunks == 2 ? 5 : 6;
  const bool behind = leaves > max_leaves;
  for (int column = thread / 32; column < used; column += decode_warps) merge_statistics(shared, column, levels, behind, lane);
  __syncthreads();   // the weights are there
  constexpr int threads_of_column = D / 4;
  const int d = thread % threads_of_column * 4;
  for (int column = thread / threads_of_column; column < used; column += decode_threads / threads_of_column) {
    const float2* weights = shared.weights[column];
    const auto load = [&](int leaf) {
      const int node = shared.node[leaf];
      return node < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : __ldcg(reinterpret_cast<const float4*>(p.node_o + (std::int64_t{node} + column) * D + d));
    };
    float4 left, right, half;   // nodes of 16, 16 and 32 leaves
    for (int chunk = 0; chunk < chunks; ++chunk) {
      float4 x[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) x[i] = load(16 * chunk + i);
      merge_chunk(x, weights, chunk);
      if (chunk % 2 == 0) left = x[0];
      else right = x[0];
      if (chunk % 2 == 0 && chunk + 1 == chunks) right = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (levels > 4 && (chunk % 2 == 1 || chunk + 1 == chunks)) left = merge_four(left, right, weights[MergeMemory::level_at(5) + chunk / 2]);
      if (chunk == 1) half = left;
    }
    if (levels == 6) left = merge_four(half, left, weights[MergeMemory::level_at(6)]);
    if (behind) left = merge_four(left, load(max_leaves), weights[max_leaves - 1]);
    const float o[4] = {left.x, left.y, left.z, left.w};
    write_result<T>(p, task, w, column, d, d == 0, shared.m[column][0], shared.l[column][0], o);
  }
}

}  // namespace rooftile::gpu
