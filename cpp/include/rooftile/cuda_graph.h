// SPDX-License-Identifier: Apache-2.0
// A CUDA graph of what one thread launches on one stream. It touches no state of others: PyTorch's own graphs take its
// random generator into the capture, and whoever draws random numbers in another thread meanwhile gets an error.
#pragma once

#include "rooftile/context.h"

namespace rooftile {

// What the launches point to is the caller's to keep, workspace too. Not for several threads at once.
class CudaGraph {
 public:
  explicit CudaGraph(Device device);
  ~CudaGraph();
  CudaGraph(const CudaGraph&) = delete;
  CudaGraph& operator=(const CudaGraph&) = delete;

  // The stream to launch on between begin() and end(), a cudaStream_t.
  void* stream() const { return stream_; }
  void begin();
  // Makes the graph of what was launched. It takes the place of the one before.
  void end();
  // Ends a capture whose launches failed. The graph before stays.
  void abandon() noexcept;
  // Queues one run of the graph on `stream`.
  void launch(void* stream) const;

 private:
  Device device_;
  void* stream_ = nullptr;
  void* exec_ = nullptr;  // cudaGraphExec_t
};

}  // namespace rooftile
