// SPDX-License-Identifier: Apache-2.0
#include "rooftile/cuda_graph.h"

#include <cuda_runtime.h>

#include "kernels/launch.h"

namespace rooftile {
namespace {

constexpr const char* op = "CudaGraph";

cudaStream_t stream_of(void* stream) { return static_cast<cudaStream_t>(stream); }
cudaGraphExec_t exec_of(void* exec) { return static_cast<cudaGraphExec_t>(exec); }

}  // namespace

CudaGraph::CudaGraph(Device device) : device_(device) {
  const gpu::DeviceScope scope(op, {.device = device_});
  cudaStream_t stream = nullptr;
  ROOFTILE_CUDA_CHECK(op, cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  stream_ = stream;
}

CudaGraph::~CudaGraph() {
  // A garbage collection may end this one while the thread captures another.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  if (exec_) (void)cudaGraphExecDestroy(exec_of(exec_));  // a run that is queued still ends
  (void)cudaStreamDestroy(stream_of(stream_));
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
}

void CudaGraph::begin() {
  const gpu::DeviceScope scope(op, {.device = device_});
  ROOFTILE_CUDA_CHECK(op, cudaStreamBeginCapture(stream_of(stream_), cudaStreamCaptureModeThreadLocal));
}

void CudaGraph::end() {
  const gpu::DeviceScope scope(op, {.device = device_});
  cudaGraph_t graph = nullptr;
  ROOFTILE_CUDA_CHECK(op, cudaStreamEndCapture(stream_of(stream_), &graph));
  cudaGraphExec_t exec = nullptr;
  const cudaError_t status = cudaGraphInstantiate(&exec, graph, 0);
  (void)cudaGraphDestroy(graph);
  if (status != cudaSuccess) gpu::fail_cuda(op, "cudaGraphInstantiate", status);
  if (exec_) (void)cudaGraphExecDestroy(exec_of(exec_));
  exec_ = exec;
}

void CudaGraph::abandon() noexcept {
  cudaGraph_t graph = nullptr;
  (void)cudaStreamEndCapture(stream_of(stream_), &graph);
  if (graph) (void)cudaGraphDestroy(graph);
  (void)cudaGetLastError();  // of a capture that a call made invalid
}

void CudaGraph::launch(void* stream) const {
  ROOFTILE_CHECK(exec_ != nullptr, op, ": launch needs a graph, got none: capture comes first");
  const gpu::DeviceScope scope(op, {.device = device_});
  ROOFTILE_CUDA_CHECK(op, cudaGraphLaunch(exec_of(exec_), stream_of(stream)));
}

}  // namespace rooftile
