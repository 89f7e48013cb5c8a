// SPDX-License-Identifier: Apache-2.0
// The extension module rooftile._C. Private: the public names and their docs are in python/rooftile.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <new>
#include <string>
#include <vector>

#include "bind.h"
#include "calls.h"
#include "tensor_caster.h"
#include "rooftile/build.h"
#include "rooftile/error.h"
#include "rooftile/names.h"

namespace nb = nanobind;

namespace rooftile::python {
namespace {

const char* python_class(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::value:
      return "ArgumentError";
    case ErrorKind::type:
      return "ArgumentTypeError";
    case ErrorKind::not_supported:
      return "NotSupportedError";
    case ErrorKind::device:
      return "DeviceError";
  }
  return "RooftileError";
}

void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const Error& e) {
    nb::object type = nb::module_::import_("rooftile.errors").attr(python_class(e.kind()));
    PyErr_SetString(type.ptr(), e.what());
  } catch (const std::bad_alloc&) {  // scratch of a CPU kernel, lists of a call
    nb::object type = nb::module_::import_("rooftile.errors").attr("OutOfMemoryError");
    PyErr_SetString(type.ptr(), "no memory on the host for what this call needs besides its arguments");
  }
}

}  // namespace
}  // namespace rooftile::python

NB_MODULE(_C, m) {
  using namespace rooftile;
  nb::register_exception_translator(python::translate);
  nb::set_leak_warnings(false);  // torch.compile keeps what it traced, our handles too, until the process ends
  m.attr("version") = ROOFTILE_VERSION;
  m.attr("binding_mode") = ROOFTILE_MODE;
  m.def("quoted", [](const nb::str& text) { return quoted(python::text_of(text)); });
  m.def("did_you_mean", [](const nb::str& given, const nb::args& known) {
    std::vector<std::string> names;
    for (nb::handle name : known) names.push_back(python::text_of(name));
    return did_you_mean(python::text_of(given), names);
  });
  m.def("cpu_variants", [] { return cpu_variants(); });
  m.def("gpu_count", [] { return gpu_count(); });
  m.def("gpu_backend", [] { return gpu_backend(); });
  m.def(
      "warmup", [](int device) { warmup({.device = {DeviceType::cuda, device}}); },
      nb::call_guard<nb::gil_scoped_release>());
  m.def("parallel_backend", [] { return parallel_backend(); });
  m.def("parallel_threads", [] { return parallel_threads(); });
  python::bind_attention(m);
  python::bind_calls(m);
  python::bind_explain(m);
  python::bind_fused(m);
  python::bind_gemm(m);
  python::bind_graph(m);
  python::bind_kv_cache(m);
  python::bind_roof(m);
  python::bind_sampling(m);
}
