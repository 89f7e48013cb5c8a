// SPDX-License-Identifier: Apache-2.0
// Block table lookup: where a cache row's tokens are.
#pragma once

#include "kernels/decode/params.h"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/scheduler.h"
#include "tile/hints.cuh"

namespace rooftile::gpu {

// Physical pages of a KV tile's token 0 and, where a tile of codes spans two pages of 16 tokens, of its token 16. The
// lookup runs one tile ahead of the copies, because it reads global memory.
struct Pages {
  int first, second;
};

// kv_page of core/kv_layout.h with the row's part computed once. table_: the row's entries of the block table, or null
// for a contiguous cache, whose pages start at first_.
template <KvFormat format>
class RowPages {
 public:
  __device__ __forceinline__ RowPages(const KvCacheView& cache, const RowWork& w, int page_shift)
      : cache_(cache),
        table_(cache.block_table ? cache.block_table + w.row * cache.table_stride : nullptr),
        first_(w.row * cache.max_pages),
        row_(w.row),
        end_(w.end),
        page_shift_(page_shift) {}

  // Branchless: a predicated load instead of a branch, so that the lookup can be scheduled among other instructions.
  template <bool Branchless = false>
  __device__ __forceinline__ Pages look_up(int token) const {
    const auto at = [&](int index) {
      if constexpr (Branchless) return tile::load_if(table_ != nullptr, table_ + index, first_ + index);
      return table_ ? table_[index] : first_ + index;
    };
    const int index = token >> page_shift_, first = at(index);
    const bool crosses = !is_element_format(format) && !is_kivi(format) && cache_.page_size == 16 && token + 16 < end_;
    return {first, crosses ? at(index + 1) : first};
  }
  // Whether both page numbers are valid. Sets the cache's fault word if not.
  __device__ __forceinline__ bool check(const Pages& at) const {
    const auto pages = static_cast<unsigned>(cache_.pages);
    if (static_cast<unsigned>(at.first) < pages && static_cast<unsigned>(at.second) < pages) return true;
    *cache_.fault = kv_fault_word(KvFault::page, row_);
    return false;
  }

 private:
  const KvCacheView& cache_;
  const std::int32_t* table_;
  int first_, row_, end_, page_shift_;
};

}  // namespace rooftile::gpu
