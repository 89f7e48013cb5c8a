// SPDX-License-Identifier: Apache-2.0
// Checks that every op makes, in the caller's words: "rms_norm: weight must be ...". One fact each.
#pragma once

#include <initializer_list>
#include <limits>

#include "cpu/kernels.h"
#include "rooftile/kv_cache.h"
#include "rooftile/context.h"
#include "rooftile/error.h"
#include "rooftile/names.h"
#include "rooftile/tensor.h"

namespace rooftile::check {

// Whether two indices may lead to one element. Views whose dimensions interleave without meeting count as well.
bool overlaps_itself(const TensorView& t);

inline constexpr std::int64_t max_count = std::numeric_limits<std::int32_t>::max();

inline constexpr int max_heads =
    65536;  // of queries and of KV: products with head_dim and a chunk of tokens stay 32 bits

// Names one argument of one op and checks it.
class Arg {
 public:
  Arg(const char* op, const char* argument, const TensorView& t) : op_(op), argument_(argument), t_(t) {}

  const Arg& given() const {
    ROOFTILE_CHECK_KIND(type, t_.given(), op_, ": ", argument_, " must be a tensor, got None");
    return *this;
  }
  const Arg& ndim(int at_least, int at_most) const {
    ROOFTILE_CHECK(t_.ndim >= at_least && t_.ndim <= at_most, op_, ": ", argument_, " must have ", at_least,
                   at_least == at_most ? "" : " to " + std::to_string(at_most), " dimensions, got ", describe(t_));
    return *this;
  }
  const Arg& shape(std::initializer_list<std::int64_t> expected, const char* names) const {
    bool same = t_.ndim == static_cast<int>(expected.size());
    for (int i = 0; same && i < t_.ndim; ++i) same = t_.shape[i] == expected.begin()[i];
    if (!same) {
      std::string text;
      for (std::int64_t e : expected) text += (text.empty() ? "" : ", ") + std::to_string(e);
      fail(ErrorKind::value, op_, ": ", argument_, " must be ", names, " = [", text, "], got ", describe(t_));
    }
    return *this;
  }
  const Arg& shape_of(const TensorView& other, const char* other_name) const {
    ROOFTILE_CHECK(same_shape(t_, other), op_, ": ", argument_, " must have ", other_name, "'s shape ",
                   shape_text(other), ", got ", describe(t_));
    return *this;
  }
  const Arg& dtype(std::initializer_list<DType> allowed) const {
    for (DType d : allowed)
      if (t_.dtype == d) return *this;
    std::string text;
    for (DType d : allowed) text += (text.empty() ? "" : " or ") + std::string(name(d));
    fail(ErrorKind::type, op_, ": ", argument_, " must be ", text, ", got ", describe(t_));
  }
  const Arg& activation() const { return dtype({DType::f32, DType::f16, DType::bf16}).countable(); }
  // Kernels count along a dimension, and rows, in 32 bits. Elements that are not there do not bound either.
  const Arg& countable() const {
    for (int i = 0; i < t_.ndim; ++i)
      ROOFTILE_CHECK(t_.shape[i] <= max_count, op_, ": ", argument_, " must have sizes of at most ", max_count,
                     ", got ", describe(t_));
    return *this;
  }
  const Arg& device(Device expected, const char* whose) const {
    ROOFTILE_CHECK(t_.device == expected, op_, ": ", argument_, " must be on ", whose, "'s device ", name(expected),
                   ", got ", describe(t_));
    return *this;
  }
  const Arg& writable() const {
    ROOFTILE_CHECK(!t_.read_only, op_, ": ", argument_, " is read-only and would be written");
    for (int i = 0; i < t_.ndim; ++i)
      ROOFTILE_CHECK(t_.shape[i] <= 1 || t_.stride[i] != 0 || t_.numel() == 0, op_, ": ", argument_,
                     " is expanded (stride 0 in dimension ", i, ") and would be written");
    ROOFTILE_CHECK(!overlaps_itself(t_), op_, ": ", argument_,
                   " has strides that lead two indices to one element, and would "
                   "be written; got ",
                   describe(t_));
    return *this;
  }

 private:
  const char* op_;
  const char* argument_;
  const TensorView& t_;
};

inline bool on_gpu(const Context& ctx) { return ctx.device.type == DeviceType::cuda; }

// The CPU kernels a call runs on. Raises for an op that has no other.
inline const cpu::Kernels& cpu_kernels(const char* op, const Context& ctx) {
  ROOFTILE_CHECK_KIND(not_supported, !on_gpu(ctx), op, ": tensors are on ", name(ctx.device),
                      ", but this op has CPU kernels only");
  return cpu::kernels_for(op, ctx.variant);
}

// Refuses a plan that is forced on an op with but one on a GPU.
inline void refuse_gpu_plan(const char* op, const Context& ctx) {
  ROOFTILE_CHECK_KIND(not_supported, !ctx.variant, op, ": plan ", quoted(ctx.variant ? ctx.variant : ""),
                      " is no variant of the GPU kernels; leave plan out");
}

// Checks common to every call on a GPU: the element type, and that no plan is forced on an op that has but one
// (takes_plan: the family reads it).
inline void check_gpu(const char* op, const Context& ctx, const char* argument, const TensorView& t,
                      bool takes_plan = false) {
  ROOFTILE_CHECK_KIND(not_supported, t.dtype != DType::f32, op, ": ", argument,
                      " must be float16 or bfloat16 on a GPU, got ", describe(t));
  if (!takes_plan) refuse_gpu_plan(op, ctx);
}

// Sequences of one call: lists of the host are made by this number. Without tokens a tensor may claim any.
inline constexpr std::int64_t max_sequences = std::int64_t{1} << 24;
inline void check_sequences(const char* op, const char* argument, const TensorView& t) {
  ROOFTILE_CHECK(t.shape[0] <= max_sequences, op, ": ", argument, " must have a batch of at most ", max_sequences,
                 ", got ", describe(t));
}

// An int32 [batch] argument that lies beside the cache on a GPU, or null; the kernels check its values.
const std::int32_t* device_values(const char* op, const char* argument, const TensorView& t, std::int64_t batch,
                                  Device device);

// Raises the fault a kernel found in an earlier call on this cache (KvCacheView::fault) and sets it to kv_fault_raised.
void raise_fault(const char* op, const KvCacheView& cache);

// Refuses an output that shares memory with another tensor of the call. Interleaved rows of one buffer share
// none, and neither does an absent tensor.
struct Named {
  const char* name;
  const TensorView& t;
};
void check_disjoint(const char* op, const char* out_name, const TensorView& out, std::initializer_list<Named> others);
// Refuses a tensor that shares memory with an array of the cache: an output, or an input of a call that writes the
// cache.
void check_disjoint(const char* op, std::initializer_list<Named> tensors, const KvCacheView& cache);
// Refuses a cache two of whose arrays share memory.
void check_arrays_disjoint(const char* op, const KvCacheView& cache);
// The same for an input that `out` is computed from element by element: out may also be that very view.
void check_overlap(const char* op, const char* out_name, const TensorView& out, const char* in_name,
                   const TensorView& in);

// What every product [..., K] -> [..., N], of a gated one N / 2, asks of its other tensors: y and residual are x's
// shape with that last, bias is [N], all in x's dtype on its device; y shares memory with no input but residual, which
// it may be.
void check_product(const char* op, const TensorView& x, std::int64_t n, bool gated, const TensorView& y,
                   const TensorView& bias, const TensorView& residual);

}  // namespace rooftile::check
