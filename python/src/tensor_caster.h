// SPDX-License-Identifier: Apache-2.0
// The one file that knows DLPack's C exchange table, nb::ndarray and TensorView.
//
// torch tensors come through the C exchange table of their type (0.1 us, no reference taken, no synchronisation);
// everything else through nb::ndarray (NumPy, jax, cupy, older torch). Guards: a torch subclass (FakeTensor, DTensor),
// a tensor that needs grad while grad mode is on, a negated view, memory that is not there: each a typed error that names
// the argument.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <vector>

#include "rooftile/context.h"
#include "rooftile/error.h"
#include "rooftile/tensor.h"

namespace nb = nanobind;

namespace rooftile::python {

// Converts the tensor arguments of one call and keeps alive what must outlive it.
class Args final : public Lender {
 public:
  explicit Args(const char* op) : op_(op) {}
  Args(const Args&) = delete;
  ~Args();   // with the GIL

  TensorView in(nb::handle h, const char* argument);            // a tensor
  TensorView optional(nb::handle h, const char* argument) { return h.is_none() ? TensorView{} : in(h, argument); }
  TensorView out(nb::handle h, const char* argument);           // a tensor that will be written
  TensorView optional_out(nb::handle h, const char* argument) { return h.is_none() ? TensorView{} : out(h, argument); }

  double number(nb::handle h, const char* argument);
  std::int64_t integer(nb::handle h, const char* argument);
  const char* text(nb::handle h, const char* argument);

  const char* op() const { return op_; }

  // Where `first` lies, on its framework's current stream unless `stream` (an integer handle) is given.
  // plan: None or a variant's name.
  Context context(const TensorView& first, nb::handle stream, nb::handle plan);
  // Whoever runs on `ctx` is lent what it asks for, which a GPU's ops do: torch's memory, on its current stream, through its exchange
  // table (1.3 us sooner than through Python), else what `workspace(op, like, bytes)` gives, a tensor of one dimension on the call's
  // device. Both arguments outlive the call. None: nothing is lent.
  void lend_to(Context& ctx, nb::handle workspace, nb::handle like);

 private:
  Memory lend(const Context&, std::size_t bytes) override;   // without the GIL
  TensorView convert(nb::handle h, const char* argument, bool writes);

  const char* op_;
  std::vector<nb::ndarray<nb::ro>> kept_;
  std::vector<nb::object> objects_;
  const struct ExchangeTable* table_ = nullptr;   // of the last torch tensor seen
  bool torch_ = false;                            // whether there was one
  int duals_ = -1;                                // whether tensors may be dual; -1: not asked yet
  nb::handle workspace_, like_;                   // of lend_to
  struct ManagedTensor* lent_ = nullptr;          // by torch, until the call is over
};

}  // namespace rooftile::python
