// SPDX-License-Identifier: Apache-2.0
// A row of logits divided over the threads of a cluster: each has a slice of neighbouring tokens, so that the order of
// the threads is the vocabulary's. The keys of a slice (core/sampling.h) are kept in shared memory if there is room;
// else each pass computes them anew, from logits in L1 or L2.
#pragma once

#include "core/sampling.h"
#include "kernels/sampling/params.cuh"
#include "tile/strided_rows.cuh"

namespace rooftile::gpu {

constexpr int sample_threads = 1024;

// The words of shared memory with a bit for each token of a CTA's slices.
inline __host__ __device__ int seen_words(const SampleParams& p) { return p.slice * (sample_threads / 32); }

// The words of shared memory with the keys of a CTA's slices.
inline __host__ __device__ int key_words(const SampleParams& p) { return p.keep_keys ? p.slice * sample_threads : 0; }

template <class T, bool vector>
class RowSlice {
 public:
  __device__ RowSlice(const SampleParams& p, std::int64_t row, int rank, std::uint32_t* seen)
      : logits_(cute::recast_ptr<T>(p.logits.data) + tile::row_offset(p.logits, row)),
        last_stride_(p.logits.last_stride),
        slice_(p.slice),
        cta_first_(rank * sample_threads * p.slice),
        first_(cta_first_ + static_cast<int>(threadIdx.x) * p.slice),
        end_(min(first_ + p.slice, p.vocabulary)),
        penalty_(p.penalty),
        seen_(p.seen > 0 ? seen : nullptr) {}

  // Sets the bits of the CTA's tokens that the row has seen. Called by all threads.
  __device__ void mark_seen(const SampleParams& p, std::int64_t row) {
    if (!seen_) return;
    for (int i = threadIdx.x; i < seen_words(p); i += sample_threads) seen_[i] = 0;
    __syncthreads();  // all threads -> all threads: the bits are 0
    const std::int64_t begin = tile::row_offset(p.token_ids, row);
    for (int i = threadIdx.x; i < p.seen; i += sample_threads) {
      const std::int64_t id =
          tile::load_integer(p.token_ids.data, begin + i * p.token_ids.last_stride, p.wide_token_ids);
      const std::int64_t bit = id - cta_first_;
      if (id < p.vocabulary && bit >= 0 && bit < sample_threads * p.slice) atomicOr(&seen_[bit / 32], 1u << bit % 32);
    }
    __syncthreads();  // all threads -> all threads: the bits are set
  }

  // Tokens of this thread, and the first one of a thread of this CTA.
  __device__ int size() const { return max(end_ - first_, 0); }
  __device__ int first_token(int thread) const { return first_ + (thread - static_cast<int>(threadIdx.x)) * slice_; }
  // The logit of any token, with the penalty applied if it is one of this CTA's.
  __device__ float at(int token) const {
    return penalised_if_seen(token, tile::to_float(logits_[token * last_stride_]));
  }

  // Calls f(token, logit) for the thread's tokens in the vocabulary's order, with the penalty applied. unrolled: the
  // code of f is there once for each element of a load; else once, because the first use of code waits for memory.
  template <bool unrolled, class F>
  __device__ __forceinline__ void for_each(F&& f) const {
    if (unrolled && vector && !seen_) {
      uint4 now = load(first_);
#pragma unroll 1
      for (int first = first_; first < end_; first += elements) {
        const uint4 next = load(first + elements);
#pragma unroll
        for (int i = 0; i < elements; ++i) f(first + i, take_first(now));
        now = next;
      }
    } else {
#pragma unroll 1
      for (int token = first_; token < end_; ++token) f(token, at(token));
    }
  }

 private:
  static constexpr int elements = sizeof(uint4) / sizeof(T);  // of a load

  __device__ float penalised_if_seen(int token, float x) const {
    if (!seen_) return x;
    const int bit = token - cta_first_;
    return seen_[bit / 32] >> bit % 32 & 1 ? penalised(x, penalty_) : x;
  }
  // The first element of x; the others move up.
  __device__ static float take_first(uint4& x) {
    if constexpr (std::is_same_v<T, float>) {
      const float first = __uint_as_float(x.x);
      x = {x.y, x.z, x.w, 0};
      return first;
    } else {
      const float first = tile::unpack<T>(x.x).x;
      x = {__funnelshift_r(x.x, x.y, 16), __funnelshift_r(x.y, x.z, 16), __funnelshift_r(x.z, x.w, 16), x.w >> 16};
      return first;
    }
  }
  // Tokens [first, first + elements); 0 past the slice. Loads are coherent ones, as in tile::load_table.
  __device__ __forceinline__ uint4 load(int first) const {
    return first < end_ ? *cute::recast_ptr<uint4>(logits_ + first) : uint4{};
  }

  const T* logits_;
  std::int64_t last_stride_;
  int slice_;
  int cta_first_, first_, end_;  // the CTA's first token; this thread's first one and the one behind its last
  float penalty_;
  std::uint32_t* seen_;  // null: no penalty
};

// The keys of a slice.
template <class T, bool vector>
class RowKeys {
 public:
  // stored: shared memory for (slice, thread) keys, or null. Called by all threads.
  __device__ RowKeys(const SampleParams& p, const RowSlice<T, vector>& slice, float largest, std::uint32_t* stored)
      : slice_(slice), largest_(largest), per_temperature_(p.per_temperature) {
    const int first = slice.first_token(threadIdx.x);
    slice.template for_each<true>([&](int token, float x) {
      const std::uint32_t key = key_of(x);
      if (stored) stored[(token - first) * sample_threads + threadIdx.x] = key;
      smallest_ = min(smallest_, key);
    });
    stored_ = stored;
  }

  __device__ int size() const { return slice_.size(); }
  __device__ int first_token(int thread) const { return slice_.first_token(thread); }
  // The smallest key of this thread's tokens; last_key if it has none.
  __device__ std::uint32_t smallest() const { return smallest_; }
  // Calls f(token, key) for the thread's tokens in the vocabulary's order.
  template <int unrolled, class F>
  __device__ __forceinline__ void for_each(F&& f) const {
    if (stored_) {
      const int first = slice_.first_token(threadIdx.x), size = slice_.size();
#pragma unroll unrolled
      for (int i = 0; i < size; ++i) f(first + i, stored_[i * sample_threads + threadIdx.x]);
    } else {
      slice_.template for_each<false>([&](int token, float x) { f(token, key_of(x)); });
    }
  }
  // The key of token i of another thread's slice, which has more than i tokens. A barrier of the CTA has to lie
  // between.
  __device__ std::uint32_t at(int thread, int i) const {
    return stored_ ? stored_[i * sample_threads + thread] : key_of(slice_.at(slice_.first_token(thread) + i));
  }

 private:
  __device__ std::uint32_t key_of(float x) const { return sampling_key(x, largest_, per_temperature_); }

  const RowSlice<T, vector>& slice_;
  float largest_, per_temperature_;
  std::uint32_t smallest_ = last_key;
  std::uint32_t* stored_ = nullptr;
};

}  // namespace rooftile::gpu
