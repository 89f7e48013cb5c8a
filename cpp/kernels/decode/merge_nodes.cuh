// SPDX-License-Identifier: Apache-2.0
// The end of a task that several blocks shared: the block that owns its last leaf waits for the others' nodes, merges them
// all and writes the result.
//   node_o [blocks, slots, 8, D], node_ml [blocks, slots, 8] -> out, lse
// It finds the nodes by the arithmetic of schedule.h, a thread a leaf. A warp a column works out the tree's (m, l) and the
// weights of every merge, while the first values are on their way; then a thread holds four values of a column and runs the
// merges, 16 leaves at a time. Leaves that are not there are empty states, and a node that came merged meets empty ones: both
// change no bit. So the tree is the fold's.
// Bytes: 4 (D + 4) a node and column, at most 65 nodes. Latency is the roof: the marks, the values, the merges.
//
// Sync: a block stores its nodes' values, meets at a barrier, and behind a fence stores their (m, l) with marks. The merger's
// threads acquire marks until all are there, meet, and only then read values. It waits for blocks of lower index alone, which
// run or have run when it runs: no block waits for one that needs its place. The merger takes the marks back, so that each call
// leaves none, and memory that holds anything else beforehand says "not yet".
#pragma once

#include "kernels/decode/fold.cuh"
#include "kernels/decode/queries.cuh"

namespace rooftile::gpu {

inline constexpr int decode_warps = 4, decode_threads = 32 * decode_warps;

__device__ __forceinline__ void store_marked(MarkedNode* to, float m, float l) {   // behind a fence
  const auto word = [](std::uint32_t mark, float x) { return static_cast<unsigned long long>(mark) << 32 | __float_as_uint(x); };
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(&to->m), "l"(word(MarkedNode::mark_m, m)) : "memory");
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(&to->l), "l"(word(MarkedNode::mark_l, l)) : "memory");
}
__device__ __forceinline__ MarkedNode load_marked(const MarkedNode* from) {
  MarkedNode x;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x.m) : "l"(&from->m) : "memory");
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(x.l) : "l"(&from->l) : "memory");
  return x;
}

struct MergeMemory {
  float m[columns][max_leaves + 1], l[columns][max_leaves + 1];
  int node[max_leaves + 1], level[max_leaves + 1];   // of the node that starts at a leaf; -1: none does
  float2 weights[columns][max_leaves];               // node (level, i) at level_at(level) + i; last of the leaf behind the tree
  __device__ __forceinline__ static constexpr int level_at(int level) { return max_leaves - (max_leaves >> (level - 1)); }
};

__device__ __forceinline__ float4 merge_four(const float4& a, const float4& b, const float2& weights) {
  const tile::MergeWeights w{0.0f, weights.x, weights.y};
  return make_float4(tile::merge_values(a.x, b.x, w), tile::merge_values(a.y, b.y, w), tile::merge_values(a.z, b.z, w), tile::merge_values(a.w, b.w, w));
}

// Levels 1 to 4 of the tree over 16 leaves. weights: of the column; chunk: of 16 leaves.
template <int Level = 1>
__device__ __forceinline__ float4 merge_chunk(float4 (&x)[16], const float2* weights, int chunk) {
#pragma unroll
  for (int i = 0; i < 16 >> Level; ++i)
    x[i << Level] = merge_four(x[i << Level], x[(i << Level) + (1 << (Level - 1))], weights[MergeMemory::level_at(Level) + chunk * (16 >> Level) + i]);
  if constexpr (Level < 4) return merge_chunk<Level + 1>(x, weights, chunk);
  else return x[0];
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

// The (m, l) of all nodes, from memory to shared memory, when they are there. False: of one a page was none.
__device__ __forceinline__ bool fetch_statistics(const DecodeParams& p, MergeMemory& shared, int leaves, int used) {
  constexpr int each = ((max_leaves + 1) * columns + decode_threads - 1) / decode_threads;
  MarkedNode* from[each];
#pragma unroll
  for (int i = 0; i < each; ++i) {
    const int at = i * decode_threads + threadIdx.x, leaf = at / columns, column = at % columns;
    from[i] = leaf < leaves && column < used && shared.level[leaf] >= 0 ? p.node_ml + shared.node[leaf] + column : nullptr;
  }
  unsigned waits = 0;
#pragma unroll
  for (int i = 0; i < each; ++i) waits |= from[i] ? 1u << i : 0u;
  bool bad = false;
  while (waits) {
    MarkedNode x[each];
#pragma unroll
    for (int i = 0; i < each; ++i)
      if (waits >> i & 1) x[i] = load_marked(from[i]);
#pragma unroll
    for (int i = 0; i < each; ++i)
      if ((waits >> i & 1) && x[i].m >> 32 == MarkedNode::mark_m && x[i].l >> 32 == MarkedNode::mark_l) {
        const int at = i * decode_threads + threadIdx.x, leaf = at / columns, column = at % columns;
        const float l = __uint_as_float(static_cast<std::uint32_t>(x[i].l));
        shared.m[column][leaf] = __uint_as_float(static_cast<std::uint32_t>(x[i].m));
        shared.l[column][leaf] = l;
        bad |= l < 0.0f;
        *from[i] = {0, 0};
        waits &= ~(1u << i);
      }
  }
  return !__syncthreads_or(bad);   // all nodes are there
}

// base: the task's first unit. All threads of the block that owns its last leaf, which has marked its own nodes as well.
template <class T, int D>
__device__ __forceinline__ void merge_nodes(const DecodeParams& p, MergeMemory& shared, const Task& task, const RowWork& w, const Split& split, int base) {
  const int thread = threadIdx.x, lane = thread % 32, leaves = w.all_leaves();
  if (thread <= max_leaves) {
    int at = 0, slot = 0, level = -1;
    if (thread < leaves) {
      const int block = split.owner(base + w.leaf_begin(thread)), end = min(leaves, w.leaf_from(split.begin(block + 1) - base));
      at = w.leaf_from(split.begin(block) - base);
      slot = block * slots_per_block + (at > 0 ? 0 : slots_inside);
      level = node_level(at, end);
      for (; at < thread; ++slot) {
        at += 1 << level;
        level = at < end ? node_level(at, end) : 0;
      }
      if (at != thread) level = -1;
    }
    shared.level[thread] = level;
    shared.node[thread] = level < 0 ? -1 : slot * columns;
#pragma unroll
    for (int column = 0; column < columns; ++column) {
      shared.m[column][thread] = -INFINITY;
      shared.l[column][thread] = 0.0f;
    }
  }
  __syncthreads();   // the places of the nodes are known
  const int used = min(columns, p.q_per_kv * p.tokens - task.pass * columns);
  if (!fetch_statistics(p, shared, leaves, used)) return;   // whoever met the page has said so

  constexpr int threads_of_column = D / 4, columns_at_once = decode_threads / threads_of_column;
  const int d = thread % threads_of_column * 4;
  const auto load = [&](int leaf, int column) {
    const int node = column < used ? shared.node[leaf] : -1;
    return node < 0 ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : __ldcg(reinterpret_cast<const float4*>(p.node_o + (std::int64_t{node} + column) * D + d));
  };
  const auto load_chunk = [&](float4 (&x)[16], int chunk, int column) {
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i] = load(16 * chunk + i, column);
  };
  int column = thread / threads_of_column;
  float4 even[16], odd[16];   // leaves of a chunk with an even and with an odd number
  load_chunk(even, 0, column);
  const int in_tree = min(leaves, max_leaves), chunks = (in_tree + 15) / 16, levels = chunks == 1 ? 4 : chunks == 2 ? 5 : 6;
  const bool behind = leaves > max_leaves;
  for (int c = thread / 32; c < used; c += decode_warps) merge_statistics(shared, c, levels, behind, lane);
  __syncthreads();   // the weights are there
  for (; column < used; column += columns_at_once) {
    const float2* weights = shared.weights[column];
    float4 node, half;   // of 32 leaves, and the first such
    for (int chunk = 0; chunk < chunks; chunk += 2) {
      const bool two = chunk + 1 < chunks, more = chunk + 2 < chunks;
      if (two) load_chunk(odd, chunk + 1, column);
      node = merge_chunk(even, weights, chunk);
      if (more) load_chunk(even, chunk + 2, column);
      if (two) {
        const float4 right = merge_chunk(odd, weights, chunk + 1);
        node = merge_four(node, right, weights[MergeMemory::level_at(5) + chunk / 2]);
      } else if (levels > 4) {
        node = merge_four(node, make_float4(0.0f, 0.0f, 0.0f, 0.0f), weights[MergeMemory::level_at(5) + chunk / 2]);
      }
      if (chunk == 0) half = node;
    }
    if (column + columns_at_once < used) load_chunk(even, 0, column + columns_at_once);
    if (levels == 6) node = merge_four(half, node, weights[MergeMemory::level_at(6)]);
    if (behind) node = merge_four(node, load(max_leaves, column), weights[max_leaves - 1]);
    const float o[4] = {node.x, node.y, node.z, node.w};
    write_result<T>(p, task, w, column, d, d == 0, shared.m[column][0], shared.l[column][0], o);
  }
}

}  // namespace rooftile::gpu
