// SPDX-License-Identifier: Apache-2.0
#include "bind.h"
#include "rooftile/cuda_graph.h"

namespace rooftile::python {

namespace nb = nanobind;

namespace {

void* stream_of(std::uintptr_t handle) { return reinterpret_cast<void*>(handle); }

// Makes the calls, objects without arguments that launch on graph.stream, and returns what they return.
nb::list capture(CudaGraph& graph, nb::list calls) {
  nb::list results;
  graph.begin();
  try {
    for (nb::handle call : calls) results.append(call());
  } catch (...) {
    graph.abandon();
    throw;
  }
  const nb::gil_scoped_release unlocked;
  graph.end();
  return results;
}

}  // namespace

void bind_graph(nb::module_& m) {
  using namespace nb::literals;
  nb::class_<CudaGraph>(m, "CudaGraph", nb::is_final())
      .def(
          "__init__", [](CudaGraph* self, int device) { new (self) CudaGraph({DeviceType::cuda, device}); }, "device"_a)
      .def_prop_ro("stream", [](const CudaGraph& graph) { return reinterpret_cast<std::uintptr_t>(graph.stream()); })
      .def("capture", &capture, "calls"_a)
      .def(
          "launch", [](const CudaGraph& graph, std::uintptr_t stream) { graph.launch(stream_of(stream)); }, "stream"_a,
          nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace rooftile::python
