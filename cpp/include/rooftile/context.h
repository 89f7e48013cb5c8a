// SPDX-License-Identifier: Apache-2.0
// Where a call runs; passed to every op. Between calls the library keeps only waiting CPU threads and facts about the
// machine.
#pragma once

#include <cstddef>

#include "rooftile/tensor.h"

namespace rooftile {

struct Context;

// Lends a call the device memory it needs, once the op knows how much: at least `bytes`, until the call has returned.
// May throw.
class Lender {
 public:
  struct Memory {
    void* data = nullptr;
    std::size_t bytes = 0;
  };
  virtual Memory lend(const Context&, std::size_t bytes) = 0;

 protected:
  ~Lender() = default;
};

struct Context {
  Device device;
  void* stream = nullptr;     // a cudaStream_t; this header knows no CUDA
  void* workspace = nullptr;  // device memory lent by the caller; the CPU backend needs none
  std::size_t workspace_bytes = 0;
  Lender* lender = nullptr;  // lends workspace instead, at most once a call
  int threads = 0;           // CPU threads; 0: as many as the process' OpenMP pool has, else one per core
  // Forces a plan. On the CPU: the name of a kernel variant ("reference", "portable", "avx2", ...). On a GPU, for
  // attention over a cache and for products: the text of a plan (explain.h).
  const char* variant = nullptr;
};

// The variant that ran, for reports: "cpu_avx512_bf16_int4-kivi_d64".
struct KernelName {
  char text[64] = {};
};

}  // namespace rooftile
