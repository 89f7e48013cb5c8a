// SPDX-License-Identifier: Apache-2.0
// What one warp of append reads and where it writes: addresses in the cache, and new tokens, rotated where the call
// rotates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cute/pointer.hpp>

#include "core/kv_layout.h"
#include "kernels/kv_cache/params.h"
#include "kernels/kv_cache/rope.cuh"
#include "kernels/kv_cache/token.cuh"
#include "kernels/kv_cache/validate.cuh"

namespace rooftile::gpu {

// Loaded before the entry is validated: this lane's first Vec4 of a new token or of two heads of q, rotated where the
// call rotates.
template <class T>
struct Preloaded {
  Vec4<T> vec[2];  // (2 heads of q; or k, v in [0])
  bool valid;
};

template <class T, KvFormat f, bool rotate>  // rotate: cos is given
struct AppendWarp {
  const AppendParams& p;
  const AppendEntry& e;
  // Shared memory, (AppendTraits::staged_rows, 32 lanes): a lane's Vec4s are its own column; encode_v_slice also
  // exchanges codes between lanes here.
  Vec4<T> (*staged)[32];
  int b, lane;

  // The part of a page that belongs to a head, of the section whose first byte of page 0 is `base`.
  template <class X>
  __device__ X* section(const KvCacheView::Plane& plane, std::byte* base, std::int64_t page, int head) const {
    return cute::recast_ptr<X>(base + page * plane.page_stride + head * plane.head_stride);
  }
  __device__ std::int64_t page_of(int position) const {  // as kv_page of core/kv_layout.h
    const int index = position >> p.log2_page_size;
    return p.c.block_table ? p.c.block_table[e.row * p.c.table_stride + index]
                           : std::int64_t{e.row} * p.c.max_pages + index;
  }
  __device__ int page_offset(int position) const { return position & (p.c.page_size - 1); }
  __device__ TokenHead<T> ring(bool is_v, int position, int head) const {
    const std::int64_t offset = (std::int64_t{e.row} * p.c.kv_heads + head) * kv_ring + position % kv_ring;
    std::byte* const& base = is_v ? p.c.ring_v : p.c.ring_k;  // a reference: one pointer is loaded, not two
    return {cute::recast_ptr<T>(base) + offset * p.c.head_dim, 1, p.vec4_ring};
  }

  __device__ bool rotates(bool is_v) const { return rotate && !is_v; }
  __device__ TokenHead<T> input_head(int token, int head, bool is_v) const {
    return token_head<T>(is_v ? p.v : p.k, b, token, head);
  }
  // Loads Vec4 number vi of a new token, unrotated, in the channel order of the stored codes: V interleaved by 8.
  __device__ Vec4<T> load_input(const TokenHead<T>& from, bool is_v, int vi) const {
    if constexpr (!is_element_format(f) && !is_kivi(f))
      if (is_v) return load_vec4<InterleavedBy8>(from, vi, p.c.head_dim);
    return load_vec4<InOrder>(from, vi, p.c.head_dim);
  }
  __device__ Vec4<T> load_new(int token, int head, bool is_v, int vi) const {
    const TokenHead<T> from = input_head(token, head, is_v);
    if constexpr (rotate)
      if (!is_v)
        return rotated(p.rope, rotary_pair(p.rope, from, vi, p.c.head_dim),
                       load_angles<T>(p.rope, position_of(p.rope, b, token), vi), vi);
    return load_input(from, is_v, vi);
  }

  __device__ void store_raw(const TokenHead<T>& to, int token, int head, bool is_v, const Preloaded<T>& preloaded,
                            bool valid) const {
    for (int vi = lane; 4 * vi < p.c.head_dim; vi += 32)
      store_vec4(to, vi, p.c.head_dim, valid && vi == lane ? preloaded.vec[0] : load_new(token, head, is_v, vi));
  }

  // Loads Vec4 number vi of eight tokens of a closing group: tokens older than the call from the ring, new tokens from
  // the input. 8-byte loads are all issued before the first value is used; new tokens that are rotated, and tokens that
  // do not allow 8-byte loads, follow one at a time through `staged`.
  template <class Position>
  __device__ void load_tokens(Vec4<T> (&x)[append_slice_tokens], bool is_v, int head, int vi, Position position) const {
    const KvCacheView& c = p.c;
    const TokenTensor& s = is_v ? p.v : p.k;
    const TokenHead<T> first_new = input_head(0, head, is_v), first_raw = ring(is_v, 0, head);
    const auto is_new = [&](int i) { return position(i) >= e.length; };
    const auto at = [&](int i) {
      return is_new(i) ? first_new.at + (position(i) - e.length) * s.token
                       : first_raw.at + position(i) % kv_ring * c.head_dim;
    };
    const bool vec4 = first_raw.vec4 && first_new.vec4;
    if (vec4 && 4 * vi < c.head_dim) {
#pragma unroll
      for (int i = 0; i < append_slice_tokens; ++i) x[i] = vec4_at(at(i) + 4 * vi);
    } else {
#pragma unroll
      for (int i = 0; i < append_slice_tokens; ++i) x[i] = {};
    }
    if (vec4 && !rotates(is_v)) return;
    const auto slow = [&](int i) { return !vec4 || (rotates(is_v) && is_new(i)); };
#pragma unroll 1
    for (int i = 0; i < append_slice_tokens; ++i)
      if (slow(i))
        staged[i][lane] = is_new(i) && rotates(is_v)
                              ? load_new(position(i) - e.length, head, is_v, vi)
                              : load_vec4<InOrder>(TokenHead<T>{at(i), is_new(i) ? s.dim : 1, false}, vi, c.head_dim);
#pragma unroll
    for (int i = 0; i < append_slice_tokens; ++i)
      if (slow(i)) x[i] = staged[i][lane];
  }
};

}  // namespace rooftile::gpu
