// SPDX-License-Identifier: Apache-2.0
#include "tensor_caster.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>

namespace rooftile::python {

// DLPack 1.3, "DLManagedTensorVersioned".
struct ManagedTensor {
  struct {
    std::uint32_t major, minor;
  } version;
  void* context;
  void (*deleter)(ManagedTensor*);
  std::uint64_t flags;
  nb::dlpack::dltensor tensor;
};

// DLPack, "DLManagedTensor": as it was before versions.
struct UnversionedTensor {
  nb::dlpack::dltensor tensor;
  void* context;
  void (*deleter)(UnversionedTensor*);
};

// DLPack 1.3, "DLPackExchangeAPI": the part of its layout that is used.
struct ExchangeTable {
  struct {
    std::uint32_t major, minor;
  } version;
  ExchangeTable* previous;
  int (*managed_tensor_allocator)(nb::dlpack::dltensor* like, ManagedTensor** out, void* error,
                                  void (*set_error)(void* error, const char* kind, const char* message));
  void* managed_tensor_from_py_object;
  void* managed_tensor_to_py_object;
  int (*dltensor_from_py_object)(void* object, nb::dlpack::dltensor* out);
  int (*current_work_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};

// NumPy's PyArrayObject_fields, which its own macros read: the part that is used. It is the same in NumPy 1 and 2.
struct NumpyArray {
  PyObject head;
  char* data;
  int ndim;
  Py_ssize_t *shape, *stride;  // strides in bytes
  PyObject *base, *dtype;
};

std::string text_of(nb::handle h) {
  nb::object text = nb::isinstance<nb::str>(h) ? nb::borrow(h)  // PyObject_Str runs signal handlers
                                               : nb::steal(PyObject_Str(h.ptr()));
  if (text.is_valid()) text = nb::steal(PyUnicode_AsEncodedString(text.ptr(), "utf-8", "backslashreplace"));
  if (text.is_valid()) return {PyBytes_AsString(text.ptr()), static_cast<std::size_t>(PyBytes_Size(text.ptr()))};
  if (!PyErr_ExceptionMatches(PyExc_Exception)) throw nb::python_error();  // KeyboardInterrupt and the like
  PyErr_Clear();
  return "?";
}

namespace {

constexpr double address_space = 0x1p57;  // bytes: no machine has more
constexpr int dl_cpu = 1, dl_cuda = 2, dl_cuda_host = 3;
constexpr std::uint32_t dl_major = 1;  // of another one nothing but version and deleter is known
constexpr std::uint64_t dl_flag_read_only = 1;

std::string python_type(nb::handle h) {
  nb::object type = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(h.ptr())));
  return text_of(type.attr("__name__"));
}

std::string module_of(nb::handle h) {
  nb::object type = nb::borrow(reinterpret_cast<PyObject*>(Py_TYPE(h.ptr())));
  return text_of(type.attr("__module__"));
}

// Whether an ndarray has ml_dtypes' bfloat16, for which NumPy has no DLPack code. A dtype's name is made by Python
// code, in which a signal handler may run: only that of a dtype which is not NumPy's own (kind V) is asked for.
bool is_bfloat16(nb::handle array) {
  nb::object dtype = nb::getattr(array, "dtype", nb::none());
  return text_of(nb::getattr(dtype, "kind", nb::none())) == "V" && text_of(dtype) == "bfloat16";
}

// Facts about one Python type, determined once per type.
struct TypeFacts {
  PyTypeObject* type = nullptr;
  bool numpy = false;  // numpy.ndarray, exactly
  bool torch = false;  // torch.Tensor or torch.nn.Parameter, exactly
  bool torch_subclass = false;
  bool masked = false;                   // numpy.ma.MaskedArray, whose mask DLPack leaves behind
  const ExchangeTable* table = nullptr;  // null: no usable table
};

bool is_exact_numpy(nb::handle type) {
  return nb::hasattr(type, "__module__") && text_of(type.attr("__module__")) == "numpy" &&
         text_of(type.attr("__name__")) == "ndarray";
}

bool is_exact_torch(nb::handle type) {
  if (!nb::hasattr(type, "__module__")) return false;
  const auto module = text_of(type.attr("__module__"));
  const auto name = text_of(type.attr("__name__"));
  return (module == "torch" && name == "Tensor") || (module == "torch.nn.parameter" && name == "Parameter");
}

TypeFacts find_facts(PyTypeObject* type) {
  TypeFacts facts{type};
  nb::object t = nb::borrow(reinterpret_cast<PyObject*>(type));
  facts.numpy = is_exact_numpy(t);
  facts.torch = is_exact_torch(t);
  if (!facts.torch && nb::hasattr(t, "__mro__"))
    for (nb::handle base : nb::borrow<nb::tuple>(t.attr("__mro__"))) {
      facts.torch_subclass |= is_exact_torch(base);
      facts.masked |= text_of(base.attr("__name__")) == "MaskedArray";
    }
  if (facts.torch && nb::hasattr(t, "__dlpack_c_exchange_api__")) {
    nb::object capsule = t.attr("__dlpack_c_exchange_api__");
    const auto* table = static_cast<const ExchangeTable*>(PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
    if (!table) PyErr_Clear();
    if (table && table->version.major == dl_major && table->dltensor_from_py_object) facts.table = table;
  }
  return facts;
}

// The few types a process passes to us, newest first. Guarded by the GIL, which a caller may let go of: it gets a copy.
TypeFacts facts_of(nb::handle h) {
  static TypeFacts known[8];
  PyTypeObject* type = Py_TYPE(h.ptr());
  for (const TypeFacts& f : known)
    if (f.type == type) return f;
  const TypeFacts facts = find_facts(type);
  Py_INCREF(reinterpret_cast<PyObject*>(type));  // so that the address stays this type's
  PyTypeObject* const oldest = known[7].type;
  std::memmove(known + 1, known, sizeof known - sizeof *known);
  known[0] = facts;
  Py_XDECREF(reinterpret_cast<PyObject*>(oldest));  // last: the end of a type may run Python
  return facts;
}

bool grad_mode_on() {
  static nb::handle is_grad_enabled = nb::object(nb::module_::import_("torch").attr("is_grad_enabled")).release();
  return nb::cast<bool>(is_grad_enabled());
}

// Whether torch.jit.trace (or torch.onnx.export through it) records the thread's calls: it would keep outputs and leave
// out what fills them.
bool recorded_by_trace() {
  static nb::handle is_tracing = nb::object(nb::module_::import_("torch._C").attr("_is_tracing")).release();
  return nb::cast<bool>(is_tracing());
}

// Whether the thread is inside torch.autograd.forward_ad.dual_level(); tensors can be dual only there.
bool dual_level_entered() {
  static PyObject* const names =
      PyModule_GetDict(nb::object(nb::module_::import_("torch.autograd.forward_ad")).release().ptr());
  static PyObject* const level = nb::str("_current_level").release().ptr();
  PyObject* const value = PyDict_GetItemWithError(names, level);  // borrowed
  return value && PyLong_AsLong(value) >= 0;
}
bool is_dual(nb::handle h) {
  nb::module_ forward_ad = nb::module_::import_("torch.autograd.forward_ad");
  return !forward_ad.attr("unpack_dual")(h).attr("tangent").is_none();
}

// The descriptor of a tensor's attribute. A lookup in each tensor costs as much as reading the attribute, so the type
// is asked once. torch.Tensor and Parameter inherit the same descriptors from TensorBase: either type may come first.
struct TensorAttribute {
  PyObject* descriptor;  // outlives the interpreter's shutdown
  descrgetfunc get;

  TensorAttribute(nb::handle tensor, const char* name)
      : descriptor(
            nb::object(nb::handle(reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()))).attr(name)).release().ptr()),
        get(reinterpret_cast<descrgetfunc>(PyType_GetSlot(Py_TYPE(descriptor), Py_tp_descr_get))) {}

  nb::object of(nb::handle tensor) const {
    return valid(get(descriptor, tensor.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(tensor.ptr()))));
  }
  nb::object call(nb::handle tensor) const {
    return valid(PyObject_CallFunctionObjArgs(descriptor, tensor.ptr(), nullptr));
  }

 private:
  static nb::object valid(PyObject* value) {
    if (!value) nb::raise_python_error();
    return nb::steal(value);
  }
};

bool requires_grad(nb::handle tensor) {
  static const TensorAttribute attribute(tensor, "requires_grad");
  return attribute.of(tensor).ptr() == Py_True;
}
bool is_neg(nb::handle tensor) {
  static const TensorAttribute attribute(tensor, "is_neg");
  return attribute.call(tensor).ptr() == Py_True;
}

[[noreturn]] void refuse(ErrorKind kind, const char* op, const char* argument, const std::string& why) {
  fail(kind, op, ": ", argument, " ", why);
}

// Takes the pending Python error and returns its text.
std::string take_python_error() {
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  std::string text = value ? text_of(nb::handle(value)) : "unknown error";
  Py_XDECREF(type);
  Py_XDECREF(value);
  Py_XDECREF(trace);
  return text.substr(0, text.find('\n'));  // torch appends a C++ stack trace
}

bool is_true(nb::handle h, const char* attribute) { return nb::getattr(h, attribute, nb::none()).ptr() == Py_True; }

// Whether a tensor stands for others, as inside torch.vmap.
bool is_transformed(nb::handle h) {
  try {
    return nb::cast<bool>(nb::module_::import_("torch._C._functorch").attr("is_functorch_wrapped_tensor")(h));
  } catch (nb::python_error&) {
    return false;  // a torch without it
  }
}

// Why the exchange table could not read a torch tensor: what it is, before what the pending Python error says of it.
std::string unreadable(nb::handle h) {
  const std::string reason = take_python_error();
  const std::string layout = text_of(nb::getattr(h, "layout", nb::none()));
  std::string what;
  if (is_transformed(h))
    what = "it stands for others in torch.vmap or torch.func, whose transforms no op takes part in";
  else if (is_true(h, "is_meta")) what = "it is on the meta device, which has no memory";
  else if (is_true(h, "is_nested")) what = "it is a nested tensor";
  else if (is_true(h, "is_quantized")) what = "it is quantized by torch (" + text_of(h.attr("dtype")) + ")";
  else if (layout != "torch.strided") return "it has layout " + layout + "; expected torch.strided (" + reason + ")";
  else what = "it is a " + python_type(h) + " without memory of its own";
  return what + "; expected a plain tensor with memory (" + reason + ")";
}

DType dtype_of(nb::dlpack::dtype t, const char* op, const char* argument) {
  struct Known {
    int code, bits;
    DType dtype;
  };
  constexpr Known known[] = {{2, 32, DType::f32}, {2, 16, DType::f16}, {4, 16, DType::bf16}, {0, 32, DType::i32},
                             {0, 64, DType::i64}, {1, 8, DType::u8},   {0, 8, DType::i8},    {10, 8, DType::f8_e4m3}};
  for (const Known& k : known)
    if (k.code == t.code && k.bits == t.bits && t.lanes == 1) return k.dtype;
  static constexpr const char* families[] = {"int", "uint", "float", "handle", "bfloat", "complex", "bool"};
  const std::string family = t.code < 7 ? families[t.code] : "DLPack type code " + std::to_string(t.code) + ", ";
  refuse(ErrorKind::type, op, argument,
         "has dtype " + (t.code == 6 ? family : family + std::to_string(t.bits)) +
             (t.lanes == 1 ? "" : " in " + std::to_string(t.lanes) + " lanes") +
             ", which no op takes (float32, float16, bfloat16, float8_e4m3fn, int8, uint8, int32, int64)");
}

Device device_of(int type, int index, const char* op, const char* argument) {
  if (type == dl_cpu || type == dl_cuda_host) return {DeviceType::cpu, 0};
  if (type == dl_cuda) return {DeviceType::cuda, index};
  refuse(ErrorKind::value, op, argument,
         "is on a device rooftile does not know (DLPack device type " + std::to_string(type) + ")");
}

// d: as `t`, but for its memory. Addresses are computed in 64 bits, of elements that no address space could hold as
// well.
void take_memory(TensorView& t, const nb::dlpack::dltensor& d, const char* op, const char* argument) {
  if (static_cast<double>(d.byte_offset) >= address_space)
    refuse(
        ErrorKind::value, op, argument,
        "has a byte_offset that leads out of any memory (" + std::to_string(d.byte_offset) + ", " + describe(t) + ")");
  double reach = 0;
  for (int i = 0; i < t.ndim; ++i)
    reach += std::abs(static_cast<double>(t.shape[i] - 1) * static_cast<double>(t.stride[i]));
  if (reach * static_cast<double>(size_of(t.dtype)) + static_cast<double>(d.byte_offset) >= address_space &&
      t.numel() > 0)
    refuse(ErrorKind::value, op, argument, "has strides that lead out of any memory (" + describe(t) + ")");
  t.data = d.data ? static_cast<char*>(d.data) + d.byte_offset : nullptr;
  if (reinterpret_cast<std::uintptr_t>(t.data) % size_of(t.dtype) != 0)
    refuse(ErrorKind::value, op, argument, "is not aligned to its elements (" + describe(t) + "); copy it");
  if (!t.data && t.numel() > 0) refuse(ErrorKind::value, op, argument, "has no memory behind it (" + describe(t) + ")");
}

TensorView view_of(const nb::dlpack::dltensor& d, const char* op, const char* argument) {
  if (d.ndim < 0 || d.ndim > TensorView::max_ndim)
    refuse(
        ErrorKind::value, op, argument,
        "has " + std::to_string(d.ndim) + " dimensions, 0 to " + std::to_string(TensorView::max_ndim) + " are taken");
  if (d.ndim > 0 && !d.shape)
    refuse(ErrorKind::value, op, argument, "has " + std::to_string(d.ndim) + " dimensions and no shape");
  TensorView t;
  t.dtype = dtype_of(d.dtype, op, argument);
  t.device = device_of(d.device.device_type, d.device.device_id, op, argument);
  t.ndim = d.ndim;
  bool empty = false;
  for (int i = 0; i < d.ndim; ++i) {
    if (d.shape[i] < 0) refuse(ErrorKind::value, op, argument, "has a negative size in dimension " + std::to_string(i));
    empty |= (t.shape[i] = d.shape[i]) == 0;
  }
  std::int64_t contiguous = 1;
  for (int i = d.ndim - 1; i >= 0; --i) {  // what has no elements has no strides of its own
    t.stride[i] = d.strides && !empty ? d.strides[i] : contiguous;
    if (__builtin_mul_overflow(contiguous, d.shape[i], &contiguous))
      contiguous = std::numeric_limits<std::int64_t>::max();
  }
  take_memory(t, d, op, argument);
  return t;
}

// What __dlpack__ gives. Unversioned is what most give sooner; of what will be written the other one says whether it
// may be. Producers give one of them alone: old ones take no max_version (TypeError), and what is read-only has no
// unversioned capsule (BufferError).
nb::object call_dlpack(nb::handle h, bool versioned) {
  nb::object method = h.attr("__dlpack__");
  return versioned ? method(nb::arg("max_version") = nb::make_tuple(dl_major, 0)) : method();
}
nb::object dlpack_of(nb::handle h, bool writes) {
  try {
    return call_dlpack(h, writes);
  } catch (nb::python_error& e) {
    if (!e.matches(PyExc_BufferError) && !e.matches(PyExc_TypeError)) throw;
  }
  return call_dlpack(h, !writes);
}

// What Python says the shape is: wrappers make outputs by it.
void check_python_shape(nb::handle h, const TensorView& t, const char* op, const char* argument) {
  nb::object shape = nb::getattr(h, "shape", nb::none());
  if (!nb::isinstance<nb::tuple>(shape)) return;
  nb::list sizes;
  for (int i = 0; i < t.ndim; ++i) sizes.append(t.shape[i]);
  if (!shape.equal(nb::tuple(sizes)))
    refuse(ErrorKind::value, op, argument, "says that its shape is " + text_of(shape) + ", and is " + describe(t));
}

}  // namespace

TensorView Args::in(nb::handle h, const char* argument) { return convert(h, argument, false); }
TensorView Args::out(nb::handle h, const char* argument) { return convert(h, argument, true); }

TensorView Args::convert(nb::handle h, const char* argument, bool writes) {
  const TypeFacts facts = facts_of(h);
  if (facts.torch_subclass)
    refuse(ErrorKind::type, op_, argument,
           "is a " + python_type(h) + ", which holds no memory of its own kind; expected a plain torch.Tensor");
  if (facts.masked)
    refuse(ErrorKind::type, op_, argument,
           "is a " + python_type(h) + ", whose mask no op reads; pass filled() or its data");
  if (facts.torch) {
    if (requires_grad(h) && grad_mode_on())
      refuse(ErrorKind::value, op_, argument,
             "requires grad; rooftile is for inference: call it under torch.no_grad() or inference_mode()");
    if (duals_ < 0) {
      if (recorded_by_trace())
        refuse(ErrorKind::not_supported, op_, argument,
               "is recorded by torch.jit.trace, which does not see what rooftile computes; use torch.export or "
               "torch.compile, or call torch.ops.rooftile");
      duals_ = dual_level_entered();
    }
    if (duals_ && is_dual(h))
      refuse(ErrorKind::value, op_, argument,
             "is a dual tensor, whose tangent no op carries on; rooftile is for inference: pass unpack_dual(x).primal");
    if (is_neg(h)) refuse(ErrorKind::value, op_, argument, "is a lazily negated view; call resolve_neg() first");
  }

  torch_ |= facts.torch;
  TensorView t;
  if (facts.table) {
    nb::dlpack::dltensor d;
    if (facts.table->dltensor_from_py_object(h.ptr(), &d) != 0)
      refuse(ErrorKind::type, op_, argument, "cannot be read: " + unreadable(h));
    t = view_of(d, op_, argument);
    table_ = facts.table;
  } else {
    const bool bf16 = python_type(h) == "ndarray" && is_bfloat16(h);
    objects_.push_back(bf16 ? h.attr("view")("uint16") : facts.torch ? h.attr("detach")() : nb::borrow(h));
    auto [d, read_only] = produced(objects_.back(), argument, writes);
    if (bf16) d.dtype = {4, 16, 1};
    t = view_of(d, op_, argument);
    t.read_only =
        writes && (read_only || module_of(h).rfind("jax", 0) == 0);  // jax: immutable, but its capsule does not say so
    if (!facts.numpy && !facts.torch) check_python_shape(h, t, op_, argument);
  }
  if (t.read_only) refuse(ErrorKind::value, op_, argument, "is read-only and would be written");
  return t;
}

std::pair<nb::dlpack::dltensor, bool> Args::produced(nb::handle h, const char* argument, bool writes) {
  const std::string expected = "must be an array that speaks DLPack (torch, NumPy, jax, cupy), got " + python_type(h);
  if (!nb::hasattr(h, "__dlpack__"))
    refuse(ErrorKind::type, op_, argument, expected);  // bytes and the like are no arrays
  nb::object capsule;
  try {
    capsule = dlpack_of(h, writes);
  } catch (nb::python_error& e) {
    if (!e.matches(PyExc_Exception)) throw;                           // KeyboardInterrupt and the like
    nb::object memory = nb::steal(PyMemoryView_FromObject(h.ptr()));  // what is read-only in NumPy before 2.1
    PyErr_Clear();
    nb::ndarray<nb::ro> read;
    if (!memory.is_valid() || !nb::try_cast(memory, read, false))
      refuse(ErrorKind::type, op_, argument,
             expected + ", whose __dlpack__ raised " + text_of(e.type().attr("__name__")) + ": " + text_of(e.value()));
    buffers_.push_back(read);
    const nb::dlpack::dltensor d{const_cast<void*>(static_cast<const void*>(read.data())),
                                 {read.device_type(), read.device_id()},
                                 static_cast<std::int32_t>(read.ndim()),
                                 read.dtype(),
                                 const_cast<std::int64_t*>(read.shape_ptr()),
                                 const_cast<std::int64_t*>(read.stride_ptr()),
                                 0};
    return {d, nb::cast<bool>(memory.attr("readonly"))};
  }
  if (PyCapsule_IsValid(capsule.ptr(), "dltensor")) {
    auto* managed = static_cast<UnversionedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor"));
    PyCapsule_SetName(capsule.ptr(), "used_dltensor");  // ours to give back from here on
    unversioned_.push_back(managed);
    return {managed->tensor, false};
  }
  if (!PyCapsule_IsValid(capsule.ptr(), "dltensor_versioned"))
    refuse(ErrorKind::type, op_, argument,
           expected + ", whose __dlpack__ gave a " + python_type(capsule) + ", expected a capsule with a tensor");
  auto* managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule.ptr(), "dltensor_versioned"));
  PyCapsule_SetName(capsule.ptr(), "used_dltensor_versioned");
  versioned_.push_back(managed);
  if (managed->version.major != dl_major)
    refuse(ErrorKind::type, op_, argument,
           "is a tensor of DLPack " + std::to_string(managed->version.major) + "." +
               std::to_string(managed->version.minor) + ", expected version " + std::to_string(dl_major));
  return {managed->tensor, (managed->flags & dl_flag_read_only) != 0};
}

double Args::number(nb::handle h, const char* argument) {
  const double value = PyFloat_AsDouble(h.ptr());  // takes int, float and anything with __float__
  if (value == -1.0 && PyErr_Occurred()) {
    PyErr_Clear();
    refuse(ErrorKind::type, op_, argument, "must be a number, got " + python_type(h));
  }
  return value;
}

std::int64_t Args::integer(nb::handle h, const char* argument) {
  nb::object index = nb::steal(PyNumber_Index(h.ptr()));  // takes int and anything with __index__, never a float
  const std::int64_t value = index.is_valid() ? PyLong_AsLongLong(index.ptr()) : -1;
  if (value == -1 && PyErr_Occurred()) {
    const bool overflow = PyErr_ExceptionMatches(PyExc_OverflowError);
    PyErr_Clear();
    if (overflow) refuse(ErrorKind::value, op_, argument, "does not fit 64 bits: " + text_of(h));
    refuse(ErrorKind::type, op_, argument, "must be an integer, got " + python_type(h));
  }
  return value;
}

const char* Args::text(nb::handle h, const char* argument) {
  if (!nb::isinstance<nb::str>(h)) refuse(ErrorKind::type, op_, argument, "must be a string, got " + python_type(h));
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(h.ptr(), &size);  // lives as long as the Python string
  if (text && static_cast<Py_ssize_t>(std::strlen(text)) == size) return text;
  PyErr_Clear();
  refuse(ErrorKind::value, op_, argument,
         "must be text " + std::string(text ? "without null characters" : "that UTF-8 can say") + ", got " +
             text_of(nb::repr(h)));
}

Args::~Args() {
  if (lent_) lent_->deleter(lent_);
  for (UnversionedTensor* t : unversioned_)
    if (t->deleter) t->deleter(t);
  for (ManagedTensor* t : versioned_)
    if (t->deleter) t->deleter(t);
}

void Args::lend_to(Context& ctx, nb::handle workspace, nb::handle like) {
  if (workspace.is_none()) return;
  workspace_ = workspace;
  like_ = like;
  ctx.lender = this;
  asks_torch_ = ctx.device.type == DeviceType::cuda && table_ && table_->managed_tensor_allocator &&
                !nb::hasattr(workspace, "keeps_memory");
}

Lender::Memory Args::lend(const Context& ctx, std::size_t bytes) {
  if (asks_torch_) {
    auto size = static_cast<std::int64_t>(bytes);
    nb::dlpack::dltensor wanted;
    wanted.device = {dl_cuda, ctx.device.index};
    wanted.ndim = 1;
    wanted.dtype = {1, 8, 1};  // uint8
    wanted.shape = &size;
    if (table_->managed_tensor_allocator(&wanted, &lent_, nullptr, [](void*, const char*, const char*) {}) == 0) {
      return {static_cast<char*>(lent_->tensor.data) + lent_->tensor.byte_offset, bytes};
    }
    lent_ = nullptr;  // Python asks once more, and raises what torch raises
  }
  nb::gil_scoped_acquire locked;
  objects_.push_back(workspace_(op_, like_, bytes));
  const TensorView t = out(objects_.back(), "workspace");
  if (t.ndim != 1 || (t.shape[0] > 1 && t.stride[0] != 1) || t.device != ctx.device)
    refuse(ErrorKind::value, op_, "workspace",
           "must be one contiguous dimension on " + name(ctx.device) + ", got " + describe(t));
  return {t.data, static_cast<std::size_t>(t.shape[0]) * size_of(t.dtype)};
}

Context Args::context(const TensorView& first, nb::handle stream, nb::handle plan) {
  Context ctx;
  ctx.device = first.device;
  if (!plan.is_none() && !nb::isinstance<nb::str>(plan)) {  // what rt.explain returned, else text() refuses it
    objects_.push_back(nb::getattr(plan, "plan", plan));
    plan = objects_.back();
  }
  if (!plan.is_none()) ctx.variant = text(plan, "plan");
  if (!stream.is_none()) {
    const std::int64_t handle = integer(stream, "stream");
    if (handle < 0)
      refuse(ErrorKind::value, op_, "stream",
             "must be a stream's handle, 0 or more (as torch's stream.cuda_stream), got " + std::to_string(handle));
    ctx.stream = reinterpret_cast<void*>(handle);
  } else if (ctx.device.type == DeviceType::cuda && table_ && table_->current_work_stream) {
    if (table_->current_work_stream(dl_cuda, ctx.device.index, &ctx.stream) != 0)
      refuse(ErrorKind::device, op_, "stream", "cannot be read from torch: " + take_python_error());
  } else if (ctx.device.type == DeviceType::cuda && torch_) {
    nb::object current = nb::module_::import_("torch").attr("cuda").attr("current_stream")(ctx.device.index);
    ctx.stream = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(current.attr("cuda_stream")));
  }
  return ctx;
}

namespace {

// data: of the first element. scale: bytes of a stride of one. size: bytes of an element.
Memory memory_of(const void* data, int ndim, const auto* shape, const auto* stride, std::int64_t scale,
                 std::int64_t size) {
  std::int64_t before = 0, behind = 0;
  for (int i = 0; i < ndim; ++i) {
    if (shape[i] == 0) return {};
    const std::int64_t reach = (shape[i] - 1) * stride[i] * scale;
    (reach < 0 ? before : behind) += reach;
  }
  const auto* first = static_cast<const char*>(data);
  return {first + before, first + behind + size};
}

}  // namespace

Memory Memory::of(const TensorView& t) {
  const auto size = static_cast<std::int64_t>(size_of(t.dtype));
  return memory_of(t.data, t.ndim, t.shape, t.stride, size, size);
}

// ---- HeldArray ----------------------------------------------------------------------------------

namespace {

const NumpyArray& numpy_array(nb::handle h) { return *reinterpret_cast<const NumpyArray*>(h.ptr()); }

// What torch says of a tensor whose type has no exchange table.
nb::object python_facts(nb::handle t) {
  return nb::make_tuple(t.attr("data_ptr")(), t.attr("shape"), t.attr("stride")(), t.attr("dtype"), t.attr("device"));
}

// How often torch has changed the values in place, -1 where it does not count (inference tensors).
std::int64_t version_of(nb::handle t) {
  static const TensorAttribute attribute(t, "_version");
  PyObject* const version = attribute.get(attribute.descriptor, t.ptr(), reinterpret_cast<PyObject*>(Py_TYPE(t.ptr())));
  const std::int64_t value = version ? PyLong_AsLongLong(version) : -1;
  Py_XDECREF(version);
  PyErr_Clear();
  return value;
}

}  // namespace

TensorView HeldArray::read(Args& args) const {
  if (array_.is_none()) return {};
  return use_ == Use::written ? args.out(array_, name_) : args.in(array_, name_);
}

TensorView HeldArray::take(Args& args) {
  type_ = nullptr;  // as_taken() returns false until take() succeeds
  storage_ = facts_ = nb::object();
  const TensorView t = read(args);
  if (!t.given()) return t;
  const TypeFacts facts = facts_of(array_);
  table_ = facts.table;
  memory_ = Memory::of(t);
  if (facts.torch) {
    take_torch(args, t);
  } else if (facts.numpy) {
    const NumpyArray& a = numpy_array(array_);
    seen_ = {.data = a.data,
             .device = {},
             .ndim = a.ndim,
             .dtype = {},
             .shape = nullptr,
             .strides = nullptr,
             .byte_offset = 0};
    std::copy_n(a.shape, a.ndim, shape_);
    std::copy_n(a.stride, a.ndim, stride_);
    facts_ = nb::borrow(a.dtype);
    nb::handle owner = array_;  // the array that views are of
    while (numpy_array(owner).base && facts_of(numpy_array(owner).base).numpy) owner = numpy_array(owner).base;
    const NumpyArray& whole = numpy_array(owner);
    const auto size = nb::cast<std::int64_t>(owner.attr("itemsize"));
    memory_ = memory_of(whole.data, whole.ndim, whole.shape, whole.stride, 1, size);
  }
  if (facts.torch || facts.numpy) type_ = facts.type;  // of any other framework nothing is known to last
  return t;
}

void HeldArray::take_torch(const Args& args, const TensorView& t) {
  storage_ = array_.attr("untyped_storage")();
  bytes_ = PyObject_Size(storage_.ptr());
  const auto* storage = reinterpret_cast<const char*>(nb::cast<std::uintptr_t>(storage_.attr("data_ptr")()));
  memory_ = {storage, storage + bytes_};
  const Memory own = Memory::of(t);
  const std::int64_t end = own.end - storage;
  if (t.numel() > 0 && (own.begin < storage || end > bytes_))
    refuse(ErrorKind::value, args.op(), name_,
           "needs " + std::to_string(end) + " bytes of its storage, which was resized to " + std::to_string(bytes_) +
               " (" + describe(t) + ")");
  version_ = use_ == Use::versioned ? version_of(array_) : -1;
  if (!table_) {
    facts_ = python_facts(array_);
  } else if (table_->dltensor_from_py_object(array_.ptr(), &seen_) != 0) {
    refuse(ErrorKind::type, args.op(), name_, "cannot be read: " + unreadable(array_));
  } else {
    std::copy_n(seen_.shape, seen_.ndim, shape_);
    std::copy_n(seen_.strides, seen_.ndim, stride_);
  }
}

bool HeldArray::as_taken() const {
  if (array_.is_none()) return true;
  if (!type_ || Py_TYPE(array_.ptr()) != type_) return false;
  if (!storage_.is_valid()) {
    const NumpyArray& a = numpy_array(array_);
    return a.data == seen_.data && a.ndim == seen_.ndim && a.dtype == facts_.ptr() &&
           std::equal(a.shape, a.shape + a.ndim, shape_) && std::equal(a.stride, a.stride + a.ndim, stride_);
  }
  if (PyObject_Size(storage_.ptr()) != bytes_) return false;
  if (version_ >= 0 && version_of(array_) != version_) return false;
  if (!table_) return python_facts(array_).equal(facts_);
  nb::dlpack::dltensor now;
  if (table_->dltensor_from_py_object(array_.ptr(), &now) != 0) {
    PyErr_Clear();
    return false;
  }
  bool same = now.data == seen_.data && now.byte_offset == seen_.byte_offset && now.ndim == seen_.ndim &&
              now.dtype.code == seen_.dtype.code && now.dtype.bits == seen_.dtype.bits &&
              now.device.device_type == seen_.device.device_type && now.device.device_id == seen_.device.device_id;
  for (int i = 0; same && i < now.ndim; ++i) same = now.shape[i] == shape_[i] && now.strides[i] == stride_[i];
  return same;
}

}  // namespace rooftile::python
