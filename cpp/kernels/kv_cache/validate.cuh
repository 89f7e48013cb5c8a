// SPDX-License-Identifier: Apache-2.0
// Validation of a batch entry on the device: row, count, length, block-table entries and positions lie in device
// memory, where the host cannot check them.
#pragma once

#include "kernels/kv_cache/params.h"
#include "tile/strided_rows.cuh"

namespace rooftile::gpu {

struct AppendEntry {
  int row;                        // as the caller gave it
  int tokens;                     // as the caller gave it; 0 after validate if nothing is to be stored
  int length = 0;                 // tokens stored before this call
  KvFault fault = KvFault::none;  // found by this thread alone; the other members are equal in all threads of the CTA
};

__device__ __forceinline__ std::int64_t position_of(const RopeTables& r, int b, int token) {
  const std::int64_t at = b * r.position_batch + token * r.position_token;
  return tile::load_integer(r.positions, at, r.int64_positions);
}

__device__ __forceinline__ AppendEntry load_entry(const AppendParams& p, int b) {
  return {.row = p.rows ? p.rows[b] : b, .tokens = p.counts ? p.counts[b] : p.tokens};
}

__device__ __forceinline__ void validate(const AppendParams& p, int b, AppendEntry& e) {
  const KvCacheView& c = p.c;
  const int tokens = e.tokens;
  e.tokens = 0;
  if (e.row < 0 || e.row >= c.max_rows) {
    e.fault = KvFault::row;
    return;
  }
  if (tokens < 0 || tokens > p.tokens) {
    e.fault = KvFault::count;
    return;
  }
  const int length = tokens == 0 ? 0 : c.lengths[e.row];  // the load overlaps with the checks of positions and rows
  if (p.rope.cos)
    for (int i = threadIdx.x; i < p.tokens; i += blockDim.x) {
      const std::int64_t position = position_of(p.rope, b, i);
      if (position < 0 || position >= p.rope.max_position) e.fault = KvFault::position;
    }
  if (tokens == 0) return;  // a padding entry; its row may be one that another entry writes
  bool twice = false;
  if (p.rows)
    for (int i = threadIdx.x; i < p.batch; i += blockDim.x)
      twice = twice || (i != b && p.rows[i] == e.row && (!p.counts || p.counts[i] != 0));
  e.tokens = tokens;
  e.length = length;
  const int capacity = c.max_pages << p.log2_page_size;  // fits 32 bits: ops have checked this
  if (length < 0 || length > capacity) {
    e.fault = KvFault::length;
    return;
  }
  if (tokens > capacity - length) {
    e.fault = KvFault::capacity;
    return;
  }
  if (c.block_table)
    for (int i = (length >> p.log2_page_size) + threadIdx.x; i <= (length + tokens - 1) >> p.log2_page_size;
         i += blockDim.x) {
      const int page = c.block_table[e.row * c.table_stride + i];
      if (page < 0 || page >= c.pages) e.fault = KvFault::page;
    }
  if (twice) e.fault = KvFault::twice;
}

// Called by all threads of one CTA of the entry. For an invalid row the fault word holds the batch entry b in place of
// the row.
__device__ __forceinline__ void report_fault(const AppendParams& p, const AppendEntry& e, int b) {
  if (e.fault != KvFault::none && p.c.fault)
    *p.c.fault = kv_fault_word(e.fault, static_cast<std::int32_t>(e.fault == KvFault::row ? b : e.row));
}

}  // namespace rooftile::gpu
