// SPDX-License-Identifier: Apache-2.0
// The one file that knows DLPack's structs, its C exchange table, NumPy's array struct and TensorView.
//
// torch tensors come through the C exchange table of their type (0.1 us, no reference taken, no synchronisation);
// all other arrays come through __dlpack__ (NumPy, jax, cupy, older torch), and every field of their capsule
// is checked.
// Guards: a torch subclass (FakeTensor, DTensor), a tensor that needs grad while grad mode is on, a call that
// torch.jit.trace records, a negated view, memory that is not there: each a typed error that names the argument.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <utility>
#include <vector>

#include "rooftile/context.h"
#include "rooftile/error.h"
#include "rooftile/tensor.h"

namespace nb = nanobind;

namespace rooftile::python {

struct ExchangeTable;
struct ManagedTensor;
struct UnversionedTensor;

// What str(h) shows, as UTF-8; half of a surrogate pair as a backslash and its number.
std::string text_of(nb::handle h);

// Converts the tensor arguments of one call and keeps alive what must outlive it.
class Args final : public Lender {
 public:
  explicit Args(const char* op) : op_(op) {}
  Args(const Args&) = delete;
  ~Args();  // with the GIL

  TensorView in(nb::handle h, const char* argument);  // a tensor
  TensorView optional(nb::handle h, const char* argument) { return h.is_none() ? TensorView{} : in(h, argument); }
  TensorView out(nb::handle h, const char* argument);  // a tensor that will be written
  TensorView optional_out(nb::handle h, const char* argument) { return h.is_none() ? TensorView{} : out(h, argument); }

  double number(nb::handle h, const char* argument);
  std::int64_t integer(nb::handle h, const char* argument);
  const char* text(nb::handle h, const char* argument);  // a string without null characters

  const char* op() const { return op_; }

  // Where `first` lies, on its framework's current stream unless `stream` (an integer handle) is given.
  // plan: None, a variant's name or a plan's text, or what has one as `plan` (rooftile.explain's result).
  Context context(const TensorView& first, nb::handle stream, nb::handle plan);
  // Lets ops that run on `ctx` borrow workspace (GPU ops do): torch's memory on its current stream through the exchange
  // table (1.3 us faster than through Python), else the result of `workspace(op, like, bytes)`, a one-dimensional
  // tensor on the call's device. Both arguments outlive the call. workspace None: ops cannot borrow. One with an
  // attribute keeps_memory is always called: torch takes its memory back when the call ends.
  void lend_to(Context& ctx, nb::handle workspace, nb::handle like);

 private:
  Memory lend(const Context&, std::size_t bytes) override;  // without the GIL
  TensorView convert(nb::handle h, const char* argument, bool writes);
  // The tensor of __dlpack__ and whether it is read-only; held until the call ends.
  std::pair<nb::dlpack::dltensor, bool> produced(nb::handle h, const char* argument, bool writes);

  const char* op_;
  std::vector<UnversionedTensor*> unversioned_;  // capsules' tensors, released when the call ends
  std::vector<ManagedTensor*> versioned_;
  std::vector<nb::ndarray<nb::ro>> buffers_;
  std::vector<nb::object> objects_;
  const ExchangeTable* table_ = nullptr;  // of the last torch tensor seen
  bool torch_ = false;                    // whether a torch tensor was seen
  int duals_ = -1;                        // whether tensors may be dual; -1: unknown yet
  nb::handle workspace_, like_;           // of lend_to
  bool asks_torch_ = false;               // for workspace, without Python
  ManagedTensor* lent_ = nullptr;         // by torch, released when the call ends
};

// A range of addresses.
struct Memory {
  const char *begin = nullptr, *end = nullptr;
  // From the lowest to the highest byte of the elements; empty where there are none.
  static Memory of(const TensorView&);
  bool overlaps(const Memory& other) const {
    return begin < end && other.begin < other.end && begin < other.end && other.begin < end;
  }
  bool operator==(const Memory&) const = default;
};

// An array that outlives the call that checked it: of a weight, of a cache. Its framework may move the memory
// (share_memory_, storage.resize_), give the array another (data=, swap_tensors) or another shape (resize_), so every
// call asks as_taken(), and takes and checks it again where that is false.
class HeldArray {
 public:
  enum class Use {
    read,
    written,
    versioned
  };  // versioned: read, and changed values count as a change where torch counts them
  HeldArray(nb::handle array, const char* name, Use use) : array_(nb::borrow(array)), name_(name), use_(use) {}

  nb::handle object() const { return array_; }
  TensorView read(Args& args) const;  // as Args does; no tensor for None
  // The same, remembered for as_taken(). Refuses, besides what Args does, a tensor whose memory was made smaller than
  // its shape.
  TensorView take(Args&);
  // Whether it has the memory, shape, strides, dtype and device that take() found. Less than 0.1 us of a torch tensor.
  bool as_taken() const;
  // The memory that it is a part of, as take() found it: its storage (torch), all of the array that it is a view of
  // (NumPy), else its own elements.
  const Memory& memory() const { return memory_; }

 private:
  void take_torch(const Args&, const TensorView&);

  nb::object array_;
  const char* name_;
  Use use_;

  PyTypeObject* type_ = nullptr;
  const ExchangeTable* table_ = nullptr;
  nb::dlpack::dltensor seen_{};  // torch by its table, and NumPy
  std::int64_t shape_[TensorView::max_ndim], stride_[TensorView::max_ndim];
  nb::object storage_, facts_;  // torch: its memory; without a table what Python says of it
  Py_ssize_t bytes_ = 0;        // of storage_
  std::int64_t version_ = -1;   // -1: not counted
  Memory memory_;
};

}  // namespace rooftile::python
