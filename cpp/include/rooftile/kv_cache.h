// SPDX-License-Identifier: Apache-2.0
// The KV cache of one layer, contiguous or paged, in any format (docs/guide/cache-formats.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "rooftile/context.h"
#include "rooftile/kv_format.h"
#include "rooftile/tensor.h"

namespace rooftile {

constexpr const char* name(KvFormat f) { return kv_format_traits(f).name; }
KvFormat kv_format_from_name(const char* op, const char* text);  // throws a value error that lists the formats

// Bytes that one (page, KV head) block takes: codes of K, codes of V, then their scales and minima. head_dim 1 to 512.
std::size_t kv_block_bytes(KvFormat f, int page_size, int head_dim, const char* op = "KVCache");

// Faults that a kernel finds in arrays the host does not read.
enum class KvFault : std::int32_t {
  none,
  row,       // rows[b] is no row of the cache
  length,    // the stored length is outside [0, capacity]
  capacity,  // the new tokens do not fit
  count,     // counts[b] is outside [0, T]
  page,      // block_table names a page outside the pool
  raw,       // an earlier truncate removed raw tokens that the call needs
  position,  // a position is outside the cos and sin tables
  twice,     // rows names a row twice
};
// Replaces a fault once the host has raised it. The failed call left its row unchanged, so lengths may be smaller than
// an allocator expects.
inline constexpr std::int32_t kv_fault_raised = -1;
// The fault word of a cache: the fault and its row, or the batch entry whose row is no row of the cache.
constexpr std::int32_t kv_fault_word(KvFault fault, std::int32_t row) {
  return static_cast<std::int32_t>(fault) + 16 * row;
}
constexpr KvFault kv_fault_of(std::int32_t word) { return static_cast<KvFault>(word % 16); }
constexpr std::int32_t kv_fault_row(std::int32_t word) { return word / 16; }

// One layer's cache. All pointers lie on `device`. Token p of row r is at page offset p % page_size of page
// block_table[r][p / page_size]. Bytes of (page, head) start at  base + page * page_stride + head * head_stride.
struct KvCacheView {
  KvFormat format = KvFormat::fp16;
  DType dtype = DType::f16;  // of q, k and v; the kivi formats keep the open group in it
  Device device;
  int pages = 0, page_size = 0, kv_heads = 0, head_dim = 0;
  int max_rows = 0, max_pages = 0;  // max_pages: pages a row can have

  struct Plane {                 // K or V
    std::byte* codes = nullptr;  // 16- and 32-bit formats: the elements themselves
    std::byte* scale = nullptr;  // null where the format has none
    std::byte* min = nullptr;
    std::int64_t page_stride = 0, head_stride = 0;  // bytes, for codes, scale and min alike
    std::int64_t token_stride = 0;                  // bytes; element formats only
  };
  Plane k, v;

  const std::int32_t* block_table = nullptr;  // null: page i of row r is r * max_pages + i (contiguous)
  std::int64_t table_stride = 0;              // elements between rows of block_table
  std::int32_t* lengths = nullptr;            // [max_rows] tokens stored

  // kivi formats: the newest `ring_size` raw tokens of every row, token p at p % ring_size.
  std::byte *ring_k = nullptr, *ring_v = nullptr;  // [max_rows, kv_heads, ring_size, head_dim]
  int ring_size = 0;
  std::int32_t* raw_from = nullptr;  // [max_rows] first position whose raw value the ring still holds

  // GPU caches: one int32 that host and device both reach. A kernel that finds an invalid row, length or page
  // leaves the row unchanged and writes a kv_fault_word here; the next call on the cache raises the fault.
  volatile std::int32_t* fault = nullptr;

  constexpr std::int64_t capacity() const { return std::int64_t{max_pages} * page_size; }
};

// The arrays of one cache as somebody allocated them.
struct KvCacheArrays {
  TensorView pool;            // quantised formats: uint8 [pages, kv_heads, kv_block_bytes], any outer strides
  TensorView k_pool, v_pool;  // element formats: [pages, page_size, kv_heads, head_dim] each, last stride 1
  TensorView block_table;     // int32 [max_rows, max_pages]; absent: page i of row r is r * max_pages + i
  TensorView lengths;         // int32 [max_rows]
  TensorView ring_k, ring_v;  // kivi formats: [max_rows, kv_heads, 64, head_dim] in the cache's dtype, contiguous
  TensorView raw_from;        // kivi formats: int32 [max_rows]
  TensorView fault;           // GPU caches: int32 [1] in pinned host memory
};
struct KvCacheShape {
  KvFormat format = KvFormat::fp16;
  DType dtype = DType::f16;
  std::int64_t page_size = 0, kv_heads = 0, head_dim = 0, max_rows = 0, max_pages = 0;
};
// Checks every array against the shape and puts the view together. op: whose name errors begin with.
KvCacheView kv_cache_view(const KvCacheShape&, const KvCacheArrays&, const char* op = "KVCache");

// k, v [B, T, kv_heads, head_dim]; row b's first counts[b] tokens (all T without counts) go to cache row rows[b]
// (b without rows). Advances the lengths. Raises before anything is written when a row would pass its capacity.
KernelName kv_append(const Context&, const KvCacheView&, TensorView k, TensorView v, TensorView rows,
                     TensorView counts);

// Waits for earlier work on the stream and raises the fault a kernel found. index, if given, must be valid for
// kv_reorder. Used before a change of several steps, so that a refusal comes before the first step.
void kv_check(const char* op, const Context&, const KvCacheView&, TensorView index);

// Sets lengths. rows, lengths int32 [n] on the host. Per-token formats take any smaller length; kivi formats a
// multiple of 32, or up to 16 tokens back (the ring still holds them). raw_from follows.
void kv_truncate(const Context&, const KvCacheView&, TensorView rows, TensorView lengths);

// Empties the given rows, int32 [n] on the host, or all: what they hold is not looked at.
void kv_reset(const Context&, const KvCacheView&, TensorView rows);

// Row i becomes what row index[i] was, for all rows at once (beam search); index int32 [max_rows] on the host.
// move_pages: the pages' bytes move too (contiguous). Without it only ring, raw_from and length move: a paged cache is
// reordered by its page table, in the allocator of the Python layer.
void kv_reorder(const Context&, const KvCacheView&, TensorView index, bool move_pages);

// dst's pages from first_page up to the last that src's length needs, its ring, raw_from and length become copies of
// src's. Pages before first_page are shared by the two rows' tables, or the caller's affair.
void kv_copy_row(const Context&, const KvCacheView&, int src, int dst, int first_page);

// Page dst[i] becomes a copy of page src[i] for i in order; both int32 [n] on the host (copy on write of shared pages).
void kv_copy_pages(const Context&, const KvCacheView&, TensorView src, TensorView dst);

// K and V of row `row` as the query at position `at` sees them, fp32 [min(at + 1, length), kv_heads, head_dim] each:
// codes for the groups that were full before `at`, raw values for its own group. at = length: the token to come.
// op: what error messages begin with.
void kv_dequantize(const Context&, const KvCacheView&, int row, std::int64_t at, TensorView out_k, TensorView out_v,
                   const char* op = "dequantize");

// The stored codes in logical order, int8 [tokens, kv_heads, head_dim] (tokens: whole groups for kivi formats). fp8:
// uint8, the bits of an E4M3 number.
void kv_dump_codes(const Context&, const KvCacheView&, int row, TensorView out_k, TensorView out_v);
// The stored scales or minima in logical order, fp32: per-token formats [tokens, kv_heads, 1];
// K of a kivi format [groups, kv_heads, head_dim]. NaN marks a group that held a NaN or an infinity.
enum class KvSide : std::uint8_t { k, v };
void kv_dump_scales(const Context&, const KvCacheView&, int row, KvSide side, bool minima, TensorView out);

}  // namespace rooftile
