// SPDX-License-Identifier: Apache-2.0
// The main loop of split_kv: for every step of tokens, S^T = K Q^T, softmax, O^T += V^T P^T. The raw tokens of a kivi
// row come at the end of its last KV split.
//   K, V: KV tiles of 16 tokens in 16 bits or of 32 tokens in codes, from a ring (kv_ring.cuh)
//   Q:    B operands in registers, loaded once per work tile
//   P:    weights; a softmax policy makes them of S (warp_softmax.cuh, cta_softmax.cuh)
#pragma once

#include "kernels/decode/code_values.cuh"
#include "kernels/decode/element_tile.cuh"
#include "kernels/decode/kv_ring.cuh"
#include "kernels/decode/raw_tokens.cuh"
#include "kernels/decode/storage.cuh"

namespace rooftile::gpu {

template <class Config>
class Mainloop {
  using Traits = DecodeTraits<Config>;
  using T = typename Traits::T;
  using Raw = RawTokens<Traits>;
  static constexpr KvFormat format = Traits::format;
  static constexpr int D = Traits::D, N = Traits::N, C = Traits::C, warps_kv = Traits::warps_kv;
  static constexpr bool cta_softmax = Traits::cta_softmax;
  using Element = tile::MmaType<T>;
  using Queries = QueryFragments<T, D, N>;  // (MMA, N, D / 16)

 public:
  __device__ Mainloop(const DecodeParams& p, SharedStorage<Traits>& smem, const WarpCoord<Traits>& at)
      : p_(p), smem_(smem), at_(at), softmax_(smem.softmax, at), page_shift_(first_bit(p.cache.page_size)) {}

  // Computes KV splits [first, last) of one work tile. split_end(split, partial) is called with the partial of each.
  template <class SplitEnd>
  __device__ void run(const WorkTile& tile, const RowWork& w, int first, int last, int tile_range,
                      const SplitEnd& split_end) {
    softmax_.reset();
    if (first >= last) return;
    const VisibleRows<Traits> see(p_, tile, w, at_.lane, TokenPart::stored);
    if constexpr (Traits::elements) element_tiles(tile, w, see, {w, first, last}, tile_range, split_end);
    else code_tiles(tile, w, see, {w, first, last}, tile_range, split_end);
  }

 private:
  template <class Copies>
  using Ring = std::conditional_t<cta_softmax, CtaRing<Traits, Copies>, WarpRing<Traits, Copies>>;

  // The steps of all splits. read_queries() runs when the queries have arrived, compute(ring) when a step's K has,
  // split_end(split) when the state has all tokens of a split. compute: S = K Q^T, P = softmax(S), O += P V.
  template <class Copies, class ReadQueries, class Compute, class SplitEnd>
  __device__ void for_each_step(const RowWork& w, const SplitRange& range, int tile_range, Copies&& copies,
                                const ReadQueries& read_queries, const Compute& compute, const SplitEnd& split_end) {
    Ring<std::remove_reference_t<Copies>> ring(p_, smem_, at_, w, range, tile_range, page_shift_, copies);
    ring.start();
    if (ring.any()) read_queries();
    for (int split = range.first; split < range.last; ++split) {
      for (ring.begin_split(); ring.in_split(); ring.next()) {
        ring.wait();
        if (ring.has_tokens()) compute(ring);
      }
      split_end(split);
    }
    cute::cp_async_wait<0>();
  }

  __device__ void copy_queries(const WorkTile& tile, const RowWork& w) const {
    copy_queries_async<T, D, N, Traits::threads>(p_, tile, w, threadIdx.x, smem_.queries());
  }
  __device__ void read_queries(Queries& q) const { load_query_fragments<T, D, N>(smem_.queries(), at_.lane, q); }

  // ---- K and V in 16 bits ----

  struct ElementCopies {
    const Mainloop& loop;
    const WorkTile& tile;
    const RowWork& w;
    const VisibleRows<Traits>& see;
    std::int64_t k_head, v_head;  // byte offsets of the KV head
    __device__ ElementCopies(const Mainloop& loop, const WorkTile& tile, const RowWork& w,
                             const VisibleRows<Traits>& see)
        : loop(loop),
          tile(tile),
          w(w),
          see(see),
          k_head(tile.kv_head * loop.p_.cache.k.head_stride),
          v_head(tile.kv_head * loop.p_.cache.v.head_stride) {}
    __device__ void load(ElementTile<T, D>& kv_tile, int token, const Pages& pages) const {
      const Rows k = rows_of(loop.p_.cache.k, k_head, token, pages), v = rows_of(loop.p_.cache.v, v_head, token, pages);
      with_rows(token, [&](const auto& wanted) {
        copy(kv_tile.k, k, wanted);
        copy(kv_tile.v, v, wanted);
      });
    }
    __device__ void load_k(ElementTile<T, D>& kv_tile, int token, const Pages& pages) const {
      const Rows k = rows_of(loop.p_.cache.k, k_head, token, pages);
      with_rows(token, [&](const auto& wanted) { copy(kv_tile.k, k, wanted); });
    }
    __device__ void load_v(ElementTile<T, D>& kv_tile, int token, const Pages& pages) const {
      const Rows v = rows_of(loop.p_.cache.v, v_head, token, pages);
      with_rows(token, [&](const auto& wanted) { copy(kv_tile.v, v, wanted); });
    }
    __device__ void load_raw(int) const {}
    __device__ void load_queries() const { loop.copy_queries(tile, w); }
    // Calls copy(wanted). wanted(i): whether a packed row sees the tile's token i; other tokens' rows are zero-filled.
    // In 16 bits the packed rows of a work tile see all tokens between their bounds.
    template <class Copy>
    __device__ void with_rows(int token, const Copy& copy) const {
      if (token >= see.outer_begin && token + 16 <= see.outer_end) copy([](int) { return true; });
      else copy([&](int i) { return see.any(token + i); });
    }
    struct Rows {
      const std::byte* first;
      std::int64_t stride;  // bytes
    };
    __device__ Rows rows_of(const KvCacheView::Plane& plane, std::int64_t head, int token, const Pages& pages) const {
      const std::int64_t page_offset = token & (loop.p_.cache.page_size - 1);
      const std::int64_t stride = plane.token_stride;
      return {plane.codes + pages.first * plane.page_stride + head + page_offset * stride, stride};
    }
    template <class Wanted>
    __device__ void copy(Element* to, const Rows& rows, const Wanted& wanted) const {
      copy_rows_async<T, D, Traits::tile_threads>(to, loop.at_.tile_thread, rows.first, rows.stride, wanted);
    }
  };

  template <class SplitEnd>
  __device__ void element_tiles(const WorkTile& tile, const RowWork& w, const VisibleRows<Traits>& see,
                                const SplitRange& range, int tile_range, const SplitEnd& split_end) {
    Queries q;
    const float factor = logit_factor(p_, 1.0f);
    for_each_step(
        w, range, tile_range, ElementCopies(*this, tile, w, see), [&] { read_queries(q); },
        [&](auto& ring) {
          const ElementTile<T, D>* tiles = ring.tiles();
          element_step([&](int i) { return tiles[i].k; }, [&](int i) { return tiles[i].v; },
                       std::integral_constant<int, Traits::state_tiles>(), q, factor, see, ring.token(),
                       softmax_.state().o, ring, [](int, const float (&)[2]) {});
        },
        [&](int split) {
          if constexpr (cta_softmax) {
            const float no_raw[N * C][4] = {};  // (N x C mma tiles, 4)
            split_end(split, softmax_.take_partial(no_raw));
          } else {
            split_end(split, softmax_.template take_partial<false>());
          }
        });
  }

  // A step in 16 bits: `tiles` KV tiles of 16 tokens from `token` on. keys(i), values(i): address of tile i; rows that
  // no packed row sees are zeros. o: accumulators, the state's or others; rescale(n, factors) is called for others when
  // the maximum moves.
  template <class Keys, class Values, class Tiles, class Stage, class Rescale>
  __device__ void element_step(const Keys& keys, const Values& values, Tiles tiles, const Queries& q, float factor,
                               const VisibleRows<Traits>& see, int token, float (&o)[N * C][4], Stage& stage,
                               const Rescale& rescale) {
    const int own = cta_softmax ? at_.warp_kv : 0, own_token = token + 16 * own;
    float s[N][1][4];  // (n-tile, m-tile of 16 tokens, 4)
    if (tiles == Traits::state_tiles || own < tiles) {
      qk16<T, D, N>(s, keys(own), q, at_.lane);
#pragma unroll
      for (int n = 0; n < N; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][0][i] *= factor;
        soft_cap(s[n], p_.softcap);
        mask(s[n], see.rows[n], own_token, at_.lane);
      }
    } else {
#pragma unroll
      for (int n = 0; n < N; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) s[n][0][i] = -INFINITY;
    }
    softmax_.weigh(s, stage, rescale);  // CtaSoftmax: waits for V, lets the next K's copies start
    softmax_.for_each_tile(tiles, [&](int i, const tile::FragmentB(&weights)[N]) {
      const int first = token + 16 * i;
      if (p_.tokens == 1 || see.all(first, 16)) {
        pv16<T, D, C>(o, weights, values(i), C * at_.warp_d, at_.lane);
      } else {
#pragma unroll
        for (int n = 0; n < N; ++n)
          pv16_masked<T, D, C>(o + n * C, weights[n], values(i), see.rows[n], first, C * at_.warp_d, at_.lane);
      }
    });
  }

  // ---- codes ----

  using Code = CodeTile<format, D>;
  struct CodeCopies {
    const Mainloop& loop;
    const WorkTile& tile;
    const RowWork& w;
    Raw raw;
    CodeSource<format, D> source;
    __device__ CodeCopies(const Mainloop& loop, const WorkTile& tile, const RowWork& w, bool ends)
        : loop(loop),
          tile(tile),
          w(w),
          raw(loop.p_, tile, w, loop.at_, ends),
          source(loop.p_.cache, tile.kv_head, loop.at_.tile_thread) {
      if constexpr (!cta_softmax) source.pin(loop.at_.tile_thread);
    }
    __device__ void load(Code& kv_tile, int token, const Pages& pages) const {
      load_k(kv_tile, token, pages);
      load_v(kv_tile, token, pages);
    }
    __device__ void load_k(Code& kv_tile, int token, const Pages& pages) const {
      if (cta_softmax && token >= w.end) return;
      const KvCacheView& c = loop.p_.cache;
      kv_tile.template copy_keys_async<Traits::tile_threads, !cta_softmax>(
          source, pages.first * c.k.page_stride, pages.second * c.k.page_stride, token & (c.page_size - 1),
          loop.at_.tile_thread);
    }
    __device__ void load_v(Code& kv_tile, int token, const Pages& pages) const {
      if (cta_softmax && token >= w.end) return;
      const KvCacheView& c = loop.p_.cache;
      kv_tile.template copy_values_async<Traits::tile_threads>(source, pages.first * c.k.page_stride,
                                                               pages.second * c.k.page_stride,
                                                               token & (c.page_size - 1), loop.at_.tile_thread);
    }
    __device__ void load_raw(int stage) {
      if constexpr (Traits::kivi)
        if (raw.started < raw.halves) loop.start_raw(raw, tile, w, stage);
    }
    __device__ void load_queries() const {
      loop.copy_queries(tile, w);
      if constexpr (Traits::kivi && cta_softmax) {
        if (raw.any) loop.copy_raw_tiles(raw, tile, w, raw.first);
      } else if constexpr (Traits::kivi) {
        // Half 2 i is K, half 2 i + 1 is V of raw tile i: a ring of three stages has no stage for half 3.
        if (raw.halves > Traits::stages) loop.copy_raw(raw, tile, w, 3);
      }
    }
  };

  template <class SplitEnd>
  __device__ void code_tiles(const WorkTile& tile, const RowWork& w, const VisibleRows<Traits>& see,
                             const SplitRange& range, int tile_range, const SplitEnd& split_end) {
    CodeQueries<format, D> q[N];  // (n-tile)
    float factor[N][2];           // (n-tile, packed row 2t + j)
    CodeCopies copies(*this, tile, w, range.last == w.splits);
    int plain_end = p_.softcap == 0.0f ? see.rows[0].inner_end : 0;  // up to here logits need neither mask nor soft cap
    if constexpr (!cta_softmax) tile::pin(plain_end);
    for_each_step(
        w, range, tile_range, copies,
        [&] {
          const auto sQ = cute::make_tensor(cute::make_smem_ptr(smem_.queries()), QueryLayout<D, N>{});  // (8 N, D)
#pragma unroll
          for (int n = 0; n < N; ++n) {
            q[n].template load<T>(sQ, n, at_.lane);
            factor[n][0] = logit_factor(p_, q[n].q_scale[0]);
            factor[n][1] = logit_factor(p_, q[n].q_scale[1]);
          }
        },
        [&](auto& ring) { code_step(q, factor, see, plain_end, ring); },
        [&](int split) {
          const bool ends = Traits::kivi && copies.raw.any && split + 1 == w.splits;
          if constexpr (cta_softmax) {
            float raw_o[N * C][4] = {};  // (N x C mma tiles, 4)
            if constexpr (Traits::kivi)
              if (ends) raw_steps(copies.raw, tile, w, raw_o);
            split_end(split, softmax_.take_partial(raw_o));
          } else {
            if constexpr (Traits::kivi)
              if (ends) {
                raw_tiles(copies.raw, tile, w);
                split_end(split, softmax_.template take_partial<false>());
                return;
              }
            split_end(split, softmax_.template take_partial<true>());
          }
        });
  }

  // A step in codes. CtaRing: a tile past the end of the row holds arbitrary codes, and its weights are 0.
  template <class Ring>
  __device__ void code_step(const CodeQueries<format, D> (&q)[N], const float (&factor)[N][2],
                            const VisibleRows<Traits>& see, int plain_end, Ring& ring) {
    Code* const tiles = ring.tiles();
    const int own = cta_softmax ? at_.warp_kv : 0, token = ring.token() + 32 * own;
    TokenScales<T, format> scales(tiles[own], see.any(token + at_.lane), at_.lane);
    float s[N][2][4];  // (n-tile, m-tile of 16 tokens, 4)
    qk_codes<T, format, D>(s, tiles[own], q, factor, at_.lane);
    softmax_.broadcast(scales);
    if constexpr (!cta_softmax) {
      // Two copies of the code, all tokens visible or masked: a branch around soft cap and mask would split the first.
      if (token >= see.rows[0].inner_begin && token + 32 <= plain_end)
        return add_values(s, scales, see, token, std::true_type(), ring);
    }
    const bool all = cta_softmax && see.all(token, 32);
#pragma unroll
    for (int n = 0; n < N; ++n) {
      soft_cap(s[n], p_.softcap);
      if (!all) mask(s[n], see.rows[n], token, at_.lane);
    }
    add_values(s, scales, see, token, all, ring);
  }
  // Adds the step's values to the state. all: every packed row sees all 32 tokens of this warp's own KV tile.
  template <class All, class Ring>
  __device__ void add_values(float (&s)[N][2][4], const TokenScales<T, format>& scales, const VisibleRows<Traits>& see,
                             int token, All all, Ring& ring) {
    const Code* tiles = ring.tiles();
    softmax_.weigh_codes(s, scales, see.rows, token, all, ring);
    auto& state = softmax_.state();
    if constexpr (KvTraits<format>::has_zero_point) {
      tile::FragmentB weights[2][N];  // (k-tile of 16 tokens, n-tile)
      softmax_.load_own_weights(weights);
      add_zero_point<format>(state.zp_correction, weights);
    }
    softmax_.for_each_code_tile([&](int i, const tile::FragmentB(&weights)[2][N]) {
      pv_codes<format, D, C>(state.o, weights, tiles[i], C / 2 * at_.warp_d, at_.lane);
    });
  }

  // ---- raw tokens of a kivi row ----

  // WarpRing: half `half` of this warp's raw tiles, in a stage of the ring or in memory of its own.
  __device__ Element* raw_half(const Raw& raw, int half) const {
    return RawStorage<Traits>::takes_two_tiles && half >= Traits::stages
               ? smem_.raw.half[0]
               : smem_.raw_half(at_.warp_kv, (raw.stage + half) % Traits::stages);
  }
  __device__ void copy_raw(const Raw& raw, const WorkTile& tile, const RowWork& w, int half) const {
    raw.template copy_half<Traits::tile_threads>(p_, tile, w, raw.token + half / 2 * 16, half, raw_half(raw, half),
                                                 at_.tile_thread);
  }
  __device__ void start_raw(Raw& raw, const WorkTile& tile, const RowWork& w, int stage) const {
    if (raw.started == 0) raw.stage = stage;
    if (raw.started < Traits::stages) copy_raw(raw, tile, w, raw.started);
    ++raw.started;
  }
  __device__ void raw_tiles(Raw& raw, const WorkTile& tile, const RowWork& w) {
    cute::cp_async_wait<0>();
    tile::sync_tile_warps<Traits::warps_per_tile>(at_.warp_kv);  // all threads' copies of the raw tiles have arrived
    softmax_.dequantize_sums();
    // Where all raw tokens fit at once, no barrier follows, so a warp without a raw tile may leave.
    if (warps_kv * 16 >= kv_ring && raw.halves == 0) return;
    Queries q;
    read_queries(q);
    const float factor = logit_factor(p_, 1.0f);
    const VisibleRows<Traits> see(p_, tile, w, at_.lane, TokenPart::raw);
    NoRing stage;
#pragma unroll 1
    for (int first = raw.first;;) {
#pragma unroll 1
      for (int half = 0; half < raw.halves; half += 2)
        element_step([&](int) { return raw_half(raw, half); }, [&](int) { return raw_half(raw, half + 1); },
                     std::integral_constant<int, 1>(), q, factor, see, raw.token + half / 2 * 16, softmax_.state().o,
                     stage, [](int, const float (&)[2]) {});
      first += 16 * warps_kv;
      if (warps_kv * 16 >= kv_ring || first >= w.length) break;
      __syncthreads();  // every warp has read its raw tiles
      raw.token += 16 * warps_kv;
      raw.halves = raw.token < w.length ? 2 : 0;
      for (int half = 0; half < raw.halves; ++half) copy_raw(raw, tile, w, half);
      cute::cp_async_fence();
      cute::cp_async_wait<0>();
      __syncthreads();  // all threads' copies of the next raw tiles have arrived
    }
  }

  // CtaRing: raw_step_tiles raw tiles from token `first` on; each warp copies one half at a time.
  static constexpr int raw_step_tiles = RawStorage<Traits>::raw_tiles;
  __device__ void copy_raw_tiles(const Raw& raw, const WorkTile& tile, const RowWork& w, int first) const {
#pragma unroll 1
    for (int half = at_.warp_kv; half < 2 * raw_step_tiles; half += warps_kv)
      raw.template copy_half<32>(p_, tile, w, first + half / 2 * 16, half, smem_.raw.half[half], at_.lane);
  }
  __device__ void raw_steps(const Raw& raw, const WorkTile& tile, const RowWork& w, float (&o)[N * C][4]) {
    Queries q;
    read_queries(q);
    const float factor = logit_factor(p_, 1.0f);
    const VisibleRows<Traits> see(p_, tile, w, at_.lane, TokenPart::raw);
    NoRing stage;
    for (int token = raw.first; token < w.length; token += 16 * raw_step_tiles) {
      if (token > raw.first) {
        __syncthreads();  // every warp has read the previous raw tiles
        copy_raw_tiles(raw, tile, w, token);
        cute::cp_async_fence();
        cute::cp_async_wait<0>();
      }
      __syncthreads();  // all threads' copies have arrived (the first ones with the queries); no thread reads weights
      element_step([&](int i) { return smem_.raw.half[2 * i]; }, [&](int i) { return smem_.raw.half[2 * i + 1]; },
                   std::integral_constant<int, raw_step_tiles>(), q, factor, see, token, o, stage,
                   [&](int n, const float (&factor)[2]) {
#pragma unroll
                     for (int i = 0; i < C; ++i)
#pragma unroll
                       for (int e = 0; e < 4; ++e) o[n * C + i][e] *= factor[e % 2];
                   });
    }
  }

  const DecodeParams& p_;
  SharedStorage<Traits>& smem_;
  const WarpCoord<Traits> at_;
  Softmax<Traits> softmax_;
  const int page_shift_;
};

}  // namespace rooftile::gpu
