// SPDX-License-Identifier: Apache-2.0
// Implements backend.h in a build without CUDA: every call is refused.
#include "kernels/backend.h"
#include "kernels/decode/plan.h"
#include "kernels/device.h"
#include "rooftile/cuda_graph.h"
#include "rooftile/error.h"

namespace rooftile::gpu {
namespace {

[[noreturn]] void none(const char* op, const Context& ctx) {
  fail(ErrorKind::not_supported, op, ": tensors are on ", name(ctx.device),
       ", but this build of rooftile has CPU kernels only");
}

}  // namespace

DecodeFacts decode_facts(const DecodeKey& key) { return expected_decode_facts(key); }
int device_count() { return 0; }
const char* backend() { return "none: built without CUDA"; }
void warmup(const Context& ctx) {
  fail(ErrorKind::not_supported, "warmup: device is ", name(ctx.device),
       ", but this build of rooftile has CPU kernels only");
}

KernelName norm(const char* op, const Context& ctx, const NormArgs&) { none(op, ctx); }
KernelName norm_pair(const char* op, const Context& ctx, const NormArgs&, const NormArgs&) { none(op, ctx); }
KernelName embedding(const Context& ctx, const EmbeddingArgs&) { none("embedding", ctx); }
KernelName rope(const char* op, const Context& ctx, const TensorView&, const TensorView&, const TensorView&,
                const TensorView&, const TensorView&, const TensorView&, const TensorView&) {
  none(op, ctx);
}
KernelName gated(const char* op, const Context& ctx, const TensorView&, const TensorView&, Gate) { none(op, ctx); }
KernelName softmax(const Context& ctx, const TensorView&, const TensorView&) { none("softmax", ctx); }
KernelName sample(const Context& ctx, const SampleArgs&) { none("sample", ctx); }
KernelName merge_attention(const Context& ctx, const TensorView&, const TensorView&, const TensorView&,
                           const TensorView&, const TensorView&, const TensorView&) {
  none("merge_attention", ctx);
}
KernelName decode_attention(const Context& ctx, const DecodeArgs&) { none("decode_attention", ctx); }
std::size_t decode_workspace(const Context& ctx, const DecodeArgs&) { none("decode_attention", ctx); }
KernelName kv_append(const char* op, const Context& ctx, const AppendArgs&) { none(op, ctx); }
KernelName w4a16_matmul(const char* op, const Context& ctx, const W4MatmulArgs&) { none(op, ctx); }
std::size_t w4a16_workspace(const char* op, const Context& ctx, const W4MatmulArgs&) { none(op, ctx); }
KernelName linear(const Context& ctx, const LinearArgs&) { none("linear", ctx); }
std::size_t linear_workspace(const Context& ctx, const LinearArgs&) { none("linear", ctx); }
void w4_pack(const char* op, const Context& ctx, const W4Arrays&, const W4Arrays&, int) { none(op, ctx); }
void w4_unpack(const char* op, const Context& ctx, const W4View&, const W4Arrays&) { none(op, ctx); }
void w4_quantize(const char* op, const Context& ctx, const TensorView&, int, int, const W4Arrays&) { none(op, ctx); }
void w4_dequantize(const char* op, const Context& ctx, const W4View&, const TensorView&) { none(op, ctx); }
KernelName read_bytes(const Context& ctx, const TensorView&, const TensorView&) { none("read_bytes", ctx); }
void copy_bytes(const char* op, const Context& ctx, void*, const void*, std::size_t, bool) { none(op, ctx); }

}  // namespace rooftile::gpu

namespace rooftile {

CudaGraph::CudaGraph(Device device) {
  fail(ErrorKind::not_supported, "CudaGraph: device is ", name(device),
       ", but this build of rooftile has CPU kernels only");
}
CudaGraph::~CudaGraph() = default;
void CudaGraph::begin() {}
void CudaGraph::end() {}
void CudaGraph::abandon() noexcept {}
void CudaGraph::launch(void*) const {}

}  // namespace rooftile
