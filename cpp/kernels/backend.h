// SPDX-License-Identifier: Apache-2.0
// The functions of the GPU backend that ops call. Ops have checked the arguments as far as the host can see them;
// kernels check the contents of device tensors. Calls that launch kernels are asynchronous on ctx.stream, allocate
// nothing and can be captured; copy_bytes with `wait` blocks. no_cuda.cpp is this backend in a build without CUDA.
#pragma once

#include "core/op_args.h"

namespace rooftile::gpu {

const char* backend();        // "sm_80, compute_80, sm_90a", or why the build has no GPU kernels
void warmup(const Context&);  // loads the kernels that the device runs: see warmup.h

KernelName norm(const char* op, const Context&, const NormArgs&);
// Two norms without a mean whose rows are equally long, at most max_head_norm, in one launch.
KernelName norm_pair(const char* op, const Context&, const NormArgs& first, const NormArgs& second);
KernelName embedding(const Context&, const EmbeddingArgs&);
// A token whose position lies outside the tables gets NaN outputs: the host cannot see positions.
KernelName rope(const char* op, const Context&, const TensorView& q, const TensorView& k, const TensorView& cos,
                const TensorView& sin, const TensorView& positions, const TensorView& q_out, const TensorView& k_out);
KernelName gated(const char* op, const Context&, const TensorView& x, const TensorView& h, Gate);
KernelName softmax(const Context&, const TensorView& x, const TensorView& y);
KernelName sample(const Context&, const SampleArgs&);
KernelName merge_attention(const Context&, const TensorView& out_a, const TensorView& lse_a, const TensorView& out_b,
                           const TensorView& lse_b, const TensorView& out, const TensorView& lse);

// `rows` and `counts` of DecodeArgs are device pointers. ctx lends decode_workspace bytes.
KernelName decode_attention(const Context&, const DecodeArgs&);
std::size_t decode_workspace(const Context&, const DecodeArgs&);

// With cos and sin, the kernel also rotates k and q (q into q_out). The device commits the new lengths.
KernelName kv_append(const char* op, const Context&, const AppendArgs&);

KernelName w4a16_matmul(const char* op, const Context&, const W4MatmulArgs&);
std::size_t w4a16_workspace(const char* op, const Context&, const W4MatmulArgs&);

KernelName linear(const Context&, const LinearArgs&);
std::size_t linear_workspace(const Context&, const LinearArgs&);

// A weight between canonical form and packed layout, or from and to a matrix [N, K].
void w4_pack(const char* op, const Context&, const W4Arrays& canonical, const W4Arrays& packed, int bits);
void w4_unpack(const char* op, const Context&, const W4View&, const W4Arrays& canonical);
void w4_quantize(const char* op, const Context&, const TensorView& weight, int bits, int group,
                 const W4Arrays& canonical);
void w4_dequantize(const char* op, const Context&, const W4View&, const TensorView& to);

KernelName read_bytes(const Context&, const TensorView& x, const TensorView& sink);

// Copies `bytes` between host or device memory, in stream order. wait: returns only after the copy; host memory needs
// this.
void copy_bytes(const char* op, const Context&, void* to, const void* from, std::size_t bytes, bool wait);

}  // namespace rooftile::gpu
