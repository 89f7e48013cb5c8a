// SPDX-License-Identifier: Apache-2.0
// The kernel of append and rope_append: its work tiles, and how the CTAs of a batch entry divide them. A work tile
// belongs to one warp:
//   q                                  (token, two heads)
//   element formats, int8, fp8, int4   (token, side, head): D elements of one token; side is K or V
//   kivi formats                       (group, side, head): up to 32 tokens. The warp encodes the group if the group
//                                      closes in this call, and then writes the raw tokens into the ring.
// A kivi call of at most 32 tokens overwrites no ring entry that a closing group reads. There the encoding of a closing
// group is sliced: each slice (K: 32 channels, V: 8 tokens) is a work tile of its own, because a decode step waits for
// the one row that closes a group.
//
// Every CTA validates its batch entry before it writes. An invalid entry is left unchanged. An entry's length may be
// advanced only after all CTAs of the entry have read it. For few tokens (decode steps) the CTAs of an entry are one
// CTA or one cluster: all find the same fault and exit, and the first CTA reports it at once; without a fault the first
// CTA writes the length after the cluster barrier. For many tokens the CTAs of an entry cannot synchronise: a second
// kernel, `commit_lengths`, validates again and reports or writes the length.
//
// Bytes per token and head: 4 D read, the stored codes written; memory bandwidth bounds a prompt. T = 1 is bound by the
// latency of the chain row -> length -> block table -> data; k and v are loaded before the chain, because their
// addresses do not depend on it.
//
// PDL: the kernel starts while the previous kernel ends and reads its results only after wait_for_previous_kernel.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/kv_layout.h"
#include "kernels/kv_cache/encode.cuh"
#include "kernels/kv_cache/params.h"
#include "kernels/kv_cache/rope.cuh"
#include "kernels/kv_cache/token.cuh"
#include "kernels/kv_cache/traits.cuh"
#include "kernels/kv_cache/validate.cuh"
#include "kernels/kv_cache/warp.cuh"
#include "tile/cta_sync.cuh"

namespace rooftile::gpu {

// Appends one head of one token in a format without token groups.
template <class T, KvFormat f, bool rotate>
__device__ void append_token(const AppendWarp<T, f, rotate>& w, int token, int head, bool is_v,
                             const Preloaded<T>& preloaded) {
  const int position = w.e.length + token;
  const KvCacheView::Plane& plane = is_v ? w.p.c.v : w.p.c.k;
  if constexpr (is_element_format(f)) {
    std::byte* at = w.template section<std::byte>(plane, plane.codes, w.page_of(position), head) +
                    w.page_offset(position) * plane.token_stride;
    w.store_raw({cute::recast_ptr<T>(at), 1, w.p.vec4_pool}, token, head, is_v, preloaded, preloaded.valid);
  } else {
    for (int vi = w.lane; 4 * vi < padded_head_dim(w.p.c.head_dim); vi += 32)
      w.staged[vi / 32][w.lane] =
          preloaded.valid && vi == w.lane ? preloaded.vec[0] : w.load_new(token, head, is_v, vi);
    if (is_v) encode_token<InterleavedBy8>(w, plane, position, head);
    else encode_token<InOrder>(w, plane, position, head);
  }
}

// Writes the raw tokens of the group from `first` on, one of the call's first two groups, into the ring. Each ring
// entry gets the newest token that maps to it, if that token is new. So the same warp reads a ring entry for a
// closing group and then overwrites the entry. preloaded: of the call's first token.
template <class T, KvFormat f, bool rotate>
__device__ void fill_ring(const AppendWarp<T, f, rotate>& w, int first, int head, bool is_v,
                          const Preloaded<T>& preloaded) {
  const int end = w.e.length + w.e.tokens, stop = min(end - first, kv_group);
  for (int i = end - first > kv_ring ? 0 : max(w.e.length - first, 0); i < stop; ++i) {
    // The newest token of the call that maps to the same ring entry as first + i.
    const int position = first + i + (end - 1 - first - i) / kv_ring * kv_ring, token = position - w.e.length;
    if (token >= 0)
      w.store_raw(w.ring(is_v, position, head), token, head, is_v, preloaded, preloaded.valid && token == 0);
  }
}

// Encodes slices [begin, end) of a closing group, then fills the ring.
template <class T, KvFormat f, bool rotate>
__device__ void append_group(const AppendWarp<T, f, rotate>& w, int index, int head, bool is_v, int begin, int end,
                             bool fill, const Preloaded<T>& preloaded) {
  const int first = (w.e.length / kv_group + index) * kv_group;
#pragma unroll 1
  for (int slice = begin; slice < end; ++slice)
    if (is_v) encode_v_slice(w, first, head, slice);
    else encode_k_slice(w, first, head, slice);
  __syncwarp();  // lanes that read a ring entry -> lanes that overwrite the entry
  if (fill && index < 2) fill_ring(w, first, head, is_v, preloaded);
}

// Rotates heads 2 * pair and 2 * pair + 1 of q. q_out may be q: a lane reads elements that another lane writes.
template <class T, KvFormat f, bool rotate>
__device__ void rotate_q(const AppendWarp<T, f, rotate>& w, int token, int pair, const Preloaded<T>& preloaded) {
  const std::int64_t position = position_of(w.p.rope, w.b, token);
#pragma unroll 1
  for (int i = 0; i < 2; ++i) {
    const int head = 2 * pair + i;
    if (head == w.p.q_heads) break;
    const TokenHead<T> from = token_head<T>(w.p.q, w.b, token, head), to = token_head<T>(w.p.q_out, w.b, token, head);
    for (int vi = w.lane; 4 * vi < w.p.c.head_dim; vi += 32)
      w.staged[vi / 32][w.lane] = preloaded.valid && vi == w.lane
                                      ? (i == 0 ? preloaded.vec[0] : preloaded.vec[1])
                                      : rotated(w.p.rope, rotary_pair(w.p.rope, from, vi, w.p.c.head_dim),
                                                load_angles<T>(w.p.rope, position, vi), vi);
    __syncwarp();  // all lanes have read the head -> any lane may overwrite it
    for (int vi = w.lane; 4 * vi < w.p.c.head_dim; vi += 32)
      store_vec4(to, vi, w.p.c.head_dim, w.staged[vi / 32][w.lane]);
  }
}

template <class T, KvFormat f, bool rotate>
__global__ __launch_bounds__(AppendTraits<T, f, rotate>::threads, AppendTraits<T, f, rotate>::ctas_per_sm) void append(
    const __grid_constant__ AppendParams p) {
  __shared__ typename AppendTraits<T, f, rotate>::SharedStorage smem;
  const int b = static_cast<int>(blockIdx.x >> p.log2_entry_ctas),
            cta = static_cast<int>(blockIdx.x) - (b << p.log2_entry_ctas);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32, heads = p.c.kv_heads;
  const int first = cta * append_warps + warp, step = append_warps << p.log2_entry_ctas;
  const int q_pairs = rotate ? (p.q_heads + 1) / 2 : 1, q_tiles = rotate ? p.tokens * q_pairs : 0;
  AppendEntry e{};
  const AppendWarp<T, f, rotate> w{p, e, smem.staged[warp], b, lane};
  struct WorkTile {
    int head, index;  // index of the token or, in kivi formats, of the group
    bool is_v;
  };
  const auto work_tile_of = [heads](int index) {
    const unsigned of_head = static_cast<unsigned>(index) / static_cast<unsigned>(heads);
    return WorkTile{index - static_cast<int>(of_head) * heads, static_cast<int>(of_head / 2), of_head % 2 != 0};
  };

  // Loads the values of the first work tile, whose addresses do not depend on the entry, and their angles if the
  // position is valid.
  const bool preload_q = first < q_tiles;
  const WorkTile first_tile =
      preload_q ? WorkTile{2 * (first % q_pairs), first / q_pairs, false} : work_tile_of(first - q_tiles);
  const int token = is_kivi(f) && !preload_q ? 0 : first_tile.index;
  const TokenHead<T> from =
      preload_q ? token_head<T>(p.q, b, token, first_tile.head) : w.input_head(token, first_tile.head, first_tile.is_v);
  Preloaded<T> preloaded{{}, first_tile.index < (is_kivi(f) && !preload_q ? 1 : p.tokens)};
  const bool preload_rotates = preloaded.valid && w.rotates(first_tile.is_v),
             second = preload_q && first_tile.head + 1 < p.q_heads;
  RotaryPair<T> pair[2] = {};  // (2 heads of q; or k in [0])
  Angles angles{};
  tile::wait_for_previous_kernel();
  tile::let_next_kernel_start();
  e = load_entry(p, b);
  if (preload_rotates) {
    const std::int64_t position = position_of(p.rope, b, token);
    pair[0] = rotary_pair(p.rope, from, lane, p.c.head_dim);
    if (second)
      pair[1] = rotary_pair(p.rope, TokenHead<T>{from.at + p.q.head, from.stride, from.vec4}, lane, p.c.head_dim);
    if (position >= 0 && position < p.rope.max_position) angles = load_angles<T>(p.rope, position, lane);
  } else if (preloaded.valid) {
    preloaded.vec[0] = w.load_input(from, first_tile.is_v, lane);
  }
  validate(p, b, e);
  if (__syncthreads_or(e.fault != KvFault::none)) {
    if (p.one_cluster && cta == 0) report_fault(p, e, b);
    return;
  }
  tile::arrive_at_cluster();  // all threads have read the entry's length, for the vote above
  if (preload_rotates)
#pragma unroll
    for (int i = 0; i < 2; ++i) preloaded.vec[i] = rotated(p.rope, pair[i], angles, lane);

  int stored = e.tokens * 2 * heads,
      closing = 0;  // work tiles; closing: slices of the one group that closes, if sliced
  const bool sliced = is_kivi(f) && p.tokens <= kv_group;
  if constexpr (is_kivi(f))
    if (e.tokens > 0) {
      const int groups = (e.length + e.tokens) / kv_group - e.length / kv_group;  // groups that close
      stored = ((e.length + e.tokens - 1) / kv_group - e.length / kv_group + 1) * 2 * heads;
      if (sliced && groups > 0)
        closing = heads * (append_slices(false, p.c.head_dim) + append_slices(true, p.c.head_dim));
    }
  for (int index = first; index < q_tiles + stored + closing; index += step) {
    const int stored_tile = index - q_tiles;
    if (rotate && stored_tile < 0) {
      rotate_q(w, index / q_pairs, index % q_pairs, preloaded);
    } else if constexpr (is_kivi(f)) {
      WorkTile t = work_tile_of(stored_tile);
      int begin = 0, end = 0;
      if (stored_tile >= stored) {
        const int slices_v = append_slices(true, p.c.head_dim), slice = (stored_tile - stored) / heads;
        t = {(stored_tile - stored) % heads, 0, slice < slices_v};
        begin = t.is_v ? slice : slice - slices_v;
        end = begin + 1;
      } else if (!sliced && (e.length / kv_group + t.index + 1) * kv_group <= e.length + e.tokens) {
        end = append_slices(t.is_v, p.c.head_dim);
      }
      append_group(w, t.index, t.head, t.is_v, begin, end, stored_tile < stored, preloaded);
    } else {
      const WorkTile t = work_tile_of(stored_tile);
      append_token(w, t.index, t.head, t.is_v, preloaded);
    }
    preloaded.valid = false;  // preloaded holds the first work tile alone
  }
  tile::wait_for_cluster();  // all CTAs of the entry have read its length -> CTA 0 may advance it
  if (p.one_cluster && cta == 0 && threadIdx.x == 0 && e.tokens > 0) p.c.lengths[e.row] = e.length + e.tokens;
}

}  // namespace rooftile::gpu
