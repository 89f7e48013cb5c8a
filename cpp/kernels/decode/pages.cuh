// SPDX-License-Identifier: Apache-2.0
// Where a row's tokens lie.
#pragma once

#include "kernels/decode/params.h"
#include "kernels/decode/queries.cuh"
#include "kernels/decode/scheduler.h"

namespace rooftile::gpu {

// The pages of a tile's first token and, where codes may cross a page, of its seventeenth. Looked up a tile ahead of
// their use: the lookup is a read of global memory.
struct Pages {
  int first, second;
};

// kv_page of core/kv_layout.h, its part of the row done once: the row's part of the block table, or null and the number
// of its first page.
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

  // Branchless: for where the lookup is among much else.
  template <bool Branchless = false>
  __device__ __forceinline__ Pages look_up(int token) const {
    const auto at = [&](int index) {
      if constexpr (!Branchless) return table_ ? table_[index] : first_ + index;
      int page = first_ + index;
      asm volatile("{\n.reg .pred given;\nsetp.ne.u64 given, %1, 0;\n@given ld.global.b32 %0, [%2];\n}"
                   : "+r"(page)
                   : "l"(table_), "l"(table_ + index));
      return page;
    };
    const int index = token >> page_shift_, first = at(index);
    const bool crosses = !is_element_format(format) && !is_kivi(format) && cache_.page_size == 16 && token + 16 < end_;
    return {first, crosses ? at(index + 1) : first};
  }
  // Whether both are pages; if the table must not name one, that is reported.
  __device__ __forceinline__ bool are_valid(const Pages& at) const {
    const auto pages = static_cast<unsigned>(cache_.pages);
    if (static_cast<unsigned>(at.first) < pages && static_cast<unsigned>(at.second) < pages) return true;
    *cache_.fault = static_cast<int>(KvFault::page) + 16 * row_;
    return false;
  }

 private:
  const KvCacheView& cache_;
  const std::int32_t* table_;
  int first_, row_, end_, page_shift_;
};

}  // namespace rooftile::gpu
