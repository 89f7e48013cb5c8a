// SPDX-License-Identifier: Apache-2.0
// Merges the nodes that split_kv left of tasks that several blocks shared, and answers rows that see nothing.
//   node_o [blocks, slots, 8, D], node_ml [blocks, slots, 8, 2] -> out, lse
// One block a column of a task, one thread a value. It finds the task's nodes by the arithmetic of schedule.h and folds
// them in the order in which one block would have. Bytes: 4 (D + 2) a node; latency is the roof, so eight nodes are
// fetched before the first is folded.
#pragma once

#include "kernels/decode/fold.cuh"
#include "kernels/decode/queries.cuh"

namespace rooftile::gpu {

template <class T, int D>
__global__ __launch_bounds__(D) void combine(const __grid_constant__ DecodeParams p) {
  __shared__ FoldMemory<1, D, D> memory;
  const int used = min(columns, static_cast<int>(p.q_per_kv * p.q.shape[1])), d = threadIdx.x;
  const std::int64_t index = blockIdx.x / used;
  const int column = blockIdx.x % used, per_row = p.cache.kv_heads * p.passes;
  const int b = static_cast<int>(index / per_row), in_row = static_cast<int>(index % per_row);
  const Task task{b, in_row / p.passes, in_row % p.passes};
  const RowWork w = row_work_of(p, b);
  if (w.fault != KvFault::none) return;
  const int leaves = w.all_leaves();
  const auto write = [&](float m, float l, float value) {
    const float o[1] = {value};
    write_result<T>(p, task, w, column, d, d == 0, m, l, o);
  };
  if (leaves == 0) return write(-INFINITY, 0.0f, 0.0f);

  const Split split(p.row_begin[p.q.shape[0]], p.blocks);
  const std::int64_t base = p.row_begin[b] + in_row * w.task_units();
  const int first_block = split.owner(base), last_block = split.owner(base + w.leaf_begin(leaves - 1));
  if (first_block == last_block) return;   // that block wrote the result

  Fold<1, D, D> fold(memory, d, d, 0);
  constexpr int batch = 8;
  struct Place {
    int at, level;
  } places[batch];
  Node<1> nodes[batch];
  int block = first_block, at = 0, end = 0, slot = 0;
  while (at < leaves) {
    int fetched = 0;
#pragma unroll
    for (int i = 0; i < batch; ++i) {
      while (at == end && at < leaves) {   // the next block's run
        end = min(leaves, w.leaf_from(split.begin(block + 1) - base));
        slot = block * slots_per_block + (at > 0 ? 0 : slots_inside);
        ++block;
      }
      if (at >= leaves) break;
      const int level = node_level(at, end);
      const std::int64_t from = std::int64_t{slot++} * columns + column;
      const float2 ml = *reinterpret_cast<const float2*>(p.node_ml + from * 2);
      nodes[i] = {ml.x, ml.y, {p.node_o[from * D + d]}};
      places[i] = {at, level};
      at += 1 << level;
      ++fetched;
    }
#pragma unroll
    for (int i = 0; i < batch; ++i)
      if (i < fetched) fold.push(nodes[i], places[i].at, places[i].level, [](const Node<1>&) {});
  }
  const Node<1> result = fold.finish();
  write(result.m, result.l, result.o[0]);
}

}  // namespace rooftile::gpu
