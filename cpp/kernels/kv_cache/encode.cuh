// SPDX-License-Identifier: Apache-2.0
// Encoding of groups: range over the lanes, scale and minimum, codes in the order of core/kv_layout.h, and their stores
// to a page.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cute/pointer.hpp>
#include <type_traits>

#include "core/kv_layout.h"
#include "kernels/kv_cache/quantise.cuh"
#include "kernels/kv_cache/token.cuh"
#include "kernels/kv_cache/warp.cuh"

namespace rooftile::gpu {

// Stores the codes of Vec4 number vi of the token at page offset `offset`; word: as packed() returns them.
template <KvFormat f, class Order>
__device__ void store_codes(const KvCacheView& c, std::byte* section, int offset, int vi, std::uint32_t word) {
  constexpr bool is_v = std::is_same_v<Order, InterleavedBy8>;
  const int d = Order::dim(vi, 0);
  const int page_size = is_kivi(f) ? kv_group : c.page_size;  // v_code_index asks only whether it is 16
  const std::int64_t index =
      is_v ? v_code_index(f, page_size, c.head_dim, offset, d) : k_code_index(c.head_dim, offset, d);
  if constexpr (code_bits(f) == 4) {
    *cute::recast_ptr<std::uint16_t>(section + index / 2) = static_cast<std::uint16_t>(word);
  } else if constexpr (is_v) {
#pragma unroll
    for (int j = 0; j < 4; ++j) section[index + 4 * j] = static_cast<std::byte>(word >> (8 * j));
  } else {
    *cute::recast_ptr<std::uint32_t>(section + index) = word;
  }
}

// Encodes one head of one token as one group; its values lie in `staged`.
template <class Order, class T, KvFormat f, bool rotate>
__device__ void encode_token(const AppendWarp<T, f, rotate>& w, const KvCacheView::Plane& plane, int position,
                             int head) {
  const KvCacheView& c = w.p.c;
  const std::int64_t page = w.page_of(position);
  const int offset = w.page_offset(position), padded = padded_head_dim(c.head_dim);
  GroupRange<f> range;
  for (int vi = w.lane; 4 * vi < padded; vi += 32) {
    const Vec4<T> x = w.staged[vi / 32][w.lane];
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (Order::dim(vi, j) < c.head_dim) range.add(x[j]);
  }
  range.reduce_warp();
  const Quantizer<T, f> quantizer(range);
  if (w.lane == 0) {
    w.template section<T>(plane, plane.scale, page, head)[offset] = quantizer.stored_scale;
    if constexpr (has_min(f)) w.template section<T>(plane, plane.min, page, head)[offset] = quantizer.stored_minimum;
  }
  for (int vi = w.lane; 4 * vi < padded; vi += 32) {
    const Vec4<T> x = w.staged[vi / 32][w.lane];
    int codes[4];  // (4 channels)
#pragma unroll
    for (int j = 0; j < 4; ++j) codes[j] = Order::dim(vi, j) < c.head_dim ? quantizer.code(x[j]) : 0;
    store_codes<f, Order>(c, w.template section<std::byte>(plane, plane.codes, page, head), offset, vi,
                          packed<f>(codes));
  }
}

// Encodes K of 32 channels of the 32 tokens from `first` on, one group a channel. A lane holds four channels of every
// fourth token.
template <class T, KvFormat f, bool rotate>
__device__ void encode_k_slice(const AppendWarp<T, f, rotate>& w, int first, int head, int slice) {
  const KvCacheView& c = w.p.c;
  const int vi = 8 * slice + w.lane % 8,
            lane_row = w.lane / 8;  // 0 to 3: loads tokens lane_row + 4 i, quantises channel lane_row of its four
  Vec4<T> x[append_slice_tokens];   // (8 tokens: token + 4 i; 4 channels)
  w.load_tokens(x, false, head, vi, [&](int i) { return first + lane_row + 4 * i; });
  GroupRange<f> range[4];  // (4 channels)
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int i = 0; i < append_slice_tokens; ++i) range[j].add(x[i][j]);
    range[j].reduce_xor(8);
    range[j].reduce_xor(16);
  }
  // Four lanes hold the ranges of the same four channels; each lane quantises one of the channels.
  GroupRange<f> mine = range[0];
#pragma unroll
  for (int j = 1; j < 4; ++j) mine.assign_if(range[j], lane_row == j);
  const Quantizer<T, f> quantizer(mine);
  const std::int64_t page = w.page_of(first);
  const int offset = w.page_offset(first);
  const std::int64_t index = std::int64_t{offset / kv_group} * padded_head_dim(c.head_dim) + 4 * vi + lane_row;
  w.template section<T>(c.k, c.k.scale, page, head)[index] = quantizer.stored_scale;
  if constexpr (has_min(f)) w.template section<T>(c.k, c.k.min, page, head)[index] = quantizer.stored_minimum;
  std::uint32_t words[append_slice_tokens] = {};  // (8 tokens): codes of 4 channels
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const Quantizer<T, f> channel_quantizer = quantizer.from_lane(8 * j + w.lane % 8);
#pragma unroll
    for (int i = 0; i < append_slice_tokens; ++i)
      words[i] |= (static_cast<std::uint32_t>(channel_quantizer.code(x[i][j])) & code_mask<f>) << (code_bits(f) * j);
  }
  std::byte* codes_at = w.template section<std::byte>(c.k, c.k.codes, page, head);
#pragma unroll
  for (int i = 0; i < append_slice_tokens; ++i)
    store_codes<f, InOrder>(c, codes_at, offset + lane_row + 4 * i, vi, words[i]);
}

// Encodes V of eight of the 32 tokens from `first` on, one group a token. The codes of the eight tokens fill whole
// 16-byte vectors of the layout: slice 0 has tokens 0, 1, 8, 9, 16, 17, 24, 25.
template <class T, KvFormat f, bool rotate>
__device__ void encode_v_slice(const AppendWarp<T, f, rotate>& w, int first, int head, int slice) {
  const KvCacheView& c = w.p.c;
  const int padded = padded_head_dim(c.head_dim), vecs = (padded + 4 * 32 - 1) / (4 * 32);
  const auto token_in_group = [&](int i) { return 8 * (i / 2) + 2 * slice + i % 2; };
  const auto position = [&](int i) { return first + token_in_group(i); };
  Vec4<T> x[append_slice_tokens];            // (8 tokens; 4 channels)
  GroupRange<f> range[append_slice_tokens];  // (8 tokens)
#pragma unroll 1
  for (int vec = 0; vec < vecs; ++vec) {
    const int vi = 32 * vec + w.lane;
    w.load_tokens(x, true, head, vi, position);
#pragma unroll
    for (int j = 0; j < 4; ++j)
      if (4 * vi + j < c.head_dim)
#pragma unroll
        for (int i = 0; i < append_slice_tokens; ++i) range[i].add(x[i][j]);
  }
#pragma unroll
  for (int i = 0; i < append_slice_tokens; ++i) range[i].reduce_warp();
  GroupRange<f> mine = range[0];
#pragma unroll
  for (int i = 1; i < append_slice_tokens; ++i) mine.assign_if(range[i], w.lane % append_slice_tokens == i);
  const Quantizer<T, f> quantizer(mine);
  const std::int64_t page = w.page_of(first);
  const int offset = w.page_offset(first);
  if (w.lane < append_slice_tokens) {
    w.template section<T>(c.v, c.v.scale, page, head)[offset + token_in_group(w.lane)] = quantizer.stored_scale;
    if constexpr (has_min(f))
      w.template section<T>(c.v, c.v.min, page, head)[offset + token_in_group(w.lane)] = quantizer.stored_minimum;
  }
  // 4 bits: a word holds a channel's codes of all eight tokens. 8 bits: word h holds those of the slice's four tokens
  // among tokens 16 h to 16 h + 15 of the group.
  constexpr int bits = code_bits(f), channel_words = bits / 4;
  std::uint32_t* words = cute::recast_ptr<std::uint32_t>(w.staged);  // (channel_words, 128 channels)
#pragma unroll 1
  for (int vec = 0; vec < vecs; ++vec) {
    const int vi = 32 * vec + w.lane;
    if (vecs > 1) w.load_tokens(x, true, head, vi, position);  // again: a lane's registers do not hold a whole token
    std::uint32_t channel_codes[channel_words][4] = {};        // (word, 4 channels)
#pragma unroll
    for (int i = 0; i < append_slice_tokens; ++i) {
      const Quantizer<T, f> token_quantizer = quantizer.from_lane(i);
      const int shift = bits == 4 ? 16 * (i % 2) + 4 * (i / 2) : 8 * (i % 4);
#pragma unroll
      for (int j = 0; j < 4; ++j)
        channel_codes[i * channel_words / append_slice_tokens][j] |=
            (static_cast<std::uint32_t>(token_quantizer.code(x[i][j])) & code_mask<f>) << shift;
    }
    __syncwarp();  // all lanes have finished with `staged`, which `words` overwrites
#pragma unroll
    for (int h = 0; h < channel_words; ++h) {
#pragma unroll
      for (int j = 0; j < 4; ++j)
        if (4 * vi + j >= c.head_dim) channel_codes[h][j] = 0;
      cute::recast_ptr<uint4>(words)[32 * h + w.lane] = {channel_codes[h][0], channel_codes[h][1], channel_codes[h][2],
                                                         channel_codes[h][3]};
    }
    __syncwarp();  // all lanes' words are in shared memory
    const int tile = 4 * vec + w.lane / 8;
    std::uint32_t out[channel_words][4] = {};  // (channel_words, 4 words): the 16-byte vectors of this lane
#pragma unroll
    for (int h = 0; h < channel_words; ++h)
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const std::uint32_t word = words[128 * h + w.lane / 8 * 32 + w.lane % 8 + 8 * j];
        if constexpr (bits == 8) {
          out[h][j] = word;
        } else {
#pragma unroll
          for (int i = 0; i < 4; ++i) out[h][i] |= (word >> (4 * i) & 0x000f000fu) << (4 * j);
        }
      }
    __syncwarp();  // all lanes have read `words`
    if (32 * tile >= padded) continue;
#pragma unroll
    for (int h = 0; h < channel_words; ++h) {
      const std::int64_t index =
          v_code_index(f, kv_group, c.head_dim, offset + 16 * h + 2 * slice, 32 * tile + w.lane % 8);
      *cute::recast_ptr<uint4>(w.template section<std::byte>(c.v, c.v.codes, page, head) + index * bits / 8) = {
          out[h][0], out[h][1], out[h][2], out[h][3]};
    }
  }
}

}  // namespace rooftile::gpu
